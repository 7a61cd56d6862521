"""SIGUSR2 on the loop's process: the next step is captured."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["SignalAsking"]

NAME = "SIGUSR2"


class SignalAsking:
    """Handles the signal from the begin of training to its end, if nobody else does.

    Args:
        ask: Asks for a capture, given the signal's name.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._installed = False

    def begin(self) -> None:
        """Handle it. Only the main thread may; a handler that is there already stays."""
        number = getattr(signal, NAME, None)
        if number is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, self._handle)
            self._installed = True

    def end(self) -> None:
        """Restore the default action, which ends the process, unless somebody else handles it now."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR2) == self._handle:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._ask(NAME)
