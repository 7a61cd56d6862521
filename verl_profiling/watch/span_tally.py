"""What the spans of a process add up to, between captures too. Written for speed: every span passes here."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from struct import Struct

from verl_profiling.step_account import OTHERS
from verl_profiling.watch.ring import MAX_NAMES

__all__ = ["PIECE", "PIECES", "SpanTally"]

PIECE = Struct("=iqqqqq")
"""One name in one piece: the name's number, begin and end of the piece in ns, and of all spans of that name
that the process has ended until then: how many, how long in ns, how many failed. A piece without a time is
before all others: what was told already."""

PIECES = 128
"""So many pieces are kept until they are told."""

_SHORTEST_NS = 20_000_000
_LONGEST_NAME = 200


@dataclass(slots=True)
class _Sums:
    """What the spans of one name add up to, and how many of them are in a piece that has ended."""

    index: int
    runs: int = 0
    duration_ns: int = 0
    failed: int = 0
    kept: int = 0


@dataclass(slots=True)
class _Piece:
    """A while in which spans ended, and the sums of their names until its end."""

    begin_ns: int
    end_ns: int
    sums: dict[int, tuple[int, int, int]]


class SpanTally:
    """Adds up spans by name, in pieces of time, so that they can be told to steps.

    A piece lasts for 20 ms, from the end of one span. When there are :data:`PIECES`, they are made twice as
    long, so that memory is bounded however seldom they are told. The sums go on from piece to piece: what is
    lost on the way shows in the next, and nobody counts what was told to another.

    Any thread and task may use it.
    """

    def __init__(self) -> None:
        self._others = _Sums(0)
        self._names = [OTHERS]
        self._sums: dict[str, _Sums] = {}
        self._pieces: list[_Piece] = []
        self._told: dict[int, tuple[int, int, int]] = {}
        self._piece_ns = _SHORTEST_NS
        self._begin_ns = self._end_ns = 0
        self._lock = threading.RLock()  # the garbage collector may end a span while this thread is in it

    def add(self, name: str, begin_ns: int, end_ns: int, failed: bool) -> None:
        """Count a span that has ended; it may have any name, and never raises."""
        with self._lock:
            if not 0 <= end_ns - self._begin_ns < self._piece_ns:
                self._close()
                self._begin_ns = end_ns
            self._end_ns = end_ns
            try:
                sums = self._sums[name]
            except (KeyError, TypeError):
                sums = self._new_name(name)
            sums.runs += 1
            if end_ns > begin_ns:
                sums.duration_ns += end_ns - begin_ns
            if failed:
                sums.failed += 1

    def read(self) -> tuple[list[str], bytes]:
        """Return the names, and what was not told before as ``PIECE`` after ``PIECE``."""
        with self._lock:
            self._close()
            self._begin_ns = 0
            pieces, self._pieces, self._piece_ns = self._pieces, [], _SHORTEST_NS
            names = list(self._names)
            latest = {index: sums for piece in pieces for index, sums in piece.sums.items()}
            before = _Piece(0, 0, {index: self._told[index] for index in latest if index in self._told})
            self._told |= latest
        told = (
            PIECE.pack(index, piece.begin_ns, piece.end_ns, *sums)
            for piece in (before, *pieces)
            for index, sums in piece.sums.items()
        )
        return names, b"".join(told)

    def _close(self) -> None:
        """Keep the piece that is open, and make room for the next one."""
        sums = {}
        for one in (self._others, *self._sums.values()):
            if one.runs != one.kept:
                one.kept = one.runs
                sums[one.index] = (one.runs, one.duration_ns, one.failed)
        if not sums:
            return
        self._pieces.append(_Piece(self._begin_ns, self._end_ns, sums))
        while len(self._pieces) >= PIECES:
            self._piece_ns *= 2
            self._pieces = _joined(self._pieces, self._piece_ns)

    def _new_name(self, name: object) -> _Sums:
        if not isinstance(name, str) or len(self._names) > MAX_NAMES:
            return self._others
        shown = name[:_LONGEST_NAME].encode("utf-8", "replace").decode()
        sums = self._sums.get(shown)
        if sums is None:
            sums = self._sums[shown] = _Sums(len(self._names))
            self._names.append(shown)
        return sums


def _joined(pieces: list[_Piece], longest_ns: int) -> list[_Piece]:
    """Return the pieces, of which those that together are shorter than that are one."""
    joined: list[_Piece] = []
    for piece in pieces:
        # Of a clock that was set back, the pieces may lie before those that were before them.
        if joined and piece.end_ns - joined[-1].begin_ns < longest_ns:
            joined[-1].end_ns = max(joined[-1].end_ns, piece.end_ns)
            joined[-1].sums |= piece.sums
        else:
            joined.append(piece)
    return joined
