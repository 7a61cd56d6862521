"""One rank under torchrun: ``rank_end_program.py SAVE_PATH ENDING``; in step 2, rank 1 ends as it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from verl_profiling import ProfilingCallback, stage
from verl_profiling.testing import shifted_clock
from verl_profiling.workers import CaptureMixin

RANK = int(os.environ["RANK"])


class Trainer(CaptureMixin):
    """A training rank."""


def end_rank(ending: str, waiting: Path) -> None:
    """End this rank, or hang; where it matters, while rank 0 has ended the step and waits for this one."""
    if ending in ("killed", "cancelled"):
        while not waiting.exists():
            time.sleep(0.01)
        time.sleep(1)
    if ending == "raises":
        raise ValueError("out of memory")
    if ending == "os._exit":
        os._exit(0)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "cancelled":
        time.sleep(60)


def loop(save_path: Path, ending: str) -> None:
    """Run the training loop; the ranks meet in each step."""
    config = {
        "enable": True,
        "tool": "torch",
        "save_path": str(save_path),
        "schedule": {"steps": [1, 2]},
        "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
    }
    waiting = save_path.with_name("rank_0_waits")
    worker = Trainer()
    worker.init_capture(config, role="actor")
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", worker)
    with profiling:
        for step in (1, 2):
            profiling.on_step_begin(step)
            with stage("update_actor"):
                dist.all_reduce(torch.ones(1))
            if step == 2 and RANK == 1:
                end_rank(ending, waiting)
            if step == 2 and RANK == 0:
                waiting.touch()
            profiling.on_step_end()


def main() -> None:
    """Run one rank; one that is killed is on another host, so that rank 0 cannot see that it is gone."""
    save_path, ending = Path(sys.argv[1]), sys.argv[2]
    remote = ending == "killed" and RANK == 1
    with shifted_clock(0, "another host") if remote else contextlib.nullcontext():
        dist.init_process_group("gloo")
        loop(save_path, ending)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
