"""Writes one trace as one gzip member of the timeline, on the controller's clock.

Members are independent of each other, so they can be written by several processes and
joined by copying: a gzip file is a sequence of members (RFC 1952, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from isal import isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import Request
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.processes import Processes
from verl_profiling.timeline.step import Keep, Source
from verl_profiling.timeline.trace import Event, Trace
from verl_profiling.trajectory_log import LaterStatuses

ID_STRIDE = 1 << 32
"""Number of flow ids reserved for each member."""

_HASHED_IDS = 1 << 52
_ONES = 1.5 * 2**52
_ENCODER = msgspec.json.Encoder()
_KEPT_BYTES = 16 << 20
_BATCH = 4096


class MemberJob(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a process that writes one member.

    Attributes:
        source: The trace or log.
        output: File to write.
        index: Index among all members, from 1; flow ids are offset by it.
        pid: First process id of the lane.
        lane_index: Index among the members of the same lane, from 0.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        keep: Selection of events.
        limits: Limits on reading the trace.
        requests: For a log: the requests of the step, by the engine's request id.
        places: For a log: process and thread of each request in the timeline, by its id and begin.
        statuses: For a log: statuses set after the trajectories had ended.
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
    """The result for one trace.

    Attributes:
        path: The trace.
        events: Number of events written, without metadata (``ph == "M"``).
        left_out: Number of events that :class:`Keep` left out.
        problems: Sentences on unreadable parts.
        is_readable: Whether any part of the trace could be read.
    """

    path: Path
    events: int = 0
    left_out: int = 0
    problems: list[str] = []
    is_readable: bool = True


def compressor() -> Any:
    """Return a fast gzip compressor for one member (isal level 1)."""
    return isal_zlib.compressobj(1, wbits=31)


class MemberFile:
    """Writes events as one gzip member, with a comma before each event."""

    def __init__(self, file: BinaryIO) -> None:
        self._gzip = compressor()
        self._file = file

    def __enter__(self) -> MemberFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.write(self._gzip.flush())

    def write(self, events: Iterable[Event]) -> int:
        """Write events in batches of 4,096; return their number, without metadata."""
        left, count = iter(events), 0
        while batch := list(islice(left, _BATCH)):
            self._file.write(self._gzip.compress(b",\n"))
            self._file.write(self._gzip.compress(memoryview(_utf8(_ENCODER.encode(batch)))[1:-1]))
            count += sum(event.ph != "M" for event in batch)
        return count


def write_member(job: MemberJob) -> Member:
    """Write one trace as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The trace cannot be read at all.
        OSError: The member cannot be written.
    """
    bytes(_KEPT_BYTES)  # freeing it raises glibc's mmap threshold: freed blocks up to this size are reused
    trace = Trace(job.source.path, job.limits)
    processes = Processes(job.pid, job.source.title, job.lane_index)
    written = left_out = 0
    problems = []
    with job.output.open("wb") as output, MemberFile(output) as file:
        try:
            for events in trace.chunks():
                if not processes.known:
                    processes.find_host(events)
                base_ns = trace.base_ns - job.source.offset_ns
                kept = job.keep.select(events, base_ns)
                left_out += len(events) - len(kept)
                timed = _relocate(kept, processes, base_ns - job.base_ns, job.index)
                written += len(timed)
                file.write(timed)
        except TraceFormatError as error:
            problems.append(error.problem)
        file.write(processes.names())
    problems += trace.warnings
    return Member(path=job.source.path, events=written, left_out=left_out, problems=problems)


def _utf8(text: bytes) -> bytes:
    """Return JSON with invalid UTF-8 replaced; arguments are copied undecoded, so they may have any bytes."""
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("utf-8", "replace").encode()
    return text


def _relocate(events: list[Event], processes: Processes, shift_ns: int, index: int) -> list[Event]:
    """Translate events to the timeline's clock, processes and flow ids; separate the metadata.

    The whole microseconds of ``shift_ns`` are added first, which is exact in doubles because both
    numbers are multiples of the last place of ``ts``. Then the sum is rounded to nanoseconds once: at
    ``_ONES`` doubles are whole numbers, so adding and subtracting it rounds, at a third of the time that
    ``round`` takes, within 26 days of the timeline's begin (and to even nanoseconds beyond).
    """
    whole_us, rest_ns = map(float, divmod(shift_ns, 1000))
    first_id = index * ID_STRIDE
    known = processes.known.get
    timed = []
    for event in events:
        if event.ph == "M":
            processes.note(event)
            continue
        event.pid = known(event.pid) or processes.assign(event)
        if (ts := event.ts) is not None:
            event.ts = ((ts + whole_us) * 1000.0 + rest_ns + _ONES - _ONES) / 1000.0
        if (old := event.id) is not None:
            is_small = type(old) is int and 0 <= old < ID_STRIDE
            event.id = first_id + old if is_small else _hashed_id(index, old)  # type: ignore[operator]
        timed.append(event)
    return timed


def _hashed_id(index: int, old: int | str) -> int:
    """Return an id for a flow whose own id is large or a string, in a range of its own.

    The id is a hash, which needs no table of the (possibly millions of) flows. A trace of a million flows
    has a collision with a probability of 1 in 10,000. The id is exact as a double.
    """
    digest = blake2b(f"{index} {old!r}".encode(errors="replace"), digest_size=8).digest()
    return _HASHED_IDS | int.from_bytes(digest, "big") >> 12
