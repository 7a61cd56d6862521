"""The ``spans`` tool: no profiler. The session's stage spans are the whole recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool
from verl_profiling.tools.peaks import StagePeaks, take_host_peak

__all__ = ["SpansOptions", "SpansTool"]


@dataclass(frozen=True, kw_only=True)
class SpansOptions:
    """Options of the ``spans`` tool.

    Attributes:
        peak_rss: Record the peak resident memory of every stage, as the metric
            ``stage/<name>/peak_rss_bytes``. This resets the process's high-water mark at each stage
            (tens of microseconds), which other readers of the mark notice.
    """

    peak_rss: bool = False


class SpansTool(Tool):
    """Writes no artifact; stage spans are in the manifest with every tool, and so with this one."""

    name: ClassVar[str] = "spans"
    suffix: ClassVar[str] = ""
    options_class: ClassVar[type] = SpansOptions
    options: SpansOptions

    def start(self, destination: Destination) -> Recording:
        """Start measuring peaks if that is asked for, and nothing else."""
        return _PeakRecording() if self.options.peak_rss else _SpansRecording()


class _SpansRecording(Recording):
    def stop(self) -> list[Output]:
        return []

    def discard(self) -> None:
        pass


class _PeakRecording(_SpansRecording):
    def __init__(self) -> None:
        self._peaks = StagePeaks(take_host_peak)

    @property
    def marks(self) -> Marks:
        return Marks(self._begin_mark, self._end_mark)

    def _begin_mark(self, name: str) -> object:
        self._peaks.begin(name)
        return name

    def _end_mark(self, mark: Any) -> object:
        self._peaks.end(mark)
        return None

    def metrics(self) -> Mapping[str, float]:
        return self._peaks.metrics()
