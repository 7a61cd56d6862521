"""Who asked for a capture and why, and the rows of its suspects: as data, and in words."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_profiling.report.sparkline import sparkline
from verl_profiling.trigger import Sign, TriggerKind
from verl_profiling.units import byte_size, duration

__all__ = [
    "Asked",
    "SuspectRow",
    "Unit",
    "asked_sentence",
    "in_unit",
    "shown_history",
]

Unit = Literal["s", "bytes", "share"]

_MOST_BARS = 60


class SuspectRow(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of a suspect, against its peers'.

    Attributes:
        suspect: Lane or worker that may be the cause.
        peers: What it is compared with; of several, the median.
        kind: ``stage``: time in it without waiting for other ranks. ``time``: what the lane did in the stage
            that was slow, or else in the step; these add up to it. ``kernel``: self time. ``memory``: a peak.
        name: Name of the stage, the part of the time, the kernel or the measure.
        unit: Unit of the numbers.
        value: The suspect's.
        peer_value: The peers'; ``None`` where they have none.
    """

    suspect: str
    peers: str
    kind: Literal["stage", "time", "kernel", "memory"]
    name: str
    unit: Unit = "s"
    value: float
    peer_value: float | None

    @property
    def difference(self) -> float | None:
        """By how much the suspect has more."""
        return None if self.peer_value is None else self.value - self.peer_value


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for the capture, and why.

    Attributes:
        kind: ``demand``, ``anomaly`` for the watch, or ``schedule`` where one of them had asked as well.
        reason: Why, as a sentence.
        by: Who asked on demand.
        request: Id of the request on demand.
        when: When the capture began, on the clock of the loop's host, as a date and time.
        sign: What the watch noticed.
        noticed: The step in which it noticed that.
        stage: The stage that was slow, or that was asked for.
        last: Captured rank that the others waited for in the collectives of that stage, if it was mostly one.
        waited_s: For how long they did, added up.
        suspects: Processes that may be the cause.
        peers: Processes that they are compared with.
        unit: Unit of the next three.
        value: What the step that was noticed had.
        median: What the steps before it had.
        history: These steps' values, and at the end that of the one that was noticed.
    """

    kind: TriggerKind
    reason: str
    by: str = ""
    request: str = ""
    when: str = ""
    sign: Sign = ""
    noticed: int | None = None
    stage: str = ""
    last: str = ""
    waited_s: float = 0.0
    suspects: list[str] = []
    peers: list[str] = []
    unit: Unit = "s"
    value: float = 0.0
    median: float = 0.0
    history: list[float] = []


def asked_sentence(asked: Asked) -> str:
    """Return who asked for a capture, and why."""
    why = f": {asked.reason}" if asked.reason else ""
    if asked.kind == "demand":
        by = f" by {asked.by}" if asked.by else ""
        if asked.reason.startswith(said := f"asked for{by}"):
            why = asked.reason.removeprefix(said)
        named = f" (request {asked.request})" if asked.request else ""
        return f"asked for on demand{by}{named}, captured {asked.when}{why}"
    if asked.kind == "schedule":
        return f"captured by the schedule{why}"
    step = f"step {asked.noticed}"
    noticed = "" if asked.noticed is None or asked.reason.startswith(f"{step}:") else f" in {step}"
    return f"asked for by the watch, which noticed {asked.sign or 'something'}{noticed}{why}"


def shown_history(asked: Asked) -> str:
    """Return the values before and at what was noticed, with a bar for each; empty without a history."""
    if not asked.history:
        return ""
    return (
        f"{sparkline(asked.history, _MOST_BARS)} {in_unit(asked.history[-1], asked.unit)}, "
        f"median before {in_unit(asked.median, asked.unit)}"
    )


def in_unit(value: float, unit: Unit) -> str:
    """Return a number as a person reads it."""
    if unit == "bytes":
        return byte_size(value)
    return f"{value:.1%}" if unit == "share" else duration(value)
