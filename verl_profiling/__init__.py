"""One timeline and one report for every profiled step of RL post-training."""

from verl_profiling.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.config import ProfilingConfig
from verl_profiling.errors import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)
from verl_profiling.session import stage

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
