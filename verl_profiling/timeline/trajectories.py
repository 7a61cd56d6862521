"""Reads the logs of trajectories of a step, and draws each as a process beside its worker's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.manifest_lanes import Arrow, joined
from verl_profiling.timeline.member import ID_STRIDE, Member, MemberFile, MemberJob
from verl_profiling.timeline.processes import (
    TRAJECTORIES_PID,
    draw,
    name_process,
    name_row,
    packed_rows,
    shortened,
)
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.timeline.trace import Event
from verl_profiling.trajectory_log import (
    NO_SPAN,
    Block,
    Fact,
    LaterStatuses,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    read_log,
)

_MOST_FACTS = 100
_TEXT_LENGTH = 1_000  # characters of an argument
_LEAST_LAG_NS = 1_000_000
_BAD = {"failed": "terrible", "cancelled": "bad"}
_NOT_SHOWN = -1
_MOST_AT_ONCE = 100
_OWNER = -1  # what is around the outermost

_Numbered = TypeVar("_Numbered", TrajectoryRecord, SpanRecord)


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """One log of a step.

    Attributes:
        source: The file, its lane, and in ``offset_ns`` what to subtract from its times.
        log: Its records, on the clock of the process that wrote them; ``None`` if it cannot be read. No
            number repeats, nothing ends before it begins, trajectories and parents are there, a parent is
            of the same trajectory and comes first, and statuses are the last that any log of the step has.
        problems: What could not be read, or was not recorded, as sentences that name the file.
    """

    source: Source
    log: TrajectoryLog | None
    problems: list[str] = []


def read_logs(inputs: StepInputs) -> Iterator[ReadLog]:
    """Yield the logs of a step, in the order of their lanes; each is in memory while it is used."""
    statuses = LaterStatuses.of((source.path, source.offset_ns) for source in inputs.logs)
    for source in inputs.logs:
        try:
            log = mended_log(source, inputs.limits, statuses)
        except TraceFormatError as error:
            yield ReadLog(source=source, log=None, problems=[str(error)])
            continue
        problems = [f"{source.path.name}: {problem}" for problem in log.problems]
        yield ReadLog(source=source, log=log, problems=problems)


def mended_log(source: Source, limits: Limits, statuses: LaterStatuses) -> TrajectoryLog:
    """Read one log, and leave out or correct the records that contradict others.

    A span whose trajectory is not there belongs to the process. A parent has a smaller number than the spans
    inside it, as it begins before them.

    Raises:
        TraceFormatError: It is not a log of trajectories, or cannot be read.
    """
    log = read_log(source.path, limits.reached)
    trajectories, spans = _standing(log.trajectories), _standing(log.spans)
    wrong = len(log.trajectories) + len(log.spans) - len(trajectories) - len(spans)
    lost = 0
    for number, span in spans.items():
        owner = span.trajectory if span.trajectory in trajectories else NO_SPAN
        lost += owner != span.trajectory
        around = spans.get(span.parent) if span.parent < number else None
        parent = span.parent if around is not None and around.trajectory == owner else NO_SPAN
        if (owner, parent) != (span.trajectory, span.parent):
            spans[number] = msgspec.structs.replace(span, trajectory=owner, parent=parent)
    log.trajectories = [
        t if (status := statuses.of_trajectory(t)) == t.status else msgspec.structs.replace(t, status=status)
        for t in trajectories.values()
    ]
    log.spans = list(spans.values())
    log.blocks = [block for block in log.blocks if block.begin_ns <= block.end_ns]
    if wrong:
        log.problems.append(f"left out, because they end before they begin or repeat a number: {wrong:,}")
    if lost:
        what = "spans of trajectories that are not in the log, which count as the process's"
        log.problems.append(f"{what}: {lost:,}")
    return log


def _standing(records: Sequence[_Numbered]) -> dict[int, _Numbered]:
    """Return the records by number, in its order: the first of each that does not end before it begins."""
    first: dict[int, _Numbered] = {}
    for record in records:
        first.setdefault(record.id, record)
    return {
        number: record
        for number, record in sorted(first.items())
        if record.begin_ns <= record.end_ns and number != NO_SPAN
    }


def write_log_member(job: MemberJob) -> Member:
    """Write one log as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The log cannot be read at all.
        OSError: The member cannot be written.
    """
    log = mended_log(job.source, job.limits, job.statuses)
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

        def is_wanted(record: Block | TrajectoryRecord | SpanRecord) -> bool:
            begin_ns, end_ns = record.begin_ns - offset_ns, record.end_ns - offset_ns
            return end_ns >= job.base_ns and job.keep.holds(begin_ns, end_ns)

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
        own: dict[str, Fact] = {"group": record.group, "sample": record.sample, "status": record.status}
        if record.error:
            own["error"] = record.error
        about = _bounded(record.facts) | _bounded(own)
        event = self._draw(tid, "trajectory", "", record.begin_ns, record.end_ns, about=about)
        event.name, event.cname = _trajectory_name(record), _BAD.get(record.status)
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
    status = [trajectory.status] * (trajectory.status != "done")
    said = ["validate"] * (trajectory.facts.get("validate") is True) + status
    return f"{shortened(name)} ({shortened(', '.join(said))})" if said else shortened(name)


def _bounded(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the first of some facts, with names and texts in bounded length."""
    return {
        shortened(name): fact[:_TEXT_LENGTH] if isinstance(fact, str) else fact
        for name, fact in list(facts.items())[:_MOST_FACTS]
    }


class Layout(msgspec.Struct, kw_only=True):
    """The rows of a log of trajectories; records without one are not shown.

    Attributes:
        names: The name of each row, from above to below.
        trajectories: The row of each trajectory, by its number.
        spans: The row of each span, by its number.
        blocks: The row of each block, by its place in the log.
        left_out: Number of records that are not wanted.
        crowded: Number of those that are, and have no row because there are too many beside them.
    """

    names: list[str] = []
    trajectories: dict[int, int] = {}
    spans: dict[int, int] = {}
    blocks: dict[int, int] = {}
    left_out: int = 0
    crowded: int = 0

    def add_rows(self, name: str, owners: Sequence[_Owner]) -> list[int]:
        """Add rows for some owners, and return the first one of each."""
        packed = packed_rows([(owner.begin, owner.end) for owner in owners])
        heights = [0] * (max(packed, default=-1) + 1)
        for owner, row in zip(owners, packed, strict=True):
            heights[row] = max(heights[row], owner.height)
        firsts = []
        for number, height in enumerate(heights):
            firsts.append(len(self.names))
            named = name if len(heights) == 1 else f"{name} {number}"
            self.names += [named if part == 1 else f"{named}.{part}" for part in range(1, height + 1)]
        return [firsts[row] for row in packed]


class _Owner(msgspec.Struct, kw_only=True):
    """An owner of rows: a block, a trajectory, or an outermost span of the process.

    Attributes:
        begin: Begin of it and its spans.
        end: End of it and its spans.
        height: Number of rows that they take.
        spans: The spans that are wanted.
    """

    begin: int
    end: int
    height: int = 0
    spans: list[SpanRecord] = []


def lay_out(
    log: TrajectoryLog,
    is_wanted: Callable[[Block | TrajectoryRecord | SpanRecord], bool],
    loop_name: Callable[[int], str],
) -> Layout:
    """Return the rows of a log: blocks by their loop, trajectories, then the process's own spans.

    What overlaps is on rows of its own, as many as there are at once. A row of trajectories is followed
    by further ones where spans of a trajectory overlap.

    Args:
        log: The log, without contradictions.
        is_wanted: Tells which records are shown.
        loop_name: Returns the name of an event loop by its number.
    """
    layout = Layout()
    by_loop: dict[int, dict[int, _Owner]] = {}
    for place, block in enumerate(log.blocks):
        if is_wanted(block):
            owner = _Owner(begin=block.begin_ns, end=block.end_ns, height=1)
            by_loop.setdefault(block.loop, {})[place] = owner
    for loop, blocks in sorted(by_loop.items()):
        rows = layout.add_rows(f"{loop_name(loop)} blocked", list(blocks.values()))
        layout.blocks.update(zip(blocks, rows, strict=True))
    trajectories = {
        one.id: _Owner(begin=one.begin_ns, end=one.end_ns, height=int(is_wanted(one)))
        for one in log.trajectories
    }
    wanted = {number for number, owner in trajectories.items() if owner.height}
    outermost: dict[int, _Owner] = {}
    owned: dict[int, _Owner] = {}  # by span of the process, the outermost around it
    for span in log.spans:
        if span.trajectory != NO_SPAN:
            owner = trajectories[span.trajectory]
        elif span.parent != NO_SPAN:
            owner = owned[span.id] = owned[span.parent]
        else:
            owner = owned[span.id] = outermost[span.id] = _Owner(begin=span.begin_ns, end=span.end_ns)
        if is_wanted(span):
            owner.spans.append(span)
    below: dict[int, int] = {}
    for owner in (*trajectories.values(), *outermost.values()):
        owner.spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))  # of two alike the parent is first
        _nest(owner, below)
    for name, owners in (("trajectories", trajectories), ("spans", outermost)):
        shown = {number: owner for number, owner in owners.items() if owner.height}
        for number, first in zip(shown, layout.add_rows(name, list(shown.values())), strict=True):
            if number in wanted and owners is trajectories:
                layout.trajectories[number] = first
            for span in shown[number].spans:
                if span.id in below:
                    layout.spans[span.id] = first + below[span.id]
    asked = sum(len(owner.spans) for owner in (*trajectories.values(), *outermost.values()))
    of_blocks = len(log.blocks) - len(layout.blocks)
    layout.left_out = of_blocks + len(log.trajectories) - len(wanted) + len(log.spans) - asked
    layout.crowded = asked - len(below)
    return layout


def _nest(owner: _Owner, below: dict[int, int]) -> None:
    """Note for each span how many rows below its owner's it is, inside its parent or on a row alone.

    Children of one parent that overlap are on rows of their own, up to a hundred at once; what would need
    more is not shown. The owner grows by what is shown of it.
    """
    begin, shown = owner.begin, {span.id for span in owner.spans}
    rows: list[list[tuple[int, int]]] = [[(owner.end, _OWNER)]]  # what is open on each: until when, number
    for span in owner.spans:
        parent = span.parent if span.parent in shown else _OWNER
        row = (
            below.get(parent, _NOT_SHOWN) if parent != _OWNER else 0 if span.begin_ns >= begin else _NOT_SHOWN
        )
        if row == _NOT_SHOWN or not _is_inside(rows[row], parent, span):
            row = _first_free(rows, span.begin_ns)
        if row != _NOT_SHOWN:
            rows[row].append((span.end_ns, span.id))
            below[span.id] = row
            owner.begin, owner.end = min(owner.begin, span.begin_ns), max(owner.end, span.end_ns)
            owner.height = max(owner.height, row + 1)


def _is_inside(opened: list[tuple[int, int]], parent: int, span: SpanRecord) -> bool:
    """Close what ended before; return whether what is open then is the parent, until the span's end."""
    while opened and opened[-1][1] != parent and opened[-1][0] <= span.begin_ns:
        opened.pop()
    return bool(opened) and opened[-1][1] == parent and span.end_ns <= opened[-1][0]


def _first_free(rows: list[list[tuple[int, int]]], begin: int) -> int:
    """Return the first row, behind the owner's, on which nothing is open."""
    for number, opened in enumerate(rows[1:], 1):
        while opened and opened[-1][0] <= begin:
            opened.pop()
        if not opened:
            return number
    if len(rows) < _MOST_AT_ONCE:
        rows.append([])
        return len(rows) - 1
    return _NOT_SHOWN
