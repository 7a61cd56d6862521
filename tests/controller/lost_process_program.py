"""A loop that loses something in step 2: ``lost_process_program.py SCENARIO [RAY_ADDRESS]``.

``loop``: it is killed itself, in the middle of the step. ``late``: the second worker's stop takes longer than
``timeouts.stop_s``; prints how long the loop was held up, and what the manifest says of it then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from step_outcome import recorded, verdict

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

LATE = Path("late").absolute()
RUN = Path("run").absolute()
CONFIG = {
    "enable": True,
    "tool": "torch",
    "save_path": str(RUN),
    "schedule": {"steps": [1, 2]},
    "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
}


class Trainer(CaptureMixin):
    """A training rank, whose stop hangs while there is a file ``late``."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.rank = rank
        self.init_capture(config, role="actor", rank=rank, world_size=2)

    def work(self) -> None:
        """Run a stage."""
        with stage("update_actor"):
            sum(range(1000))

    def stop_capture(self, *arguments: Any, **keywords: Any) -> Any:
        """Stop, perhaps late."""
        while self.rank == 1 and LATE.exists():
            time.sleep(0.02)
        return super().stop_capture(*arguments, **keywords)


def wait_for_disk() -> None:
    """Wait until step 1 is compressed and the begin of step 2 is written: both happen in the background."""
    deadline = time.monotonic() + 30
    while verdict(RUN / "step_000001")[0] or not (RUN / "step_000002" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main(scenario: str, address: str = "") -> None:
    """Run two steps of the loop."""
    config = {**CONFIG, "timeouts": {**CONFIG["timeouts"], "stop_s": 0.5 if scenario == "late" else 20}}
    workers: list[Any]
    if address:
        import ray

        environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, configure_logging=False)
        workers = [ray.remote(num_cpus=0)(Trainer).remote(config, rank) for rank in range(2)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        work = lambda: ray.get([worker.work.remote() for worker in workers])  # noqa: E731
    else:
        workers = [Trainer(config, 0)]
        work = workers[0].work
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", workers)
    with profiling:
        for step in (1, 2):
            profiling.on_step_begin(step)
            work()
            if step == 2 and scenario == "loop":
                wait_for_disk()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 2 and scenario == "late":
                LATE.touch()
            begin = time.monotonic()
            profiling.on_step_end()
        held_up_s = time.monotonic() - begin
        before = [worker.status for worker in recorded(RUN / "step_000002").workers]
        threading.Timer(1, LATE.unlink, [True]).start()
    print(json.dumps([held_up_s, before]))


if __name__ == "__main__":
    main(*sys.argv[1:])
