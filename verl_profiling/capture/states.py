"""The states of a capture, and the one table of what may follow what."""

from __future__ import annotations

from enum import Enum

__all__ = ["TRANSITIONS", "Event", "State"]


class State(Enum):
    """What a process is doing."""

    IDLE = "idle"
    ARMED = "armed"
    RECORDING = "recording"


class Event(Enum):
    """What changes it."""

    START = "start"
    ARM = "arm"
    STAGE_BEGIN = "stage begins"
    STAGE_END = "stage ends"
    STOP = "stop"
    FAIL = "fail"


TRANSITIONS = {
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
