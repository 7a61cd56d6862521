"""Handles SIGTERM during a capture: the process exits by an exception, so that recordings are written.

Only the default action of the signal is replaced, and only during a capture. Processes with an own handler,
such as Ray workers, are left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_lock = threading.Lock()
_held = 0
_terminated = False


def hold() -> None:
    """Make SIGTERM raise ``SystemExit`` in the main thread, if the signal has its default action."""
    global _held
    with _lock:
        _held += 1
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _unwind)


def release() -> None:
    """Undo one :func:`hold`; after the last one, SIGTERM kills the process again."""
    global _held
    with _lock:
        _held = max(0, _held - 1)
        if not _held and _on_main_thread() and signal.getsignal(signal.SIGTERM) is _unwind:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def was_terminated() -> bool:
    """Return whether this process ends because of SIGTERM."""
    return _terminated


def _unwind(number: int, frame: FrameType | None) -> None:
    global _terminated
    if not _held:  # it was released on a thread that cannot restore the action
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _terminated = True
    raise SystemExit(128 + number)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _forget() -> None:
    """Restore the default action of SIGTERM in a forked child, which records nothing."""
    global _held, _lock
    _lock = threading.Lock()
    _held = 0
    release()


os.register_at_fork(after_in_child=_forget)
