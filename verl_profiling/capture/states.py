"""The states of a capture, and the table of allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from verl_profiling.errors import CaptureStateError

__all__ = ["TRANSITIONS", "Event", "State", "StateMachine"]


class State(Enum):
    """State of a process."""

    IDLE = "idle"
    ARMED = "armed"
    RECORDING = "recording"


class Event(Enum):
    """An event that changes the state."""

    START = "start"
    ARM = "arm"
    STAGE_BEGIN = "stage begins"
    STAGE_END = "stage ends"
    STOP = "stop"
    FAIL = "fail"


Transitions = Mapping[tuple[State, Event], State]

TRANSITIONS: Transitions = {
    (State.IDLE, Event.START): State.RECORDING,
    (State.IDLE, Event.ARM): State.ARMED,
    (State.ARMED, Event.STAGE_BEGIN): State.RECORDING,
    (State.RECORDING, Event.STAGE_END): State.ARMED,
    (State.ARMED, Event.STOP): State.IDLE,
    (State.RECORDING, Event.STOP): State.IDLE,
    (State.IDLE, Event.FAIL): State.IDLE,
    (State.ARMED, Event.FAIL): State.ARMED,
    (State.RECORDING, Event.FAIL): State.IDLE,
}
"""Transitions of a process that records itself."""


class StateMachine:
    """A state, and the only way to change it.

    Args:
        transitions: The allowed transitions.
        who: Whose state it is, for messages.
    """

    def __init__(self, transitions: Transitions, who: str) -> None:
        self.state = State.IDLE
        self._transitions = transitions
        self._who = who

    def move(self, event: Event) -> None:
        """Change the state.

        Raises:
            CaptureStateError: The event is not possible now.
        """
        try:
            self.state = self._transitions[self.state, event]
        except KeyError:
            raise CaptureStateError(
                f"{event.value}: not possible while {self.state.value} ({self._who})"
            ) from None
