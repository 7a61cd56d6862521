"""Sums of a process's spans by name, between captures too. Written for speed: every span passes here."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from verl_profiling.step_summary import OTHERS, Period, SpanTotal

MOST_NAMES = 256
"""Spans after so many names are one, ``OTHERS``."""

MOST_PIECES = 512
"""When there are so many pieces, each two become one."""

_SHORTEST_NS = 20_000_000
_LONGEST_NAME = 200


class _Piece(msgspec.Struct):
    """A piece of time, and by name the number, duration and failures of the spans that ended in it."""

    begin_ns: int
    end_ns: int
    sums: dict[object, list[int]] = {}


class SpanSums:
    """Adds up spans by name and piece of time, in bounded memory. Any thread and task may use it."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._piece_ns = _SHORTEST_NS
        self._names: set[object] = set()
        self._lock = threading.RLock()  # the garbage collector may end a span while this thread is in it

    def add(self, name: str, begin_ns: int, end_ns: int, failed: bool) -> None:
        """Count a span that has ended; it may have any name, and never raises."""
        with self._lock:
            pieces = self._pieces
            if not pieces or not 0 <= end_ns - pieces[-1].begin_ns < self._piece_ns:
                if len(pieces) >= MOST_PIECES:
                    self._join()
                pieces = self._pieces
                pieces.append(_Piece(end_ns, end_ns))
            piece = pieces[-1]
            piece.end_ns = end_ns
            try:
                sums = piece.sums[name]
            except (KeyError, TypeError):
                sums = piece.sums.setdefault(self._known(name), [0, 0, 0])
            sums[0] += 1
            sums[1] += max(0, end_ns - begin_ns)
            sums[2] += failed

    def of_steps(self, steps: Sequence[Period], ahead_ns: int) -> list[list[SpanTotal]]:
        """Return what ended in each step, by name; what lies before the last step's end is forgotten.

        Args:
            steps: Begin and end of steps, in order, on the asker's clock.
            ahead_ns: How far the clock of this process is ahead of that.
        """
        begins = [begin_ns for begin_ns, _ in steps]
        found: list[dict[str, SpanTotal]] = [{} for _ in steps]
        with self._lock:
            later = []
            for piece in self._pieces:
                for time_ns in ((piece.begin_ns + piece.end_ns) // 2 - ahead_ns, piece.end_ns - ahead_ns):
                    at = bisect_right(begins, time_ns) - 1
                    if at >= 0 and time_ns <= steps[at][1]:
                        _add(found[at], piece)
                        break
                else:
                    if steps and piece.end_ns - ahead_ns > steps[-1][1]:
                        later.append(piece)
            self._pieces, self._piece_ns = later, _SHORTEST_NS
        return [list(totals.values()) for totals in found]

    def _known(self, name: object) -> object:
        if not isinstance(name, str):
            return OTHERS
        if name not in self._names:
            if len(self._names) >= MOST_NAMES:
                return OTHERS
            self._names.add(name)
        return name

    def _join(self) -> None:
        """Make the pieces longer, until there are half as many."""
        while len(self._pieces) > MOST_PIECES // 2:
            self._piece_ns *= 2
            joined: list[_Piece] = []
            for piece in self._pieces:
                # Where the clock was set back, a piece lies before the one before it.
                if joined and piece.end_ns - joined[-1].begin_ns < self._piece_ns:
                    joined[-1].end_ns = max(piece.end_ns, joined[-1].end_ns)
                    for name, sums in piece.sums.items():
                        before = joined[-1].sums.setdefault(name, [0, 0, 0])
                        before[:] = [one + more for one, more in zip(before, sums, strict=True)]
                else:
                    joined.append(piece)
            self._pieces = joined


def _add(totals: dict[str, SpanTotal], piece: _Piece) -> None:
    for name, sums in piece.sums.items():
        shown = str(name)[:_LONGEST_NAME].encode("utf-8", "replace").decode()
        total = SpanTotal(shown, *sums)
        totals[shown] = totals[shown] + total if shown in totals else total
