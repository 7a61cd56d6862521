"""One timeline and one report for every profiled step of RL post-training.

Recording modules are imported at the first use of their names, because the analysis does not need
them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiling.errors import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)

if TYPE_CHECKING:
    from verl_profiling.capture.session import stage
    from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
    from verl_profiling.settings.config import ProfilingConfig
    from verl_profiling.trajectories import current_trajectory, span, trajectory, trajectory_status

__version__ = "0.1.0"


def _busy_ns() -> int:
    """Return for how long the main thread has computed or waited for a CPU; 0 if unknown."""
    with suppress(OSError, ValueError):
        computed_ns, waited_ns, _ = Path("/proc/self/schedstat").read_text().split()
        return int(computed_ns) + int(waited_ns)
    return 0


IMPORTED = (time.time_ns(), _busy_ns())
"""When this package was imported, and for how long its process had been busy by then (ns)."""

__all__ = [
    "AsyncProfilingCallback",
    "CaptureStateError",
    "ConfigError",
    "ProfilingCallback",
    "ProfilingConfig",
    "ProfilingError",
    "ToolUnavailableError",
    "TraceFormatError",
    "current_trajectory",
    "span",
    "stage",
    "trajectory",
    "trajectory_status",
]

_HOMES = {
    "AsyncProfilingCallback": "verl_profiling.controller.callback",
    "ProfilingCallback": "verl_profiling.controller.callback",
    "ProfilingConfig": "verl_profiling.settings.config",
    "current_trajectory": "verl_profiling.trajectories",
    "span": "verl_profiling.trajectories",
    "stage": "verl_profiling.capture.session",
    "trajectory": "verl_profiling.trajectories",
    "trajectory_status": "verl_profiling.trajectories",
}


if not TYPE_CHECKING:  # type checkers see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
