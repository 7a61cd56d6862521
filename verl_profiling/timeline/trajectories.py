"""Reads the trajectory logs of a step, and draws each as a process next to its worker's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.member import ID_STRIDE, Member, MemberFile, MemberJob
from verl_profiling.timeline.processes import (
    TRAJECTORIES_PID,
    Arrow,
    draw,
    joined,
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

_LEAST_LAG_NS = 1_000_000
_BAD = {"failed": "terrible", "cancelled": "bad"}

_Numbered = TypeVar("_Numbered", TrajectoryRecord, SpanRecord)


def read_logs(inputs: StepInputs) -> Iterator[tuple[Source, TrajectoryLog | None, list[str]]]:
    """Yield the logs of a step, sorted by lane, with one log in memory at a time.

    Each is the source, the log on the clock of its process, as :func:`mended_log` returns it (``None`` if it
    is unreadable), and sentences on parts that are unreadable or unrecorded. Statuses are the latest in any
    log of the step.
    """
    statuses = LaterStatuses.of((source.path, source.offset_ns) for source in inputs.logs)
    for source in inputs.logs:
        try:
            log = mended_log(source, inputs.limits, statuses)
        except TraceFormatError as error:
            yield source, None, [str(error)]
        else:
            yield source, log, [f"{source.path.name}: {problem}" for problem in log.problems]


def mended_log(source: Source, limits: Limits, statuses: LaterStatuses) -> TrajectoryLog:
    """Read one log, and leave out or correct the records that contradict others.

    Ids are then unique, no end is before its begin, and each parent precedes its children and is in their
    trajectory.
    A span whose trajectory is not in the log becomes a span outside trajectories. A parent with a larger
    id than its child is dropped: ids are given in order of begin.

    Raises:
        TraceFormatError: The file is not a log of trajectories, or cannot be read.
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
    """Return the records by id, sorted by id, without repeated ids and ends before begins."""
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
    return Member(
        path=job.source.path,
        events=written,
        left_out=drawn.layout.left_out,
        problems=log.problems,
        arrows=list(drawn.arrows.values()),
    )


class _Drawn:
    """The timeline's events of one log.

    Attributes:
        pid: Process id of the events.
        base_ns: Time of ``ts == 0`` in the timeline, on the clock of the log.
        layout: Rows of the records.
        arrows: Arrows to requests, by the id of the span at their tail.
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
        """Yield the slices of all records that have a row."""
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
            about = {"task": block.task, "function": block.function}
            yield self._draw(row + 1, "block", who, block.begin_ns, block.end_ns, about=about)

    def counters(self) -> Iterator[Event]:
        """Yield counter events: lag of each event loop, counters of the log, and running trajectories."""
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
        """Return a sample of a counter; Perfetto shows its name and its unit."""
        event = Event("C", "", shortened(counter), self.pid, ts=max(at_ns - self.base_ns, 0) / 1000)
        event.args = msgspec.Raw(msgspec.json.encode({unit: value}))
        return event

    def _loop(self, number: int) -> str:
        """Return the name of an event loop: its thread's name, with the loop's number if names repeat."""
        return self._loops.get(number, f"loop {number}")

    def _trajectory(self, record: TrajectoryRecord, tid: int) -> Event:
        own: dict[str, Fact] = {"group": record.group, "sample": record.sample, "status": record.status}
        if record.error:
            own["error"] = record.error
        event = self._draw(tid, "trajectory", "", record.begin_ns, record.end_ns, about=record.facts | own)
        event.name, event.cname = _trajectory_name(record), _BAD.get(record.status)
        return event

    def _span(self, record: SpanRecord, tid: int) -> Event:
        own: dict[str, Fact] = {"failed": record.failed, "open": record.open, "request": record.request}
        about = record.facts | {name: value for name, value in own.items() if value}
        event = self._draw(tid, "span", record.name, record.begin_ns, record.end_ns, about=about or None)
        if record.failed:
            event.cname = _BAD["failed"]
        return event


def _arrows(job: MemberJob, log: TrajectoryLog, layout: Layout) -> dict[int, Arrow]:
    """Return the arrows to requests, by the id of the span at their tail."""
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
    """Return the title of a trajectory: ``g12/3``, ``g12/4 (failed)``, ``g13/0 (validate)``."""
    group = trajectory.group or f"trajectory {trajectory.id}"
    name = group if trajectory.sample is None else f"{group}/{trajectory.sample}"
    status = [trajectory.status] * (trajectory.status != "done")
    said = ["validate"] * (trajectory.facts.get("validate") is True) + status
    return f"{shortened(name)} ({shortened(', '.join(said))})" if said else shortened(name)


class Layout(msgspec.Struct, kw_only=True):
    """The rows of a log of trajectories; records without a row are outside the selection.

    Attributes:
        names: The name of each row, from top to bottom.
        trajectories: The row of each trajectory, by its id.
        spans: The row of each span, by its id.
        blocks: The row of each block, by its index in the log.
        left_out: Number of records outside the selection, or over an hour before the step.
    """

    names: list[str] = []
    trajectories: dict[int, int] = {}
    spans: dict[int, int] = {}
    blocks: dict[int, int] = {}
    left_out: int = 0

    def add_rows(self, name: str, owners: Sequence[_Owner]) -> list[int]:
        """Add rows for some owners, and return the first row of each owner."""
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
        begin: Begin of the owner with its spans.
        end: End of the owner with its spans.
        height: Number of rows for the owner with its spans.
        spans: The selected spans.
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
    """Return the rows of a log: blocks by their loop, then trajectories, then spans outside trajectories.

    Overlapping records get separate rows. A row of trajectories is followed by further rows if spans of
    one trajectory overlap.

    Args:
        log: The log, without contradictions (see :func:`mended_log`).
        is_wanted: Returns whether a record is selected.
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
    owned: dict[int, _Owner] = {}  # outermost span, by the id of each span outside trajectories
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
        owner.spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))  # stable: parents precede children
        _nest(owner, below)
    for name, owners in (("trajectories", trajectories), ("spans", outermost)):
        shown = {number: owner for number, owner in owners.items() if owner.height}
        for number, first in zip(shown, layout.add_rows(name, list(shown.values())), strict=True):
            if number in wanted and owners is trajectories:
                layout.trajectories[number] = first
            for span in shown[number].spans:
                layout.spans[span.id] = first + below[span.id]
    shown_records = len(layout.blocks) + len(wanted) + len(below)
    layout.left_out = len(log.blocks) + len(log.trajectories) + len(log.spans) - shown_records
    return layout


def _nest(owner: _Owner, below: dict[int, int]) -> None:
    """Store the row of each span, relative to its owner's: the parent's row if it fits, else a free row.

    Overlapping children of one parent get separate rows. A span that leaves the row of its parent takes its
    own children along. The owner's begin, end and height grow to include all spans.
    """
    begin, root_of = owner.begin, {NO_SPAN: NO_SPAN}  # the span that each span shares its row with, or none
    opened = {NO_SPAN: [(owner.end, NO_SPAN)]}  # end and id of the open spans, by the root of their row
    roots = []
    for span in owner.spans:
        parent = span.parent if span.parent in root_of else NO_SPAN
        root = root_of[parent]
        if span.begin_ns < begin or not _is_inside(opened[root], parent, span):
            root = span.id
            roots.append(span)
        root_of[span.id] = root
        opened.setdefault(root, []).append((span.end_ns, span.id))
        owner.begin, owner.end = min(owner.begin, span.begin_ns), max(owner.end, span.end_ns)
    rows = packed_rows([(root.begin_ns, root.end_ns) for root in roots])
    row_of = {NO_SPAN: 0, **{root.id: row + 1 for root, row in zip(roots, rows, strict=True)}}
    below.update((span.id, row_of[root_of[span.id]]) for span in owner.spans)
    if owner.spans:
        owner.height = 1 + max(row_of.values())


def _is_inside(opened: list[tuple[int, int]], parent: int, span: SpanRecord) -> bool:
    """Drop ended spans; return whether the parent is then the innermost open span and encloses ``span``."""
    while opened and opened[-1][1] != parent and opened[-1][0] <= span.begin_ns:
        opened.pop()
    return bool(opened) and opened[-1][1] == parent and span.end_ns <= opened[-1][0]
