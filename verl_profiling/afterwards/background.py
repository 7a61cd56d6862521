"""A thread that does work in order, off the training path; it is started when there is work."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

__all__ = ["BackgroundWork"]

logger = logging.getLogger(__name__)

_IDLE_S = 2.0


class BackgroundWork:
    """Runs functions one after another.

    Args:
        name: What it does, for the name of its thread.
        idle_s: The thread ends when there has been no work for so long.
    """

    def __init__(self, name: str, idle_s: float = _IDLE_S) -> None:
        self._name = name
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._work: list[tuple[float, int, Callable[[], float | None]]] = []
        self._numbers = count()
        self._unfinished = 0
        self._running = self._closed = False

    def submit(self, work: Callable[[], float | None]) -> None:
        """Queue a function; it returns ``None``, or after how many seconds it is to be called again."""
        with self._changed:
            self._unfinished += 1
            self._closed = False
            self._put(work, 0.0)
            if not self._running:
                thread = threading.Thread(target=self._run, name=f"verl-profiling-{self._name}", daemon=True)
                try:
                    thread.start()
                    self._running = True
                except RuntimeError:  # the interpreter ends, and since Python 3.12 starts no thread
                    logger.debug("%s: work waits for drain()", self._name)

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return not self._unfinished

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether it was done in time."""
        with self._changed:
            alone = not self._running and self._has_work()
            self._running = self._running or alone
        if alone:
            self._run()
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, max(0.0, timeout_s))

    def close(self, timeout_s: float) -> bool:
        """Like :meth:`drain`; besides the thread ends without waiting for more work, which starts another."""
        done = self.drain(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return done

    def _put(self, work: Callable[[], float | None], delay_s: float) -> None:
        heapq.heappush(self._work, (time.monotonic() + delay_s, next(self._numbers), work))
        self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._work)

    def _next(self) -> Callable[[], float | None] | None:
        """Wait for work that is due; return ``None`` when there has been none for a while."""
        with self._changed:
            while self._has_work() or (
                self._changed.wait_for(lambda: self._has_work() or self._closed, self._idle_s)
                and self._has_work()
            ):
                wait_s = self._work[0][0] - time.monotonic()
                if wait_s <= 0:
                    return heapq.heappop(self._work)[2]
                self._changed.wait(wait_s)
            self._running = False
            return None

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                again_s = work()
            except Exception:
                logger.exception("%s: work in the background failed", self._name)
                again_s = None
            with self._changed:
                if again_s is not None:
                    self._put(work, again_s)
                else:
                    self._unfinished -= 1
                    self._changed.notify_all()
