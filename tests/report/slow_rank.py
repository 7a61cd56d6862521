"""What one rank runs in the test of a slow rank: ``slow_rank.py SAVE_PATH``, started once per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.workers import CaptureMixin

RANK = int(os.environ["RANK"])
STEPS = range(1, 8)


class Actor(CaptureMixin):
    """Multiplies matrices, four times as often on rank 1, and adds up what all ranks have."""

    @stage("update_actor")
    def update(self) -> None:
        matrix = torch.ones(600, 600)
        for _ in range(40 if RANK else 10):
            matrix = matrix @ matrix * 1e-3
        dist.all_reduce(matrix)


def main() -> None:
    """Run seven steps, of which the first and the last are not captured."""
    torch.set_num_threads(1)
    meeting = f"file://{Path(sys.argv[1]).absolute()}.rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
    config = ProfilingConfig(enable=True, save_path=sys.argv[1], schedule={"steps": [*STEPS][1:-1]})  # type: ignore[arg-type]
    actor = Actor()
    actor.init_capture(config, role="actor")
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", actor)
    with profiling:
        for step in STEPS:
            profiling.on_step_begin(step)
            actor.update()
            profiling.on_step_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
