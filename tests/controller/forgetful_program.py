"""Loops that forget a capture: ``forgetful_program.py SCENARIO [RAY_ADDRESS]``, with a worker here or in Ray.

A notebook is ``interrupted`` inside a step, or the callback is ``dropped`` there; then a new callback over
the same worker trains ten steps. Prints their folders, and what is left switched on in the worker.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_profiling import ProfilingCallback, stage
from verl_profiling.testing import leaks
from verl_profiling.workers import CaptureMixin

CONFIG = {
    "enable": True,
    "tool": "torch",
    "save_path": str(Path("run").absolute()),
    "schedule": {"every": 1},
    "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
}


class Trainer(CaptureMixin):
    """A training rank."""

    def __init__(self) -> None:
        self.init_capture(CONFIG, role="actor", rank=0, world_size=1)

    def work(self) -> None:
        """Run a stage."""
        with stage("update_actor"):
            sum(range(1000))

    def left_on(self) -> list[str]:
        """Return what records here; a thread that is about to end does not."""
        return [leak for leak in leaks() if not leak.startswith("thread ")]


class Remote:
    """The same in a Ray actor."""

    def __init__(self, address: str) -> None:
        import ray

        environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, configure_logging=False)
        self.actor = ray.remote(num_cpus=0)(Trainer).remote()
        self._get = ray.get

    def __getattr__(self, method: str) -> Any:
        return lambda: self._get(getattr(self.actor, method).remote())


def train(profiling: ProfilingCallback, worker: Any, interrupted_at: int = 0) -> Iterator[str]:
    """Run steps as a cell of a notebook does, without ``with``; yield the folder of each."""
    for step in range(1, 11):
        profiling.on_step_begin(step)
        worker.work()
        if step == interrupted_at:
            raise KeyboardInterrupt
        profiling.on_step_end()
        yield str(profiling.last_folder)


def main(scenario: str, address: str = "") -> None:
    """Run the cell, have it interrupted, and run it again."""
    worker = Remote(address) if address else Trainer()
    workers = worker.actor if address else worker
    kept = []  # a notebook keeps the last exception, and with it all that it refers to
    for interrupted_at in (2, 0):
        profiling = ProfilingCallback(CONFIG)
        profiling.add_workers("actor", workers)
        try:
            folders = list(train(profiling, worker, interrupted_at))
        except KeyboardInterrupt:
            if scenario == "interrupted":
                kept.append(profiling)
            del profiling
            gc.collect()
    profiling.on_train_end()
    print(json.dumps([folders, worker.left_on()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
