"""A loop that is killed in the middle of step 2: ``lost_process_program.py [RAY_ADDRESS]``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from step_outcome import verdict

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

RUN = Path("run").absolute()
CONFIG = {
    "enable": True,
    "tool": "torch",
    "save_path": str(RUN),
    "schedule": {"steps": [1, 2]},
    "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
}


class Trainer(CaptureMixin):
    """A training rank."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.init_capture(config, role="actor", rank=rank, world_size=2)

    def work(self) -> None:
        """Run a stage."""
        with stage("update_actor"):
            sum(range(1000))


def wait_for_disk() -> None:
    """Wait until step 1 is compressed and the begin of step 2 is written: both happen in the background."""
    deadline = time.monotonic() + 30
    while verdict(RUN / "step_000001")[0] or not (RUN / "step_000002" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main(address: str = "") -> None:
    """Run two steps of the loop."""
    workers: list[Any]
    if address:
        import ray

        environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, configure_logging=False)
        workers = [ray.remote(num_cpus=0)(Trainer).remote(CONFIG, rank) for rank in range(2)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        work = lambda: ray.get([worker.work.remote() for worker in workers])  # noqa: E731
    else:
        workers = [Trainer(CONFIG, 0)]
        work = workers[0].work
    profiling = ProfilingCallback(CONFIG)
    profiling.add_workers("actor", workers)
    with profiling:
        for step in (1, 2):
            profiling.on_step_begin(step)
            work()
            if step == 2:
                wait_for_disk()
                os.kill(os.getpid(), signal.SIGKILL)
            profiling.on_step_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
