"""A loop that is killed in its second step: ``python -m tests.soak.killed_loop FOLDER PLACE``."""

from __future__ import annotations

import os
import signal
import sys

from fault_tools import FAULTY

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

STAGES = ("values", "update_critic", "update_actor")


def main(folder: str, place: str) -> None:
    """Train three steps; at one place of the second, end as the kernel ends a process."""
    config = {"enable": True, "save_path": folder, "mode": "discrete", "tool": FAULTY}
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", worker)
        for step in (1, 2, 3):
            callback.on_step_begin(step)
            for name in STAGES:
                with stage(name):
                    if (step, name) == (2, place):
                        os.kill(os.getpid(), signal.SIGKILL)
            callback.on_step_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
