"""The thread that owns a recording, for tools that must be stopped where they were started.

On which thread a stage may end is in :mod:`~verl_profiling.capture.stage`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["OwnerAbsentError", "OwnerThread"]


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
