"""The ``spans`` tool, which runs no profiler: stage spans are the whole recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool
from verl_profiling.tools.process_memory import StagePeaks, take_host_peak


@dataclass(frozen=True, kw_only=True)
class SpansOptions:
    """Options of the ``spans`` tool.

    Attributes:
        peak_rss: Record the peak resident memory of every stage, as the metric
            ``stage/<name>/peak_rss_bytes``. This resets the process's high-water mark at each stage
            (tens of microseconds), which changes the value for other readers of the mark.
    """

    peak_rss: bool = False


class SpansTool(Tool):
    """Writes no artifact: the manifest has the stage spans of every capture."""

    name: ClassVar[str] = "spans"
    suffix: ClassVar[str] = ""
    options_class: ClassVar[type] = SpansOptions
    options: SpansOptions

    def start(self, destination: Destination) -> Recording:
        """Start measuring peaks, if ``peak_rss`` is set."""
        return _SpansRecording(StagePeaks(take_host_peak) if self.options.peak_rss else None)


@dataclass(eq=False)
class _SpansRecording(Recording):
    _peaks: StagePeaks | None

    @property
    def marks(self) -> Marks | None:
        return self._peaks.marks if self._peaks is not None else None

    def stop(self) -> list[Output]:
        return []

    def discard(self) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return self._peaks.metrics() if self._peaks is not None else {}
