"""The collectives that a process entered, as torch's flight recorder has them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from verl_profiling import clock
from verl_profiling.identity import WorkerIdentity
from verl_profiling.watch.sums import StageSums, WatchQuestion


def test_a_reply_has_the_collectives_of_its_steps_if_they_are_requested(tmp_path: Path) -> None:
    """By group and sequence number, with the times at which the process entered; else there are none."""
    sums, identity = StageSums(10), WorkerIdentity(role="actor")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        begin_ns = clock.now_ns()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        steps = [(begin_ns - 1, begin_ns), (begin_ns, clock.now_ns())]
        offsets_ns = {identity.clock_domain: 0}
        for requested in (True, False):
            question = WatchQuestion(steps=steps, offsets_ns=offsets_ns, collectives=requested)
            uses = sums.read(identity, question).uses()
            entered = [use.collectives if use is not None else {} for use in uses]
            assert entered[0] == {}
            times = [time_ns for group in entered[1].values() for time_ns in group.values()]
            assert len(times) == (2 if requested else 0)
            assert all(begin_ns <= time_ns <= steps[1][1] for time_ns in times)
    finally:
        dist.destroy_process_group()
