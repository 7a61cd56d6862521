"""A thread that does work in order, off the training path."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["BackgroundWork"]

logger = logging.getLogger(__name__)


class BackgroundWork:
    """Runs functions one after another, on a thread that exists while there is work.

    It is no executor of Python's, for which the interpreter waits at its end.

    Args:
        name: What it does, for the name of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._running = False

    def submit(self, work: Callable[[], object]) -> None:
        """Queue a function."""
        with self._changed:
            self._work.append(work)
            if not self._running:
                thread = threading.Thread(target=self._run, name=f"verl-profiling-{self._name}", daemon=True)
                try:
                    thread.start()
                    self._running = True
                except RuntimeError:  # the interpreter ends, and since Python 3.12 starts no thread
                    logger.debug("%s: work waits for drain()", self._name)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether it was done in time."""
        with self._changed:
            alone = not self._running and bool(self._work)
            self._running = self._running or alone
        if alone:
            self._run()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._running = False
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("%s: work in the background failed", self._name)
