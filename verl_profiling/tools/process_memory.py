"""Measures the peak memory of each stage, and limits the memory for writing a recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from verl_profiling.memory import available_bytes
from verl_profiling.tools.base import Marks
from verl_profiling.units import byte_size

_USUAL_WORKERS_OF_A_HOST = 8


def memory_overrun(needed: int, share: float, workers: int) -> str:
    """Return the reason why a recording must end, if writing it would need too much memory; else ``""``.

    Args:
        needed: The additional bytes that writing the recording needs.
        share: Share of the available memory that the recordings of a host may take.
        workers: Number of captured workers. At most 8 count for this host, unless a launcher sets its number.
    """
    available = available_bytes()
    if available is None:
        return ""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE") or ""
    here = int(local) if local.isdecimal() else min(workers, _USUAL_WORKERS_OF_A_HOST)
    if needed <= share * available / max(1, here):
        return ""
    divided = f", divided by {here} workers," if here > 1 else ""
    return (
        f"writing it takes about {byte_size(needed)} more memory, and limits.memory_share={share:g} of "
        f"{byte_size(available)}{divided} is less"
    )


class StagePeaks:
    """Measures the highest value of a high-water mark (e.g. of memory) in each stage.

    The mark is read and reset at the begin and end of every stage. Each value counts for all open stages, so
    stages may nest and overlap.

    Attributes:
        marks: The marks of a recording, which measure its stages.

    Args:
        take: Function that returns the peaks by name since its last call, and resets them; empty if they
            cannot be reset, because the numbers would be wrong.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]]) -> None:
        self.marks = Marks(self.begin, self.end)
        self._take = take
        self._open: list[tuple[str, dict[str, int]]] = []
        self._peaks: dict[str, float] = {}

    def begin(self, name: str) -> tuple[str, dict[str, int]]:
        """Record the begin of a stage; return its name and its peaks so far."""
        self._fold()
        self._open.append((name, {}))
        return self._open[-1]

    def end(self, stage: tuple[str, dict[str, int]]) -> None:
        """Record the end of a stage; of several runs of a stage, the highest peaks are kept."""
        self._fold()
        self._open = [other for other in self._open if other is not stage]
        name, peaks = stage
        for what, peak in peaks.items():
            key = f"stage/{name}/{what}"
            self._peaks[key] = max(self._peaks.get(key, 0.0), float(peak))

    def metrics(self) -> Mapping[str, float]:
        """Return the peaks of ended stages, as ``stage/<name>/<what>``."""
        return self._peaks

    def _fold(self) -> None:
        for what, peak in self._take().items():
            for _, peaks in self._open:
                peaks[what] = max(peaks.get(what, 0), peak)
