"""Loops on a disk that is slow or fails: ``python -m tests.controller.slow_disk_loop FOLDER``."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_profiling import ProfilingCallback
from verl_profiling.workers import CaptureMixin

STEPS = 4


class Group:
    """A worker on a thread of its own, as if in another process:
    its file calls are not the loop's.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._worker, self._thread = CaptureMixin(), ThreadPoolExecutor(1)
        self._worker.init_capture(config, role="actor")

    def execute_all_async(self, method: str, *arguments: Any) -> list[Any]:
        answer: Future[Any] = self._thread.submit(getattr(self._worker, method), *arguments)
        return [SimpleNamespace(future=lambda: answer)]


def calls() -> list[str]:
    """Return the file calls of this thread so far."""
    own = str(threading.get_native_id())
    lines = Path(os.environ["DISK_LOG"]).read_text().splitlines()
    return [line for line in lines if line.split()[0] == own]


def disk(seconds: float = 0.0, error: int = 0) -> None:
    Path(os.environ["DISK_CONTROL"]).write_text(f"{seconds} {error}")


def slow(folder: Path, watched: bool) -> list[list[str]]:
    """Train with slow file calls; return the loop's own calls in each hook after the first step."""
    config = {
        "enable": True,
        "save_path": str(folder),
        "tool": "spans",
        "watch": {"enable": watched},
    }
    counted = []
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", Group(config))
        for step in range(1, STEPS + 1):
            disk(0.05 if step > 1 else 0.0)
            for hook in (
                lambda step=step: callback.on_step_begin(step),
                lambda: callback.on_step_end({"a": 1}),
            ):
                before = len(calls())
                hook()
                counted.append(calls()[before:])
            with callback.stage("validate"):
                pass
        disk()
    return counted[2:]


def failing(folder: Path, seed: int) -> int:
    """Train with a disk that fails in one step, from before its end until a later moment;
    return its step.
    """
    draw = random.Random(seed)
    config = {"enable": True, "save_path": str(folder), "tool": "spans"}
    failed, lasts, error = (
        draw.randint(1, STEPS),
        draw.random() < 0.5,
        draw.choice((5, 13, 28, 122)),
    )
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", Group(config))
        for step in range(1, STEPS + 1):
            callback.on_step_begin(step)
            if step == failed:
                disk(error=error)
            if not lasts:
                threading.Timer(draw.random(), disk).start()
            callback.on_step_end({"loss": 0.5})
            disk()
    return failed


def late(folder: Path) -> None:
    """Train with a disk that hangs as step 2 begins, until step 3;
    end once a later step is captured.
    """
    config = {"enable": True, "save_path": str(folder), "tool": "spans", "timeouts": {"start_s": 1}}
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", Group(config))
        step, captured = 1, 0
        while step < 4 or not captured:
            disk(3.0 if step in (2, 3) else 0.0)
            callback.on_step_begin(step)
            captured = step if callback.capturing else 0
            callback.on_step_end()
            disk()
            time.sleep(0.25 if step > 3 else 0.0)
            step += 1


def main(folder: str) -> None:
    disk()
    root = Path(folder)
    seen = {
        f"watched {watched}": slow(root / f"slow_{watched}", watched) for watched in (True, False)
    }
    print(json.dumps(seen))
    for seed in range(8):
        failing(root / str(seed), seed)
    late(root / "late")


if __name__ == "__main__":
    main(*sys.argv[1:])
