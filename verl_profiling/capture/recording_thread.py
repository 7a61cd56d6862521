"""The thread that owns a recording, for tools that must be stopped where they were started.

On which thread a stage may end is in :mod:`~verl_profiling.capture.stage`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["HeldLock", "OwnerAbsentError", "OwnerThread", "on_main_thread"]

logger = logging.getLogger(__name__)

_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_scheduled: list[object] = []


class HeldLock:
    """A lock that its holder may take again, and of which a thread can tell whether it is the holder.

    Attributes:
        held_here: Whether the current thread holds it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0
        self._depth = 0

    @property
    def held_here(self) -> bool:
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = 0
        self._lock.release()


class OwnerAbsentError(RuntimeError):
    """The owner did not run the action: it has ended, or passed no stage in time."""


class OwnerThread:
    """Passes actions from other threads to the thread that owns a recording.

    The owner looks for an action whenever it passes a stage, in :meth:`serve`.

    Attributes:
        waiting: Whether an action was handed over that the owner has not taken yet.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._id = 0
        self._action: Callable[[], None] | None = None
        self._done = threading.Event()

    def claim(self) -> None:
        """Make the current thread the owner."""
        self._id = threading.get_native_id()

    @property
    def is_main(self) -> bool:
        """Whether the main thread is the owner."""
        return self._id == threading.main_thread().native_id

    def is_current(self) -> bool:
        """Return whether the current thread is the owner."""
        return self._id == threading.get_native_id()

    def serve(self) -> None:
        """Run the action that was handed over, if the current thread is the owner."""
        action = self._action
        if action is not None and self.is_current():
            self._withdraw()
            action()
            self._done.set()

    def ask(self, action: Callable[[], None]) -> None:
        """Let the owner run ``action`` at its next stage; a later action takes its place."""
        self._action, self.waiting = action, True

    def hand_over(self, action: Callable[[], None], timeout_s: float) -> None:
        """Let the owner run ``action``, and wait until it has.

        Raises:
            OwnerAbsentError: The owner has ended, or passed no stage for ``timeout_s`` seconds.
        """
        if not self.is_alive():
            raise OwnerAbsentError("the owner has ended")
        self._done.clear()
        self._action, self.waiting = action, True
        if not self._done.wait(timeout_s):
            self._withdraw()
            raise OwnerAbsentError(f"the owner passed no stage for {timeout_s:.1f} s")

    def _withdraw(self) -> None:
        self._action, self.waiting = None, False

    def is_alive(self) -> bool:
        """Return whether the owner has not ended."""
        # by its native id, because Python's own ids are reused at once
        tasks = Path("/proc/self/task")
        return not tasks.exists() or (tasks / str(self._id)).exists()


def on_main_thread(action: Callable[[], None]) -> None:
    """Let the main thread run ``action`` as soon as it is between two instructions of Python.

    It is not inside of an operator of torch then, where stopping torch's profiler would end the process.
    While it waits for one, or for anything else that is not Python, so does the action.
    """

    def run(_: object) -> int:
        _scheduled.remove(call)
        try:
            action()
        except Exception:
            logger.exception("what was to run on the main thread failed")
        return 0

    call = _PENDING_CALL(run)
    _scheduled.append(call)
    if ctypes.pythonapi.Py_AddPendingCall(call, None):  # so many wait already
        _scheduled.remove(call)
