"""One timeline and one report for every profiled step of RL post-training."""

from verl_profiling.capture.session import stage
from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.errors import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)
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
