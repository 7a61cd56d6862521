"""Sums of a process's spans by name, in every step, captured or not. Written for speed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from verl_profiling.step_summary import OTHERS, Period, SpanTotal

MOST_NAMES = 256
"""Maximum number of span names; spans with further names are summed as ``OTHERS``."""

MOST_PIECES = 512
"""Maximum number of time slices; at this number, neighbours are merged until half are left."""

_SHORTEST_NS = 20_000_000
_LONGEST_NAME = 200


class _Piece(msgspec.Struct):
    """A time slice: number, total duration (ns) and failures of the spans that ended in it, by name."""

    begin_ns: int
    end_ns: int
    sums: dict[object, list[int]] = {}


class SpanSums:
    """Sums spans by name and time slice, in bounded memory. Any thread and task may use it."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._piece_ns = _SHORTEST_NS
        self._names: set[object] = set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a span under the lock

    def add(self, name: str, begin_ns: int, end_ns: int, failed: bool) -> None:
        """Add a span that has ended. Any object is accepted as its name, and nothing raises."""
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
        """Return the sums of the spans that ended in each step; then drop all up to the last step's end.

        Args:
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's.
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
        """Merge neighbouring slices, until at most half of the maximum are left."""
        while len(self._pieces) > MOST_PIECES // 2:
            self._piece_ns *= 2
            joined: list[_Piece] = []
            for piece in self._pieces:
                # After the clock was set back, a slice may begin before its predecessor.
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
