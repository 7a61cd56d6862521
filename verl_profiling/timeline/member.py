"""Writes one trace as one gzip member of the timeline, on the controller's clock.

Members are independent of each other, so they can be written by several processes and
joined by copying: a gzip file is a sequence of members (RFC 1952, section 2.2).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from isal import isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.categories import is_host, is_on_device
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.slim import Keep
from verl_profiling.timeline.sources import Source

__all__ = [
    "LANE_PIDS",
    "STAGES_TID",
    "TOOL_TID",
    "Member",
    "MemberJob",
    "compressor",
    "name_process",
    "write_member",
]

LANE_PIDS = 10_000
"""Number of process ids reserved for a lane."""

STAGES_TID = 1 << 23
"""Thread id of the stages' lane in a worker's process; Linux assigns none above 2^22."""

TOOL_TID = STAGES_TID + 2
"""Thread id of the lane that shows when a worker's tool was started and stopped."""

_PROFILER_TID = STAGES_TID + 1
_PROFILER_LANES = {"Spans", "Traces", ""}  # processes in which kineto puts its own events
_FIRST_DEVICE = 1
_FIRST_OTHER = 2_000
_LAST_OTHER = LANE_PIDS - 2  # the last id is that of the requests
_OTHERS_PER_TRACE = 50
_ID_STRIDE = 1 << 33
_ODD_IDS = 1 << 32
_NAME_LENGTH = 120  # characters of a process's name
_PROCESS_METADATA = {"process_name", "process_labels", "process_sort_index"}
_ENCODER = msgspec.json.Encoder()


class MemberJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to know to write one member.

    Attributes:
        source: The trace.
        output: File to write.
        index: Place among all members, from 1: flow ids become unique with it.
        pid: First process id of the lane.
        lane_index: Place among the members of the same lane.
        title: Name of the lane, to be shown.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: What is kept.
        limits: How much of the trace is read.
    """

    source: Source
    output: Path
    index: int
    pid: int
    lane_index: int
    title: str
    base_ns: int
    keep: Keep
    limits: Limits


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one trace.

    Attributes:
        path: The trace.
        events: Number of events written, without metadata (``ph == "M"``).
        left_out: Events that :class:`Keep` left out.
        problems: What could not be read.
        limited: Whether a limit is the reason.
    """

    path: Path
    events: int
    left_out: int
    problems: list[str]
    limited: bool


def compressor() -> Any:
    """Return a fast gzip compressor for one member (isal level 1)."""
    return isal_zlib.compressobj(1, wbits=31)


def name_process(pid: int, name: str) -> list[Event]:
    """Return the metadata that names a process, in bounded length, and sorts it by its id."""
    shown = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    return [
        Event("M", name="process_name", pid=pid, tid=0, args=msgspec.Raw(_ENCODER.encode({"name": shown}))),
        Event("M", name="process_sort_index", pid=pid, tid=0, args=msgspec.Raw(b'{"sort_index":%d}' % pid)),
    ]


def name_thread(pid: int, tid: int, name: str) -> Event:
    """Return the metadata that names a thread."""
    return Event("M", name="thread_name", pid=pid, tid=tid, args=msgspec.Raw(_ENCODER.encode({"name": name})))


def write_member(job: MemberJob) -> Member:
    """Write one trace as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The trace cannot be read at all.
        OSError: The member cannot be written.
    """
    trace = Trace(job.source.path, job.limits)
    pids = _Pids(job)
    names: list[Event] = []
    written = left_out = unnamed = 0
    gzip = compressor()
    problems = []
    with job.output.open("wb") as file:

        def write(batch: list[Event]) -> None:
            if batch:
                file.write(gzip.compress(b",\n"))
                file.write(gzip.compress(memoryview(_utf8(_ENCODER.encode(batch)))[1:-1]))

        try:
            for events in trace.chunks():
                if not pids.known:
                    pids.find_host(events)
                base_ns = trace.base_ns - job.source.offset_ns
                kept = job.keep.select(events, base_ns)
                left_out += len(events) - len(kept)
                timed = _relocate(kept, names, pids, base_ns - job.base_ns, job.index)
                unnamed += max(len(names) - job.limits.names, 0)
                del names[job.limits.names :]
                written += len(timed)
                write(timed)
        except TraceFormatError as error:
            problems.append(error.problem)
        pids.entitle(names)
        lanes = [event for event in names if pids.rename(event)]
        if pids.marked:
            pids.titles.setdefault(job.pid, job.title)
            lanes.append(name_thread(job.pid, _PROFILER_TID, "profiler"))
        for pid, title in pids.titles.items():
            lanes += name_process(pid, title)
        write(lanes)
        file.write(gzip.flush())
    problems += [str(warning) for warning in trace.warnings]
    if unnamed:
        problems.append(f"{unnamed:,} names of processes or threads are left out (--max-names raises it)")
    if pids.crowded:
        problems.append(f"has more processes than fit a lane: {pids.crowded:,} events share one")
    limited = trace.limited or bool(unnamed or pids.crowded)
    return Member(path=job.source.path, events=written, left_out=left_out, problems=problems, limited=limited)


def _utf8(text: bytes) -> bytes:
    """Return JSON with what is not UTF-8 replaced; arguments are copied undecoded, whatever they hold."""
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("utf-8", "replace").encode()
    return text


def _relocate(events: list[Event], names: list[Event], pids: _Pids, shift_ns: int, index: int) -> list[Event]:
    """Translate events to the timeline's clock, processes and flow ids; separate the metadata.

    The whole microseconds of ``shift_ns`` are added first, which is exact in doubles because both
    numbers are multiples of the last place of ``ts``. Then the sum is rounded to nanoseconds once.
    """
    whole_us, rest_ns = divmod(shift_ns, 1000)
    timed = []
    known = pids.known
    for event in events:
        if event.ph == "M":
            names.append(event)
            continue
        event.pid = known.get(event.pid) or pids.assign(event)
        if event.ts is not None:
            event.ts = round((event.ts + whole_us) * 1000 + rest_ns) / 1000
        if event.id is not None:
            event.id = index * _ID_STRIDE + pids.small_id(event.id)
        timed.append(event)
    return timed


class _Pids:
    """Assigns the timeline's ids to the processes of one trace.

    The host process gets the id of the lane, which it shares with the lane of its stages and with
    other traces of the same worker. The ids of devices follow it, in order of their numbers. Which
    process is which follows from the categories of their events, and a device's name from its label.

    Attributes:
        known: New id by the trace's own id.
        titles: Names of the processes that have events, by new id.
        marked: Whether the trace has marks of the profiler itself.
        crowded: Number of events whose processes share the last id, because the lane has no more.
    """

    def __init__(self, job: MemberJob) -> None:
        self.known: dict[int | str | None, int] = {}
        self._job = job
        self._host: int | str | None = None
        first = _FIRST_OTHER + _OTHERS_PER_TRACE * job.lane_index
        self._next_other = job.pid + min(first, _LAST_OTHER - _OTHERS_PER_TRACE)
        self.titles: dict[int, str] = {}
        self.marked = False
        self.crowded = 0
        self._odd_ids: dict[int | str, int] = {}

    def find_host(self, events: list[Event]) -> None:
        """Take the process with most events of the host, among the first of a trace, for the lane's own."""
        counts = Counter(event.pid for event in events if event.ph == "X" and is_host(event))
        self._host = max(counts, key=counts.__getitem__, default=None)

    def assign(self, event: Event) -> int:
        """Return the new id for the process of an event, which is seen for the first time.

        The profiler's own marks concern this process only, so they go to a thread of it instead of
        spanning all processes.
        """
        old, title = event.pid, self._job.title
        if old in _PROFILER_LANES:
            event.tid, event.s = _PROFILER_TID, event.s and "t"
            self.marked = True
            return self._job.pid
        is_device = old != self._host and is_on_device(event)
        if is_device and isinstance(old, int) and 0 <= old < _FIRST_OTHER - _FIRST_DEVICE:
            new, name = self._job.pid + _FIRST_DEVICE + old, f"{title} GPU {old}"
        elif self._job.pid not in self.titles and self._host in (None, old):
            new, name = self._job.pid, title
        elif self._next_other >= self._job.pid + _LAST_OTHER:
            self.crowded += 1
            new = self._job.pid + _LAST_OTHER
            self.titles[new] = f"{title} more processes"
            return new
        else:
            new, self._next_other = self._next_other, self._next_other + 1
            name = f"{title} {old}"
        self.known[old] = new
        self.titles[new] = name
        return new

    def entitle(self, names: list[Event]) -> None:
        """Name devices by their labels, and processes that are neither host nor device as the trace does."""
        words: dict[int, dict[str, str]] = {}
        for event in names:
            key = {"process_name": "name", "process_labels": "labels"}.get(event.name)
            new = self.known.get(event.pid, 0)
            is_other = new >= self._job.pid + _FIRST_OTHER
            if key and new > self._job.pid and (is_other or key == "labels"):
                said = words.setdefault(new, {})
                if key not in said:
                    said[key] = event.said(key)
        for new, said in words.items():
            named = " ".join(dict.fromkeys(filter(None, said.values())))
            if named:
                self.titles[new] = f"{self._job.title} {named}"

    def small_id(self, old: int | str) -> int:
        """Return a flow id below the stride; larger ids and other types are numbered."""
        if isinstance(old, int) and 0 <= old < _ODD_IDS:
            return old
        return _ODD_IDS + self._odd_ids.setdefault(old, len(self._odd_ids))

    def rename(self, event: Event) -> bool:
        """Give a metadata event its new process id; return whether it is still needed."""
        if event.name in _PROCESS_METADATA or event.pid not in self.known:
            return False
        event.pid = self.known[event.pid]
        event.ts = None
        return True
