"""Runs a recipe with its watch, in which each step is longer by a sleep.

Run: ``python benchmarks/verdict_loop.py SECONDS MODULE [OVERRIDE...]``; 0 runs the recipe as it is.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

from verl_profiling import ProfilingCallback


def slow_down(seconds: float) -> None:
    """Let the loop sleep in the stage ``reward`` at the end of each step."""
    ends = ProfilingCallback.on_step_end

    def on_step_end(self: ProfilingCallback, *given: Any, **more: Any) -> None:
        with self.stage("reward"):
            time.sleep(seconds)
        ends(self, *given, **more)

    ProfilingCallback.on_step_end = on_step_end  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    slower_s, module = float(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    if slower_s:
        slow_down(slower_s)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
