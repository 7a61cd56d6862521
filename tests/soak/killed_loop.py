"""A loop that is killed in a step: ``python -m tests.soak.killed_loop FOLDER FIRST LAST STEP PLACE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fault_tools import FAULTY

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

STAGES = ("values", "update_critic", "update_actor")
PLACES = ("the begin", *(f"in {name}" for name in STAGES), *(f"after {name}" for name in STAGES))


def finished(place: str) -> list[str]:
    """Return the stages that were over when the loop was killed there."""
    number = 0 if place == "the begin" else STAGES.index(place.split()[1]) + place.startswith("after")
    return list(STAGES[:number])


def main(folder: Path, first: int, last: int, doomed: int, place: str) -> None:
    """Train; in one step, at one place, end as the kernel ends a process."""
    config = {
        "enable": True,
        "run_id": "soak",
        "save_path": str(folder / "run"),
        "schedule": {"every": 1},
        "mode": "discrete",
        "tool": FAULTY,
    }
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    callback = ProfilingCallback(config)
    callback.add_workers("actor", worker)

    def passes(here: str, step: int) -> None:
        if (step, here) == (doomed, place):
            os.kill(os.getpid(), signal.SIGKILL)

    with callback:
        for step in range(first, last + 1):
            callback.on_step_begin(step)
            passes("the begin", step)
            for name in STAGES:
                with stage(name):
                    passes(f"in {name}", step)
                passes(f"after {name}", step)
            callback.on_step_end()
            (folder / "done").write_text(str(step))


if __name__ == "__main__":
    folder, first, last, doomed, place = sys.argv[1:]
    main(Path(folder), int(first), int(last), int(doomed), place)
