"""Answers to ``stop_capture`` that come after its timeout, and workers that died: what they recorded.

How long they are waited for at the end of training is in ``Controller.train_end``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.controller.calls import Call
from verl_profiling.controller.participants import Participants
from verl_profiling.controller.step_folders import StepFolders, WrittenStep

__all__ = ["DYING_S", "OverdueStop", "OverdueStops"]

DYING_S = 20.0
"""How long a killed process is waited for that is still to be seen: to give back its memory takes time."""
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True)
class OverdueStop:
    """A call that has not returned in time, and the capture that it was to stop."""

    call: Call
    request: CaptureRequest
    participants: Participants


class OverdueStops:
    """Keeps calls that are overdue until they return.

    Args:
        folders: Where their step folders are.
    """

    def __init__(self, folders: StepFolders) -> None:
        self._folders = folders
        self._overdue: list[tuple[OverdueStop, WrittenStep]] = []

    @property
    def calls(self) -> list[Call]:
        """The calls that have not returned yet."""
        return [stop.call for stop, _ in self._overdue if not stop.call.future.done()]

    @property
    def folders(self) -> set[Path]:
        """The step folders into which they may still write."""
        return {written.folder for stop, written in self._overdue if not stop.call.future.done()}

    @property
    def dying(self) -> bool:
        """Whether a worker is said to be dead whose process can still be seen."""
        return any(stop.participants.is_ending(stop.call) for stop, _ in self._overdue)

    def wait_for_the_dying(self, timeout_s: float) -> None:
        """Wait until the processes of dead workers have ended, and write nothing any more."""
        deadline = time.monotonic() + timeout_s
        while self.dying and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)

    def expect(self, overdue: list[OverdueStop], written: WrittenStep) -> None:
        """Keep the calls of a capture whose manifest has been written without them."""
        for stop in overdue:
            stop.call.awaited = True
            self._overdue.append((stop, written))

    def take(self) -> None:
        """Bring the manifests up to date with the answers that have come.

        Raises:
            OSError: A step folder cannot be written.
        """
        overdue, self._overdue = self._overdue, []
        for stop, written in overdue:
            if not stop.call.future.done() or stop.participants.is_ending(stop.call):
                self._overdue.append((stop, written))
                continue
            result = stop.participants.take_late_stop(stop.call, stop.request)
            if result is not None:
                self._folders.replace_worker(written, result)
