"""The end of a process whose loop did not say that it ended: what is open is closed, with the reason."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator

from verl_profiling import termination
from verl_profiling.controller.calls import Round

__all__ = ["LoopEnding"]

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""How long a process that ends waits for its workers, at most, each time: supervisors kill after 30 s."""


class LoopEnding:
    """Closes a loop's profiling at the exit of its process, unless the loop did.

    Args:
        close: Returns the rounds that close it, given the reason.
    """

    def __init__(self, close: Callable[[str], Iterator[Round]]) -> None:
        self._close = close
        self._waits = False
        self._process = 0
        self._recording = False

    def records(self, recording: bool) -> None:
        """Note whether a capture is open."""
        if recording and not self._waits:
            atexit.register(self._leave)
            self._waits, self._process = True, os.getpid()
        if recording != self._recording:
            self._recording = recording
            (termination.hold if recording else termination.release)()

    def ended(self) -> None:
        """Note that the loop said that it ended."""
        self.records(False)
        if self._waits:
            atexit.unregister(self._leave)
            self._waits = False

    def _leave(self) -> None:
        if self._process != os.getpid():  # a fork of the loop's process ends, and the loop goes on
            return
        self._waits = False
        why = f"the process of the loop ended{_why()}, and the loop did not say so"
        if self._recording:
            logger.warning("closing the capture: %s", why)
        try:
            for round_ in self._close(why):
                round_.timeout_s = min(round_.timeout_s, PATIENCE_S)
                round_.wait()
        except Exception as error:
            logger.error("profiling could not be closed: %s: %s", type(error).__name__, error)


def _why() -> str:
    if termination.was_terminated():
        return " by SIGTERM"
    error = getattr(sys, "last_value", None)
    return f" with {type(error).__name__}: {error}" if error is not None else ""
