"""Writes a log of trajectories as a member of the timeline: a process beside its worker's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import msgspec
import numpy as np

from verl_profiling.timeline.logs import Ints, Mask, mended_log
from verl_profiling.timeline.member import ID_STRIDE, LogJob, Member, MemberFile
from verl_profiling.timeline.processes import TRAJECTORIES_PID, name_process, name_row, shortened
from verl_profiling.timeline.requests import Arrow, joined
from verl_profiling.timeline.rows import Layout, lay_out
from verl_profiling.timeline.trace import Event
from verl_profiling.trajectory_log import (
    Block,
    Counted,
    Fact,
    Lag,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)

_MOST_FACTS = 100
_TEXT_LENGTH = 1_000  # characters of an argument
_LEAST_LAG_NS = 1_000_000
_BAD = {"failed": "terrible", "cancelled": "bad"}
_ENCODER = msgspec.json.Encoder()


def write_log_member(job: LogJob) -> Member:
    """Write one log as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The log cannot be read at all.
        OSError: The member cannot be written.
    """
    log = mended_log(job.source, job.limits, job.fates)
    shift_ns = job.base_ns + job.source.offset_ns
    make = _RecordEvents(job.pid + TRAJECTORIES_PID, shift_ns)
    loops = _loop_names(log)

    def is_wanted(begins: Ints, ends: Ints) -> Mask:
        wanted = (ends >= shift_ns) & (ends - begins >= job.keep.min_us * 1000)
        if job.keep.windows_ns:
            own = begins - job.source.offset_ns, ends - job.source.offset_ns
            during = ((own[0] < end) & (own[1] >= begin) for begin, end in job.keep.windows_ns)
            wanted &= np.logical_or.reduce(list(during))
        return np.asarray(wanted)

    layout = lay_out(log, is_wanted, lambda loop: loops.get(loop, f"loop {loop}"))
    arrows = _arrows(job, log.spans, layout)
    counters = job.keep.select(list(_counters(log, make, loops)), job.base_ns)
    names = name_process(make.pid, f"{job.title} trajectories")
    rows = (event for row, name in enumerate(layout.names) for event in name_row(make.pid, row, name))
    with MemberFile(job.output) as file:
        written = file.write_all(chain(names, rows, _slices(log, layout, arrows, make), counters))
    early = sum(record.end_ns < shift_ns for part in (log.trajectories, log.spans) for record in part)
    counts = (
        (early, "not shown, because they ended long before the step began"),
        (layout.crowded, "not shown, because too many others are beside them"),
    )
    return Member(
        path=job.source.path,
        events=written,
        left_out=layout.left_out,
        problems=[*log.problems, *(f"{what}: {count:,}" for count, what in counts if count)],
        arrows=list(arrows.values()),
    )


def _slices(
    log: TrajectoryLog, layout: Layout, arrows: Mapping[int, Arrow], make: _RecordEvents
) -> Iterator[Event]:
    """Yield the events of the records that are shown."""
    for trajectory, row in zip(log.trajectories, layout.trajectories.tolist(), strict=True):
        if row >= 0:
            yield make.trajectory(trajectory, row + 1)
    for place, (span, row) in enumerate(zip(log.spans, layout.spans.tolist(), strict=True)):
        if row >= 0:
            yield make.span(span, row + 1)
            if arrow := arrows.get(place):
                yield make.arrow(span, row + 1, arrow.id)
    blocking = dict.fromkeys((block.span for block in log.blocks), "")
    blocking.update((span.id, span.name) for span in log.spans if span.id in blocking)
    for block, row in zip(log.blocks, layout.blocks.tolist(), strict=True):
        if row >= 0:
            yield make.block(block, blocking[block.span], row + 1)


def _counters(log: TrajectoryLog, make: _RecordEvents, loops: Mapping[int, str]) -> Iterator[Event]:
    """Yield how late loops were, what was counted, and how many trajectories were running."""
    for lag in log.lags:
        yield from make.lag(lag, loops.get(lag.loop, f"loop {lag.loop}"))
    yield from map(make.count, log.counts)
    begins = np.sort(np.array([trajectory.begin_ns for trajectory in log.trajectories], np.int64))
    ends = np.sort(np.array([trajectory.end_ns for trajectory in log.trajectories], np.int64))
    changes = np.unique(np.concatenate((begins, ends)))
    running = np.searchsorted(begins, changes, "right") - np.searchsorted(ends, changes, "right")
    yield from map(make.running, changes.tolist(), running.tolist())


def _loop_names(log: TrajectoryLog) -> dict[int, str]:
    """Return the names of event loops: that of the thread, with its number where two have the same."""
    names = {loop.id: loop.name for loop in reversed(log.loops)}
    known = list(names.values())
    return {
        number: f"loop {name}"
        if name and known.count(name) == 1
        else f"loop {name} {number}".replace("  ", " ")
        for number, name in names.items()
    }


def _arrows(job: LogJob, spans: list[SpanRecord], layout: Layout) -> dict[int, Arrow]:
    """Return the arrows to requests, by the place of the span that they leave."""
    offset_ns = job.source.offset_ns
    waiting = (
        (place, span.request, span.begin_ns - offset_ns, span.end_ns - offset_ns)
        for place, (span, row) in enumerate(zip(spans, layout.spans.tolist(), strict=True))
        if span.request and row >= 0
    )
    return {
        place: Arrow(
            job.index * ID_STRIDE + place,
            (request.id, request.begin_ns),
            max(spans[place].begin_ns - offset_ns, job.base_ns),
        )
        for place, request in joined(waiting, job.requests).items()
    }


def _trajectory_name(trajectory: TrajectoryRecord) -> str:
    """Return what a trajectory is called: ``g12/3``, ``g12/4 (failed)``, ``g13/0 (validate)``."""
    group = trajectory.group or f"trajectory {trajectory.id}"
    name = group if trajectory.sample is None else f"{group}/{trajectory.sample}"
    fate = [trajectory.fate] * (trajectory.fate != "done")
    said = ["validate"] * (trajectory.facts.get("validate") is True) + fate
    return f"{shortened(name)} ({shortened(', '.join(said))})" if said else shortened(name)


class _RecordEvents:
    """Makes events of records, on the timeline's clock, in one process.

    Args:
        pid: Id of the process.
        shift_ns: Subtracted from the times of records, gives those of the timeline.
    """

    def __init__(self, pid: int, shift_ns: int) -> None:
        self.pid = pid
        self._shift_ns = shift_ns

    def trajectory(self, record: TrajectoryRecord, tid: int) -> Event:
        """Return the slice of a trajectory."""
        said: dict[str, Fact] = {"group": record.group, "sample": record.sample, "fate": record.fate}
        if record.error:
            said["error"] = record.error
        event = self._slice("trajectory", _trajectory_name(record), tid, record.begin_ns, record.end_ns)
        event.args = _arguments(record.facts, said)
        event.cname = _BAD.get(record.fate)
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
        return Event("s", "request", "generate", self.pid, tid, self._us(record.begin_ns), id=number)

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
        event = Event("C", "", counter, self.pid, None, self._us(at_ns))
        event.args = msgspec.Raw(_ENCODER.encode({unit: value}))
        return event

    def _slice(self, category: str, name: str, tid: int, begin_ns: int, end_ns: int) -> Event:
        since = max(begin_ns - self._shift_ns, 0)
        duration = end_ns - self._shift_ns - since
        return Event("X", category, name, self.pid, tid, since / 1000, duration / 1000)

    def _us(self, at_ns: int) -> float:
        return max(at_ns - self._shift_ns, 0) / 1000


def _arguments(facts: Mapping[str, Fact], said: Mapping[str, Fact]) -> msgspec.Raw:
    """Return arguments as JSON, with texts in bounded length."""
    own = {shortened(name): facts[name] for name in list(facts)[:_MOST_FACTS]}
    bounded = {name: fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact for name, fact in own.items()}
    said = {name: fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact for name, fact in said.items()}
    return msgspec.Raw(_ENCODER.encode({**bounded, **said}))
