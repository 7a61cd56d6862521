"""The records of a log of trajectories as events of a timeline."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from verl_profiling.timeline.processes import shortened
from verl_profiling.timeline.trace import Event
from verl_profiling.trajectory_log import Block, Counted, Fact, Lag, SpanRecord, TrajectoryRecord

__all__ = ["RecordEvents", "trajectory_name"]

_MOST_FACTS = 100
_TEXT_LENGTH = 1_000  # characters of an argument
_LEAST_LAG_NS = 1_000_000
_BAD = {"failed": "terrible", "cancelled": "bad"}
_ENCODER = msgspec.json.Encoder()


def trajectory_name(trajectory: TrajectoryRecord, fate: str) -> str:
    """Return what a trajectory is called: ``g12/3``, ``g12/4 (failed)``, ``g13/0 (validate)``."""
    group = trajectory.group or f"trajectory {trajectory.id}"
    name = group if trajectory.sample is None else f"{group}/{trajectory.sample}"
    said = ["validate"] * (trajectory.facts.get("validate") is True) + [fate] * (fate != "done")
    return f"{shortened(name)} ({shortened(', '.join(said))})" if said else shortened(name)


class RecordEvents:
    """Makes events of records, on the timeline's clock, in one process.

    Args:
        pid: Id of the process.
        shift_ns: Subtracted from the times of records, gives those of the timeline.
    """

    def __init__(self, pid: int, shift_ns: int) -> None:
        self._pid = pid
        self._shift_ns = shift_ns

    def trajectory(self, record: TrajectoryRecord, fate: str, tid: int) -> Event:
        """Return the slice of a trajectory."""
        said: dict[str, Fact] = {"group": record.group, "sample": record.sample, "fate": fate}
        if record.error:
            said["error"] = record.error
        event = self._slice("trajectory", trajectory_name(record, fate), tid, record.begin_ns, record.end_ns)
        event.args = _arguments(record.facts, said)
        event.cname = _BAD.get(fate)
        return event

    def span(self, record: SpanRecord, tid: int) -> Event:
        """Return the slice of a span."""
        said: dict[str, Fact] = {}
        if record.failed:
            said["failed"] = True
        if record.open:
            said["open"] = True
        if record.request:
            said["request"] = record.request
        event = self._slice("span", shortened(record.name), tid, record.begin_ns, record.end_ns)
        if record.facts or said:
            event.args = _arguments(record.facts, said)
        if record.failed:
            event.cname = _BAD["failed"]
        return event

    def arrow(self, record: SpanRecord, tid: int, number: int) -> Event:
        """Return the begin of an arrow that leaves a span."""
        return Event("s", "request", "generate", self._pid, tid, self._us(record.begin_ns), id=number)

    def block(self, record: Block, span_name: str, tid: int) -> Event:
        """Return the slice of a time in which an event loop stood still, named by what was seen to."""
        who = (span_name or record.function) if record.function else "unknown"
        event = self._slice("block", shortened(who), tid, record.begin_ns, record.end_ns)
        event.args = _arguments({}, {"task": record.task, "function": record.function})
        return event

    def lag(self, record: Lag, loop: str) -> list[Event]:
        """Return how late a loop was, from when something was due until it ran; below 1 ms it was not."""
        late_ms = record.late_ns / 1e6 if record.late_ns >= _LEAST_LAG_NS else 0.0
        due_ns = record.at_ns - record.late_ns
        values = ((due_ns, late_ms), (record.at_ns, 0.0)) if late_ms else ((record.at_ns, 0.0),)
        return [self._count(f"{loop} lag", at_ns, "ms", value) for at_ns, value in values]

    def running(self, at_ns: int, count: int) -> Event:
        """Return how many trajectories were running from an instant on."""
        return self._count("trajectories", at_ns, "running", count)

    def count(self, record: Counted) -> Event:
        """Return how much of something there was from an instant on."""
        return self._count(shortened(record.name), record.at_ns, "count", record.value)

    def _count(self, counter: str, at_ns: int, unit: str, value: float) -> Event:
        """Return the value of a counter, which Perfetto names by both words."""
        event = Event("C", "", counter, self._pid, None, self._us(at_ns))
        event.args = msgspec.Raw(_ENCODER.encode({unit: value}))
        return event

    def _slice(self, category: str, name: str, tid: int, begin_ns: int, end_ns: int) -> Event:
        since = max(begin_ns - self._shift_ns, 0)
        duration = end_ns - self._shift_ns - since
        return Event("X", category, name, self._pid, tid, since / 1000, duration / 1000)

    def _us(self, at_ns: int) -> float:
        return max(at_ns - self._shift_ns, 0) / 1000


def _arguments(facts: Mapping[str, Fact], said: Mapping[str, Fact]) -> msgspec.Raw:
    """Return arguments as JSON, with texts in bounded length."""
    own = {shortened(name): facts[name] for name in list(facts)[:_MOST_FACTS]}
    bounded = {name: fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact for name, fact in own.items()}
    said = {name: fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact for name, fact in said.items()}
    return msgspec.Raw(_ENCODER.encode({**bounded, **said}))
