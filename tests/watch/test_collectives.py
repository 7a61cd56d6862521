"""The collectives that a process entered, as torch's flight recorder has them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from verl_profiling import clock
from verl_profiling.identity import WorkerIdentity
from verl_profiling.step_summary import RankUse, StageUse, StepSummary
from verl_profiling.watch.collectives import with_lateness
from verl_profiling.watch.sums import StageSums, WatchQuestion

MS = 1_000_000


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


def late(*of_ranks: list[float], begins: tuple[float, ...] = (0.0, 0.0)) -> list[int | None]:
    """Return how late each of two ranks was in its stage (ms), from the times at which they entered."""
    workers = [
        RankUse(
            lane=f"actor_rank{rank}",
            role="actor",
            rank=rank,
            stages=[StageUse("update_actor", int((1000 - begin) * MS), 1, int(begin * MS))],
            collectives={"0 2": {number: int(at * MS) for number, at in enumerate(entered)}},
        )
        for rank, (entered, begin) in enumerate(zip(of_ranks, begins, strict=True))
    ]
    found = with_lateness(StepSummary(step=1, begin_ns=0, end_ns=1000 * MS, workers=workers))
    return [one.stages[0].late_ns for one in found.workers]


def test_lateness_adds_up_where_the_others_waited() -> None:
    """A rank that is slow in each of four mini-batches is late four times."""
    assert late([100, 200, 300, 400], [130, 230, 330, 430]) == [0, 120 * MS]


def test_the_same_lateness_counts_once() -> None:
    """The other rank entered all of its collectives before the late one came: it waited at their end."""
    assert late([100, 101, 102, 103], [150, 151, 152, 153]) == [0, 50 * MS]


def test_a_late_begin_of_a_stage_is_no_lateness_in_it() -> None:
    """Rank 1 begins 80 ms later, and is 20 ms slower up to the first collective; then both are alike."""
    assert late([100, 300], [200, 300], begins=(0.0, 80.0)) == [0, 20 * MS]
