"""Writes accounts into the log on a thread that runs rarely: a loop of short steps is not held up by it."""

from __future__ import annotations

import logging
import threading

from verl_profiling.step_account import StepAccount
from verl_profiling.watch.log import WatchLog

__all__ = ["LogWriter"]

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
_PAUSE_S = 0.2


class LogWriter:
    """Takes accounts from the loop, and writes those that have come a few times a second.

    A thread that is woken with every step asks for the interpreter in every step, and the loop gives it away
    wherever it calls the system.

    Args:
        log: The log.
    """

    def __init__(self, log: WatchLog) -> None:
        self._log = log
        self._waiting: list[StepAccount] = []
        self._lock = threading.Lock()
        self._come, self._hurry = threading.Event(), threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._complained = False

    def add(self, account: StepAccount) -> None:
        """Have an account written."""
        with self._lock:
            waiting = len(self._waiting)
            full = waiting >= _MOST_WAITING
            if not full:
                self._waiting.append(account)
        if full and not self._complained:
            logger.warning("watch: what is to be logged of its steps piles up; the rest is left out")
            self._complained = True
        if self._thread is None:
            self._start()
        elif not self._come.is_set():
            self._come.set()
        elif waiting == _MOST_WAITING // 2:
            self._hurry.set()

    def close(self, timeout_s: float) -> bool:
        """Write what is left; return whether that was done in time.

        Args:
            timeout_s: How long to wait for it.
        """
        self._ending = True
        self._come.set()
        self._hurry.set()
        if self._thread is None:
            self._write()
        else:
            self._thread.join(max(0.0, timeout_s))
        return not self._waiting and (self._thread is None or not self._thread.is_alive())

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="verl-profiling-watch-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and since Python 3.12 starts no thread
            return
        self._thread = thread

    def _run(self) -> None:
        while not self._ending:
            self._write()
            self._hurry.wait(_PAUSE_S)
            self._hurry.clear()
            self._come.wait()
            self._come.clear()
        self._write()

    def _write(self) -> None:
        with self._lock:
            accounts, self._waiting = self._waiting, []
        if accounts:
            self._log(*accounts)
