"""Takes the accounts of steps from the loop to the log and the sinks; the loop does not wait for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from verl_profiling.background import BackgroundWork
from verl_profiling.step_account import StepAccount
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch.log_writer import LogWriter
from verl_profiling.watch.sinks import Sink, open_sink
from verl_profiling.watch.values import values_of

__all__ = ["Outlet"]

logger = logging.getLogger(__name__)

_MOST_PENDING = 1000


class Outlet:
    """Writes on a thread of its own.

    Accounts become complete in batches, when the workers were read. The sinks get one of them with each step
    of the loop, so that what draws them keeps up; the rest when training ends.

    Args:
        folder: The run's folder.
        sinks: Names of sinks, as in ``watch.sinks``.
        log: The log; ``None`` for none.
    """

    def __init__(self, folder: Path, sinks: Sequence[str], log: WatchLog | None) -> None:
        self._folder = folder
        self._names = list(sinks)
        self._log = LogWriter(log) if log is not None else None
        self._sinks: dict[str, Sink] | None = None
        self._waiting: deque[StepAccount] = deque(maxlen=_MOST_PENDING)
        self._work = BackgroundWork("watch")
        self._pending = 0
        self._lock = threading.Lock()
        self._complained = False

    def step_ended(self, account: StepAccount) -> None:
        """Log a step, of whose account the workers are still missing."""
        if self._log is not None:
            self._log.add(account)
        if self._waiting:
            self._pass_on(self._waiting.popleft())

    def completed(self, account: StepAccount) -> None:
        """Log an account that is complete, and keep it for the sinks."""
        if self._log is not None:
            self._log.add(account)
        if self._names:
            if self._sinks is None:
                self._sinks = self._opened()
            self._waiting.append(account)

    def close(self, timeout_s: float) -> None:
        """Write what is left.

        Args:
            timeout_s: How long to wait for that.
        """
        if self._log is not None and not self._log.close(timeout_s):
            logger.warning("watch: its log does not take the last steps within %g s", timeout_s)
        while self._waiting:
            self._pass_on(self._waiting.popleft())
        for name in list(self._sinks or ()):
            self._work.submit(partial(self._close, name))
        if not self._work.drain(timeout_s):
            logger.warning("watch: its sinks do not take the last steps within %g s", timeout_s)

    def _opened(self) -> dict[str, Sink]:
        """Open the sinks, on the loop's thread: runs of MLflow are active by thread."""
        sinks = {}
        for name in self._names:
            try:
                sinks[name] = open_sink(name, self._folder)
            except Exception as error:
                logger.warning("watch.sinks: %s gets nothing: %s: %s", name, type(error).__name__, error)
        return sinks

    def _pass_on(self, account: StepAccount) -> None:
        if self._sinks:
            self._submit(partial(self._write, account))

    def _write(self, account: StepAccount) -> None:
        values = values_of(account)
        for name, sink in list((self._sinks or {}).items()):
            self._with(name, partial(sink.write, account.step, values))

    def _close(self, name: str) -> None:
        sink = (self._sinks or {}).get(name)
        if sink is not None:
            self._with(name, sink.close)

    def _with(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            logger.warning("watch.sinks: %s is switched off: %s: %s", name, type(error).__name__, error)
            if self._sinks is not None:
                del self._sinks[name]

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._pending >= _MOST_PENDING:
                if not self._complained:
                    logger.warning("watch: what is to be written of its steps piles up; the rest is left out")
                self._complained = True
                return
            self._pending += 1
        self._work.submit(partial(self._done, work))

    def _done(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._pending -= 1
