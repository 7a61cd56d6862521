"""How long the callback waits: the ``timeouts`` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiling.settings.typed_values import check_seconds

__all__ = ["Timeouts"]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the callback waits for workers, in seconds. A worker that needs longer is ``failed``.

    Attributes:
        start_s: Time for a capture to start.
        stop_s: Time for a capture to stop, including the export of the trace.
        finish_s: Time at the end of the run for workers that were too late to stop, and again for compression
            in the background.
    """

    start_s: float = 60.0
    stop_s: float = 600.0
    finish_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("start_s", "stop_s", "finish_s"):
            check_seconds(name, getattr(self, name))
