"""What a capture costs its process: how many seconds, and when they were spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from verl_profiling import clock
from verl_profiling.manifest import CaptureCost, ToolSpan

__all__ = ["CostMeter"]


class CostMeter:
    """Measures the starts and stops of one capture's tools.

    Attributes:
        spans: When tools were started and stopped, in order of their end.
        export_s: Seconds that writing took; a part of the stops.
    """

    def __init__(self) -> None:
        self.spans: list[ToolSpan] = []
        self.export_s = 0.0
        self._seconds = {"start": 0.0, "stop": 0.0}

    def starting(self, stage: str | None) -> AbstractContextManager[None]:
        """Measure a start; ``stage`` is what will be recorded, in discrete mode."""
        return self._measured("start", stage)

    def stopping(self, stage: str | None) -> AbstractContextManager[None]:
        """Measure a stop; ``stage`` is what was recorded, in discrete mode."""
        return self._measured("stop", stage)

    def cost(self) -> CaptureCost:
        """Return the seconds so far."""
        return CaptureCost(
            start_s=self._seconds["start"], stop_s=self._seconds["stop"], export_s=self.export_s
        )

    @contextmanager
    def _measured(self, name: Literal["start", "stop"], stage: str | None) -> Iterator[None]:
        begin_ns, begin = clock.now_ns(), time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begin
            self.spans.append(ToolSpan(name, begin_ns, clock.now_ns(), stage))
