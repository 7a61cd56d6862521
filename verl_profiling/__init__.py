"""One timeline and one report for every profiled step of RL post-training.

What records is imported when its name is first used: the analysis, and each process that merges a trace,
does without.
"""

from __future__ import annotations

from importlib import import_module
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

__version__ = "0.1.0"

__all__ = [
    "AsyncProfilingCallback",
    "CaptureStateError",
    "ConfigError",
    "ProfilingCallback",
    "ProfilingConfig",
    "ProfilingError",
    "ToolUnavailableError",
    "TraceFormatError",
    "stage",
]

_HOMES = {
    "AsyncProfilingCallback": "verl_profiling.controller.callback",
    "ProfilingCallback": "verl_profiling.controller.callback",
    "ProfilingConfig": "verl_profiling.settings.config",
    "stage": "verl_profiling.capture.session",
}


if not TYPE_CHECKING:  # type checkers see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
