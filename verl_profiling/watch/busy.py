"""A stage for work that overlaps: it lasts while anything is under way."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

from verl_profiling import clock
from verl_profiling.watch.ring import StageRing

__all__ = ["PIECE_NS", "Busy"]

PIECE_NS = 1_000_000_000
"""Where something is always under way, the stage is kept in pieces that are about this long."""


class Busy:
    """Keeps in a ring when anything was under way: requests of an engine, trajectories of an agent loop.

    ``with busy:`` around each of them, in any thread or task.

    Args:
        ring: Where the stage is kept.
        name: Its name.
    """

    def __init__(self, ring: StageRing, name: str) -> None:
        self._ring = ring
        self._name = name
        self._under_way = 0
        self._since_ns = 0
        self._lock = threading.RLock()  # what has ended may be noticed inside of it, by the garbage collector

    def __enter__(self) -> None:
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since_ns = clock.now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def while_alive(self, stream: object) -> None:
        """Count an object as under way until nobody has it any longer: a response that is streamed."""
        self.__enter__()
        weakref.finalize(stream, self._end).atexit = False

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1
            now_ns = clock.now_ns()
            if not self._under_way or now_ns - self._since_ns >= PIECE_NS:
                self._ring.add(self._name, self._since_ns, now_ns)
                self._since_ns = now_ns
