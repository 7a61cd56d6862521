"""Peak memory of each stage, read from high-water marks that can be reset."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_profiling.tools.base import Marks

__all__ = ["StagePeaks", "process_peak_bytes", "take_host_peak"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_SET_BACK = b"5"  # proc_pid_clear_refs(5): resets the peak to the current resident size
_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class StagePeaks:
    """Determines for each stage the highest value of a high-water mark while it ran.

    The mark is read and reset at the begin and end of every stage, and the value counts for every
    stage that was open, so stages may nest and overlap.

    Args:
        take: Returns the peaks by name since its last call, and resets them. Empty if they cannot
            be reset: no numbers instead of wrong ones.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]]) -> None:
        self._take = take
        self._open: list[tuple[str, dict[str, int]]] = []
        self._peaks: dict[str, float] = {}

    @property
    def marks(self) -> Marks:
        """Has a recording's stages measured."""
        return Marks(self.begin, self.end)

    def begin(self, name: str) -> str:
        """Note that a stage begins."""
        self._fold()
        self._open.append((name, {}))
        return name

    def end(self, name: str) -> None:
        """Note that a stage ends; of several runs the highest peaks are kept."""
        self._fold()
        for place in range(len(self._open) - 1, -1, -1):
            if self._open[place][0] == name:
                for what, peak in self._open.pop(place)[1].items():
                    key = f"stage/{name}/{what}"
                    self._peaks[key] = max(self._peaks.get(key, 0.0), float(peak))
                return

    def metrics(self) -> Mapping[str, float]:
        """Return the peaks of the stages that have ended, as ``stage/<name>/<what>``."""
        return self._peaks

    def _fold(self) -> None:
        for what, peak in self._take().items():
            for _, peaks in self._open:
                peaks[what] = max(peaks.get(what, 0), peak)


def process_peak_bytes() -> int:
    """Return the kernel's mark of the highest resident size of this process since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES


def take_host_peak() -> Mapping[str, int]:
    """Return the peak resident size of this process since the last call, and reset it.

    The mark is the kernel's, so the value that ``getrusage`` returns elsewhere in the process is
    reset too.
    """
    peak = process_peak_bytes()
    try:
        _CLEAR_REFS.write_bytes(_SET_BACK)
    except OSError:
        return {}
    return {"peak_rss_bytes": peak}
