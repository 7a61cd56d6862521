"""Loops that die in ten ways, in seven phases: ``python -m tests.soak.deaths FOLDER SEED``."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.files.run_files import read_run
from verl_profiling.steps.check import check
from verl_profiling.workers import CaptureMixin

PHASES = ("before", "begin", "between hooks", "in stage", "end", "after", "end of training")
STEPS = 5


def _raise() -> None:
    raise RuntimeError("planned")


WAYS: dict[str, Callable[[], object]] = {
    **{
        name: lambda name=name: signal.raise_signal(signal.Signals[name])
        for name in ("SIGTERM", "SIGHUP", "SIGINT")
    },
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(1)": lambda: os._exit(1),
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "sys.exit": lambda: sys.exit(3),
    "exception": _raise,
}


class Dying(CaptureMixin):
    """A worker in the loop's process, which dies in its start or stop."""

    def __init__(self, config: dict[str, Any], die: Callable[[str], None]) -> None:
        self._die = die
        self.init_capture(config, role="actor")

    def start_capture(self, request: CaptureStart) -> StartReply:
        self._die("begin")
        return super().start_capture(request)

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        reply = super().stop_capture(capture_id, finish_s)
        self._die("end")
        return reply


def train(folder: Path, phase: str, way: str, draw: random.Random) -> None:
    """Train, and die in a phase of a drawn step."""
    fatal, now = draw.randint(2, STEPS - 1), 0
    config = {
        "enable": True,
        "save_path": str(folder),
        "tool": "spans",
        "watch": {"enable": draw.random() < 0.5},
    }
    config |= {
        "mode": draw.choice(("e2e", "discrete")),
        "schedule": {"steps": list(range(1, STEPS + 1))},
    }

    def die(place: str) -> None:
        if (place, now) == (phase, fatal):
            WAYS[way]()

    worker = Dying(config, die)
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", worker)
        for now in range(1, STEPS + 1):
            die("before")
            callback.on_step_begin(now)
            callback.on_rollout_begin()
            die("between hooks")
            callback.on_rollout_end()
            with callback.stage("a"), stage("update_actor"):
                die("in stage")
            callback.on_step_end({"loss": 0.5})
            die("after")
        now = fatal
        die("end of training")


def outcome(folder: Path, phase: str, way: str, seed: int) -> dict[str, Any]:
    """Let a loop die in a process of its own; return what is known of it then."""
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train(folder, phase, way, random.Random(seed))
        except BaseException:
            os._exit(42)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    run = read_run(folder)
    finished = code == 0 and way != "os._exit(0)"
    whole = len(list(folder.glob("step_*/manifest.json"))) == STEPS  # nothing is lost
    is_ok = check(folder).ok
    return {
        "phase": phase,
        "way": way,
        "code": code,
        "finished": finished,
        "check_ok": is_ok,
        "called_ok_and_is_not": is_ok and not (finished or whole),
        "ended": run is not None and run.end_ns is not None,
    }


def main(folder: str, seed: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = int(seed)
    for phase in PHASES:
        for way in WAYS:
            number += 1
            print(json.dumps(outcome(Path(folder) / str(number), phase, way, number)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
