"""Writes each trace and each trajectory log as one gzip member of the timeline.

Members are independent of each other, so several processes can write them, and a copy joins them: a
gzip file is a sequence of members (RFC 1952, section 2.2). Times are on the controller's clock. A
trajectory log is drawn as a process next to the process of its worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import accumulate, chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from isal import igzip

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import whole_file
from verl_profiling.files.trajectory_log import (
    Block,
    LaterStatuses,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)
from verl_profiling.manifest import Request
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.requests import requests_of_spans
from verl_profiling.steps.step import Keep, Source
from verl_profiling.steps.trace import Event, Trace
from verl_profiling.steps.trace_content import Limits
from verl_profiling.steps.trajectory_spans import blocker, linked_log, nested_rows, packed_rows
from verl_profiling.timeline.manifest_events import request_arrow
from verl_profiling.timeline.overlaps import Overlaps
from verl_profiling.timeline.processes import (
    TRAJECTORIES_PID,
    Processes,
    draw,
    name_process,
    name_row,
)
from verl_profiling.units import shortened

ID_STRIDE = 1 << 32
"""Number of flow ids reserved for each member."""

_HASHED_IDS = 1 << 52
_ONES = 1.5 * 2**52
_ENCODER = msgspec.json.Encoder()
_KEPT_BYTES = 16 << 20
_BATCH = 4096


class MemberJob(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs for writing one gzip member of the timeline: one trace or trajectory log.

    Attributes:
        source: The trace or trajectory log to read.
        output: File to write.
        index: Index among all members, from 1; it selects the member's range of flow ids.
        pid: First process id of the lane.
        lane_index: Index among the members of the same lane, from 0.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: Selection of events.
        limits: Limits on reading the trace.
        requests: For a log: the requests of the step, by the engine's request id.
        places: For a log: process and thread of each request in the timeline, by its id and begin.
        statuses: For a log: statuses that were set after the end of trajectories.
    """

    source: Source
    output: Path
    index: int
    pid: int
    lane_index: int
    base_ns: int
    keep: Keep
    limits: Limits
    requests: dict[str, list[Request]] = {}
    places: dict[tuple[str, int], tuple[int, int]] = {}
    statuses: LaterStatuses = {}


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The result of writing one member.

    Attributes:
        path: The trace or trajectory log.
        events: Number of events written, without metadata (``ph == "M"``).
        left_out: Number of events that :class:`Keep` left out.
        problems: Sentences on unreadable parts.
        is_readable: Whether some part of the trace is readable.
    """

    path: Path
    events: int = 0
    left_out: int = 0
    problems: list[str] = []
    is_readable: bool = True


def packed(file: BinaryIO) -> igzip.IGzipFile:
    """Return a file whose content becomes one gzip member of another file,
    written fast (isal level 1).
    """
    return igzip.IGzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0)


def write_events(events: Iterable[Event], file: igzip.IGzipFile) -> None:
    """Write events in batches of 4,096, each after a comma, so that members can be concatenated."""
    left = iter(events)
    while batch := list(islice(left, _BATCH)):
        file.write(b",\n")
        file.write(memoryview(_utf8(_ENCODER.encode(batch)))[1:-1])


def write_member(job: MemberJob) -> Member:
    """Write one trace as a gzip member of events, with a comma before each.

    Only a trace with slices that overlap partly is written twice, the second time with further
    rows.

    Raises:
        TraceFormatError: The trace cannot be read at all.
        OSError: The member cannot be written.
    """
    bytes(
        _KEPT_BYTES
    )  # freeing it raises glibc's mmap threshold: freed blocks up to this size are reused
    overlaps = Overlaps(job.lane_index)
    member = _write_trace(job, overlaps, overlaps.add)
    if overlaps.find():
        member = _write_trace(job, overlaps, overlaps.move)
    return member


def _write_trace(
    job: MemberJob, overlaps: Overlaps, visit: Callable[[list[Event]], None]
) -> Member:
    """Write one trace; ``visit`` gets all events, and may change their threads."""
    trace = Trace(job.source.file, job.limits, job.source.pids)
    processes = Processes(job.pid, job.source.title, job.lane_index)
    written = left_out = 0
    problems = []
    with whole_file(job.output) as output, packed(output) as file:
        try:
            for events in trace.chunks():
                if not processes.new_pids:
                    processes.find_host(events)
                base_ns = trace.base_ns - job.source.offset_ns
                kept = job.keep.select(events, base_ns)
                left_out += len(events) - len(kept)
                timed = _relocate(kept, processes, base_ns - job.base_ns, job.index)
                written += len(timed)
                visit(timed)
                write_events(timed, file)
        except TraceFormatError as error:
            problems.append(error.problem)
        names = processes.names()
        write_events(chain(names, overlaps.names(names)), file)
    problems += trace.warnings
    return Member(path=job.source.path, events=written, left_out=left_out, problems=problems)


def _utf8(text: bytes) -> bytes:
    """Return JSON with invalid UTF-8 replaced, because arguments are copied undecoded."""
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("utf-8", "replace").encode()
    return text


def _relocate(events: list[Event], processes: Processes, shift_ns: int, index: int) -> list[Event]:
    """Translate events to the timeline's clock, processes and flow ids; separate the metadata.

    The whole microseconds of ``shift_ns`` are added first, which is exact in doubles. Then the sum
    is rounded to nanoseconds by adding and subtracting ``_ONES``, because doubles of that size are
    whole numbers. That takes a third of the time of ``round``. Beyond 26 days after the timeline's
    begin, times are rounded to even nanoseconds.
    """
    whole_us, rest_ns = map(float, divmod(shift_ns, 1000))
    first_id = index * ID_STRIDE
    pid_of = processes.new_pids.get
    timed = []
    for event in events:
        if event.ph == "M":
            processes.note(event)
            continue
        event.pid = pid_of(event.pid) or processes.assign(event)
        if (ts := event.ts) is not None:
            event.ts = ((ts + whole_us) * 1000.0 + rest_ns + _ONES - _ONES) / 1000.0
        if (old := event.id) is not None:
            is_small = type(old) is int and 0 <= old < ID_STRIDE
            event.id = first_id + old if is_small else _hashed_id(index, old)  # type: ignore[operator]
        timed.append(event)
    return timed


def _hashed_id(index: int, old: int | str) -> int:
    """Return an id in a reserved range for a flow whose own id is large or a string.

    The id is a hash, so no table of the (possibly millions of) flows is needed. In a trace of a
    million flows, the probability of a collision is 1 in 10,000. A double holds the id exactly.
    """
    digest = blake2b(f"{index} {old!r}".encode(errors="replace"), digest_size=8).digest()
    return _HASHED_IDS | int.from_bytes(digest, "big") >> 12


_BAD = {"failed": "terrible", "cancelled": "bad"}  # names of colours in the trace format

_Record = TrajectoryRecord | SpanRecord | Block


def write_log_member(job: MemberJob) -> Member:
    """Write one log as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The log cannot be read at all.
        OSError: The member cannot be written.
    """
    log = linked_log(job.source, job.limits, job.statuses)
    drawn = _Drawn(job, log)
    counters = job.keep.select(list(drawn.counters()), job.base_ns)
    names = name_process(drawn.pid, f"{job.source.title} trajectories")
    for row, name in enumerate(drawn.rows):
        names += name_row(drawn.pid, row, name)
    arrows = list(drawn.arrows())
    events = chain(names, drawn.slices(), arrows, counters)
    with whole_file(job.output) as output, packed(output) as file:
        write_events(events, file)
    return Member(
        path=job.source.path,
        events=len(drawn.placed) + len(arrows) + len(counters),
        left_out=len(log.trajectories) + len(log.spans) + len(log.blocks) - len(drawn.placed),
        problems=log.problems,
    )


class _Drawn:
    """The timeline's events of one log.

    Attributes:
        pid: Process id of the events.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline, on the clock of the log.
        rows: Names of the rows, from top to bottom.
        placed: The selected records, each with its row.
    """

    def __init__(self, job: MemberJob, log: TrajectoryLog) -> None:
        offset_ns = job.source.offset_ns
        self.pid, self.base_ns = job.pid + TRAJECTORIES_PID, job.base_ns + offset_ns
        self._job, self._log = job, log
        self._draw = partial(draw, self.base_ns, self.pid)

        def is_wanted(record: _Record) -> bool:
            begin_ns, end_ns = record.begin_ns - offset_ns, record.end_ns - offset_ns
            return end_ns >= job.base_ns and job.keep.holds(begin_ns, end_ns)

        self.rows, self.placed = lay_out(log, is_wanted)

    def slices(self) -> Iterator[Event]:
        """Yield the slices of all selected records."""
        blocking = {block.span for block in self._log.blocks}
        names = {span.id: span.name for span in self._log.spans if span.id in blocking}
        for record, row in self.placed:
            status = ""
            if isinstance(record, Block):
                kind, name = "block", shortened(blocker(record, names))
                about: dict[str, object] = {"task": record.task, "function": record.function}
            elif isinstance(record, TrajectoryRecord):
                kind, name, status = "trajectory", _trajectory_name(record), record.status
                about = _about_trajectory(record)
            else:
                kind, name = "span", shortened(record.name)
                status = record.status or "failed" * record.failed
                about = _about_span(record)
            event = self._draw(row + 1, kind, "", record.begin_ns, record.end_ns, about or None)
            event.name, event.cname = name, _BAD.get(status)
            yield event

    def counters(self) -> Iterator[Event]:
        """Yield counter events: counters of the log, and running trajectories."""
        for count in self._log.counts:
            yield self._count(count.name, count.at_ns, "count", count.value)
        changes = Counter(map(attrgetter("begin_ns"), self._log.trajectories))
        changes.subtract(map(attrgetter("end_ns"), self._log.trajectories))
        running = 0
        for at_ns in sorted(changes):
            running += changes[at_ns]
            yield self._count("trajectories", at_ns, "running", running)

    def _count(self, counter: str, at_ns: int, unit: str, value: float) -> Event:
        """Return a sample of a counter; Perfetto shows its name and its unit."""
        event = Event("C", "", shortened(counter), self.pid, ts=max(at_ns - self.base_ns, 0) / 1000)
        event.args = msgspec.Raw(msgspec.json.encode({unit: value}))
        return event

    def arrows(self) -> Iterator[Event]:
        """Yield both ends of the arrows from spans to their requests in the timeline."""
        job, offset_ns = self._job, self._job.source.offset_ns
        rows: dict[int, int] = {}
        spans: dict[int, SpanRecord] = {}
        for span, row in self.placed:
            if isinstance(span, SpanRecord):
                spans[span.id] = span
                rows[span.id] = row
        served = requests_of_spans(spans.values(), offset_ns, job.requests)
        for place, (number, request) in enumerate(served.items()):
            if head := job.places.get((request.id, request.begin_ns)):
                from_ns = max(spans[number].begin_ns - offset_ns, job.base_ns)
                arrow = job.index * ID_STRIDE + place
                tail = self.pid, rows[number] + 1
                yield from request_arrow(arrow, tail, from_ns, request, head, job.base_ns)


def _about_trajectory(record: TrajectoryRecord) -> dict[str, object]:
    about: dict[str, object] = {**record.facts, "group": record.group, "sample": record.sample}
    about["status"] = record.status
    if record.error:
        about["error"] = record.error
    return about


def _about_span(record: SpanRecord) -> dict[str, object]:
    about: dict[str, object] = {**record.facts}
    for name in ("failed", "open", "status", "request"):
        if value := getattr(record, name):
            about[name] = value
    return about


def _trajectory_name(trajectory: TrajectoryRecord) -> str:
    """Return the title of a trajectory: ``g12/3``, ``g12/4 (failed)``, ``g13/0 (validate)``."""
    name = trajectory.group or f"trajectory {trajectory.id}"
    if trajectory.sample is not None:
        name += f"/{trajectory.sample}"
    name = shortened(name)
    said = []
    if trajectory.facts.get("validate") is True:
        said.append("validate")
    if trajectory.status != "done":
        said.append(trajectory.status)
    if said:
        name += f" ({shortened(', '.join(said))})"
    return name


def lay_out(
    log: TrajectoryLog, is_wanted: Callable[[_Record], bool]
) -> tuple[list[str], list[tuple[_Record, int]]]:
    """Return the names of the rows, from top to bottom, and the selected records with their rows.

    Blocks of event loops are on top, followed by trajectories, and by spans outside trajectories.
    Overlapping records get separate rows. A row of trajectories is followed by further rows if
    spans of one trajectory overlap.

    Args:
        log: The log, from :func:`linked_log`.
        is_wanted: Function that returns whether a record is selected.
    """
    names: list[str] = []
    placed: list[tuple[_Record, int]] = []
    for name, owners in _groups(log):
        parts = []
        spans = []
        for owner in owners:
            records, below = _nested(*owner, is_wanted=is_wanted)
            if records:
                parts.append((records, below))
                begin_ns = min(map(attrgetter("begin_ns"), records))
                spans.append((begin_ns, max(map(attrgetter("end_ns"), records))))
        rows = packed_rows(spans)
        heights = [0] * (max(rows, default=-1) + 1)
        for row, (_, below) in zip(rows, parts, strict=True):
            heights[row] = max(heights[row], max(below) + 1)
        firsts = list(accumulate(heights, initial=len(names)))
        for row, (records, below) in zip(rows, parts, strict=True):
            for record, place in zip(records, below, strict=True):
                placed.append((record, firsts[row] + place))
        for number, height in enumerate(heights):
            named = name
            if len(heights) > 1:
                named += f" {number}"
            names.append(named)
            names += [f"{named}.{part}" for part in range(2, height + 1)]
    return names, placed


def _groups(log: TrajectoryLog) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yield groups of rows: a name, and lists of a record with the spans below it.

    An example is ``trajectories``, with each trajectory and its spans.
    """
    loops = {loop.id: loop.name for loop in reversed(log.loops)}
    blocks = grouped(log.blocks, attrgetter("loop"))
    for loop in sorted(blocks):
        yield f"loop {loops.get(loop) or loop} blocked", [[block] for block in blocks[loop]]
    trajectories: dict[int, list[Any]] = {record.id: [record] for record in log.trajectories}
    outside: list[list[Any]] = []
    around: dict[int, list[Any]] = {}  # by the id of each span
    for span in log.spans:
        records = around.get(span.parent, trajectories.get(span.trajectory))
        if records is None:
            records = []
            outside.append(records)
        records.append(span)
        around[span.id] = records
    yield "trajectories", list(trajectories.values())
    yield "spans", outside


def _nested(
    head: Any, *spans: SpanRecord, is_wanted: Callable[[_Record], bool]
) -> tuple[list[Any], list[int]]:
    """Return a record and its spans, as far as selected, with row numbers below the row of the
    record.

    A span with an unselected parent counts as a child of the record.
    """
    wanted = sorted(filter(is_wanted, spans), key=lambda span: (span.begin_ns, -span.end_ns))
    by_id = {span.id: span for span in wanted}
    records = [head, *wanted]
    rows = nested_rows(records, lambda span, around: around is by_id.get(span.parent, head))
    if is_wanted(head):
        return records, rows
    return wanted, rows[1:]
