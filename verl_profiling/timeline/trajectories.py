"""Writes a log of trajectories as a member of the timeline: a process beside its worker's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain

import msgspec

from verl_profiling.timeline.logs import mended_log
from verl_profiling.timeline.member import ID_STRIDE, Member, MemberFile, MemberJob
from verl_profiling.timeline.processes import TRAJECTORIES_PID, draw, name_process, name_row, shortened
from verl_profiling.timeline.requests import Arrow, joined
from verl_profiling.timeline.rows import Layout, lay_out
from verl_profiling.timeline.trace import Event
from verl_profiling.trajectory_log import (
    Block,
    Fact,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)

_MOST_FACTS = 100
_TEXT_LENGTH = 1_000  # characters of an argument
_LEAST_LAG_NS = 1_000_000
_BAD = {"failed": "terrible", "cancelled": "bad"}


def write_log_member(job: MemberJob) -> Member:
    """Write one log as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The log cannot be read at all.
        OSError: The member cannot be written.
    """
    log = mended_log(job.source, job.limits, job.fates)
    drawn = _Drawn(job, log)
    counters = job.keep.select(list(drawn.counters()), job.base_ns)
    names = name_process(drawn.pid, f"{job.source.title} trajectories")
    rows = (event for row, name in enumerate(drawn.layout.names) for event in name_row(drawn.pid, row, name))
    with job.output.open("wb") as output, MemberFile(output) as file:
        written = file.write(chain(names, rows, drawn.slices(), counters))
    early = sum(one.end_ns < drawn.base_ns for part in (log.trajectories, log.spans) for one in part)
    counts = (
        (early, "not shown, because they ended long before the step began"),
        (drawn.layout.crowded, "not shown, because too many others are beside them"),
    )
    return Member(
        path=job.source.path,
        events=written,
        left_out=drawn.layout.left_out,
        problems=[*log.problems, *(f"{what}: {count:,}" for count, what in counts if count)],
        arrows=list(drawn.arrows.values()),
    )


class _Drawn:
    """The events of one log.

    Attributes:
        pid: Id of their process.
        base_ns: Time of ``ts == 0`` in the timeline, on the clock of the log.
        layout: Rows of the records.
        arrows: Arrows to requests, by the number of the span that they leave.
    """

    def __init__(self, job: MemberJob, log: TrajectoryLog) -> None:
        offset_ns = job.source.offset_ns
        self.pid, self.base_ns = job.pid + TRAJECTORIES_PID, job.base_ns + offset_ns
        self._log = log
        self._draw = partial(draw, self.base_ns, self.pid)
        base_ns, least_ns = self.base_ns, job.keep.min_us * 1000
        windows = [(begin + offset_ns, end + offset_ns) for begin, end in job.keep.windows_ns]

        def is_wanted(record: Block | TrajectoryRecord | SpanRecord) -> bool:
            begin, end = record.begin_ns, record.end_ns
            is_shown = end >= base_ns and end - begin >= least_ns
            return is_shown and (not windows or any(begin < last and end >= first for first, last in windows))

        named = Counter(loop.name for loop in log.loops)
        self._loops = {
            loop.id: f"loop {loop.name}"
            if loop.name and named[loop.name] == 1
            else f"loop {loop.name} {loop.id}".replace("  ", " ")
            for loop in reversed(log.loops)
        }
        self.layout = lay_out(log, is_wanted, self._loop)
        self.arrows = _arrows(job, log, self.layout)

    def slices(self) -> Iterator[Event]:
        """Yield the events of the records that are shown."""
        for one in self._log.trajectories:
            if (row := self.layout.trajectories.get(one.id)) is not None:
                yield self._trajectory(one, row + 1)
        for span in self._log.spans:
            if (row := self.layout.spans.get(span.id)) is not None:
                yield self._span(span, row + 1)
                if arrow := self.arrows.get(span.id):
                    ts = max(span.begin_ns - self.base_ns, 0) / 1000
                    yield Event("s", "request", "generate", self.pid, row + 1, ts, id=arrow.id)
        blocking = {block.span for block in self._log.blocks}
        names = {span.id: span.name for span in self._log.spans if span.id in blocking}
        for place, row in sorted(self.layout.blocks.items()):
            block = self._log.blocks[place]
            who = (names.get(block.span) or block.function) if block.function else "unknown"
            about = _bounded({"task": block.task, "function": block.function})
            yield self._draw(row + 1, "block", who, block.begin_ns, block.end_ns, about=about)

    def counters(self) -> Iterator[Event]:
        """Yield how late loops were, what was counted, and how many trajectories were running."""
        for lag in self._log.lags:
            name = f"{self._loop(lag.loop)} lag"
            if lag.late_ns >= _LEAST_LAG_NS:
                yield self._count(name, lag.at_ns - lag.late_ns, "ms", lag.late_ns / 1e6)
            yield self._count(name, lag.at_ns, "ms", 0.0)
        for count in self._log.counts:
            yield self._count(count.name, count.at_ns, "count", count.value)
        changes = Counter(one.begin_ns for one in self._log.trajectories)
        changes.subtract(one.end_ns for one in self._log.trajectories)
        running = 0
        for at_ns in sorted(changes):
            running += changes[at_ns]
            yield self._count("trajectories", at_ns, "running", running)

    def _count(self, counter: str, at_ns: int, unit: str, value: float) -> Event:
        """Return the value of a counter, which Perfetto names by both words."""
        event = Event("C", "", shortened(counter), self.pid, ts=max(at_ns - self.base_ns, 0) / 1000)
        event.args = msgspec.Raw(msgspec.json.encode({unit: value}))
        return event

    def _loop(self, number: int) -> str:
        """Return the name of an event loop: that of the thread, with its number where two have the same."""
        return self._loops.get(number, f"loop {number}")

    def _trajectory(self, record: TrajectoryRecord, tid: int) -> Event:
        own: dict[str, Fact] = {"group": record.group, "sample": record.sample, "fate": record.fate}
        if record.error:
            own["error"] = record.error
        about = _bounded(record.facts) | _bounded(own)
        event = self._draw(tid, "trajectory", "", record.begin_ns, record.end_ns, about=about)
        event.name, event.cname = _trajectory_name(record), _BAD.get(record.fate)
        return event

    def _span(self, record: SpanRecord, tid: int) -> Event:
        own: dict[str, Fact] = {"failed": record.failed, "open": record.open, "request": record.request}
        known = {name: value for name, value in own.items() if value}
        about = {**_bounded(record.facts), **_bounded(known)} if record.facts or known else None
        event = self._draw(tid, "span", record.name, record.begin_ns, record.end_ns, about=about)
        if record.failed:
            event.cname = _BAD["failed"]
        return event


def _arrows(job: MemberJob, log: TrajectoryLog, layout: Layout) -> dict[int, Arrow]:
    """Return the arrows to requests, by the number of the span that they leave."""
    offset_ns = job.source.offset_ns
    waiting = {span.id: span for span in log.spans if span.request and span.id in layout.spans}
    ends = (
        (number, span.request, span.begin_ns - offset_ns, span.end_ns - offset_ns)
        for number, span in waiting.items()
    )
    return {
        number: Arrow(
            job.index * ID_STRIDE + place,
            (request.id, request.begin_ns),
            max(waiting[number].begin_ns - offset_ns, job.base_ns),
        )
        for place, (number, request) in enumerate(joined(ends, job.requests).items())
    }


def _trajectory_name(trajectory: TrajectoryRecord) -> str:
    """Return what a trajectory is called: ``g12/3``, ``g12/4 (failed)``, ``g13/0 (validate)``."""
    group = trajectory.group or f"trajectory {trajectory.id}"
    name = group if trajectory.sample is None else f"{group}/{trajectory.sample}"
    fate = [trajectory.fate] * (trajectory.fate != "done")
    said = ["validate"] * (trajectory.facts.get("validate") is True) + fate
    return f"{shortened(name)} ({shortened(', '.join(said))})" if said else shortened(name)


def _bounded(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the first of some facts, with names and texts in bounded length."""
    return {
        shortened(name): fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact
        for name, fact in list(facts.items())[:_MOST_FACTS]
    }
