"""The log of a process's trajectories: a gzip file with one JSON array per line.

The first line is a :class:`LogHeader`, the last a :class:`LogFooter`; a file without the footer was
cut off. All times are unix nanoseconds on the clock of the writing process.
:mod:`verl_profiling.trajectories` records trajectories, and the analysis reads logs with
:func:`read_log`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import msgspec
from isal import igzip, isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import UNDECODABLE, opened, reading, whole_file
from verl_profiling.manifest import Count, Ns, StatusChange
from verl_profiling.units import shortened

LOG_SUFFIX = ".trajectories.jsonl.gz"
LOG_VERSION = 2
NO_SPAN = -1
NO_CPU = "a lack of CPU"
"""Name of what blocked an event loop whose thread was ready to run most of the time."""
MAX_LINE = 1 << 20
KEPT = ("done", "running")
"""Statuses of trajectories that are trained on, or may still be."""
EQUAL = "equal rewards"
"""Reasons why nothing is learned from a trajectory; another one is its status."""
_CHUNK = 4096  # lines that are encoded at once, while no other thread runs
_UNLIKE = "too large for a log of trajectories"
_BLOCK_BYTES = 1 << 17  # that are unpacked and decoded at once: about a thousand lines
MAX_BYTES = 1 << 27
"""Maximum number of uncompressed bytes to read."""

Fact = str | int | float | bool | None
Id = Annotated[int, msgspec.Meta(ge=NO_SPAN, le=1 << 53)]


class LogHeader(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """The first line of a trajectory log.

    Attributes:
        version: Version of the format.
        lane: Lane of the process, e.g. ``agent_loop_rank0``.
        begin_ns: Begin of the recording.
    """

    version: int
    lane: str
    begin_ns: Ns


class LoopRecord(msgspec.Struct, frozen=True, array_like=True, tag="loop"):
    """An event loop that ran recorded tasks.

    Attributes:
        id: Number of the loop in this file.
        thread: Native id of the loop's thread.
        name: Name of the thread.
    """

    id: Id
    thread: int
    name: str


class TrajectoryRecord(msgspec.Struct, frozen=True, array_like=True, tag="t", gc=False):
    """One trajectory.

    Attributes:
        id: Number of the trajectory in this file.
        group: Id of the group, i.e. all samples of one prompt; empty if not given.
        sample: Id of the sample in the group; ``None`` if not given.
        begin_ns: Begin of the trajectory, perhaps before the recording.
        end_ns: End of the trajectory; for a running trajectory, end of the recording.
        status: ``done``, ``failed`` (it raised), ``cancelled``, ``abandoned`` (its stream was
            closed early), ``running`` (the recording ended first), or a status of the loop:
            ``aborted``, ``filtered``, ...
        loop: Number of the event loop; -1 without an event loop.
        error: The error of a failed trajectory, in one line.
        facts: Named values from user code, e.g. ``validate``, ``turns``, ``min_version``,
            ``max_version``.
    """

    id: Id
    group: str
    sample: int | str | None
    begin_ns: Ns
    end_ns: Ns
    status: str
    loop: Id
    error: str
    facts: dict[str, Fact]


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, tag="s", gc=False):
    """One span, of a trajectory or of the process.

    Attributes:
        id: Number of the span in this file.
        trajectory: Number of the span's trajectory, or -1.
        parent: Number of the enclosing span, or -1.
        name: ``generate``, ``tool:search``, ``environment:start``, ``reward``, ...
        begin_ns: Begin of the span.
        end_ns: End of the span; for an open span, end of the trajectory or of the recording.
        thread: Native id of the thread at the begin.
        loop: Number of the event loop; -1 without an event loop.
        failed: Whether the span raised.
        request: The engine's id of the awaited request; empty if not given.
        facts: Named values from user code, e.g. ``response_tokens``.
        open: Whether the span was open at the end of the trajectory or of the recording.
        status: ``cancelled``, or ``abandoned`` (its stream was closed early); else empty.
    """

    id: Id
    trajectory: Id
    parent: Id
    name: str
    begin_ns: Ns
    end_ns: Ns
    thread: int
    loop: Id
    failed: bool
    request: str
    facts: dict[str, Fact]
    open: bool = False
    status: str = ""


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """A period in which one task blocked its event loop.

    Attributes:
        loop: Number of the loop.
        begin_ns: Begin of the block, as far as sampled.
        end_ns: End of the block.
        span: Number of the innermost span of the sampled task, or -1.
        task: Name of the sampled task; empty without a sample.
        function: The sampled function, as ``module.function (file:line)``; empty without a sample.
    """

    loop: Id
    begin_ns: Ns
    end_ns: Ns
    span: Id
    task: str
    function: str


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """A value of a counter, e.g. the length of a queue.

    Attributes:
        name: Name of the counter.
        at_ns: Time of the value.
        value: Value of the counter from this time on.
    """

    name: str
    at_ns: Ns
    value: int | float


class LogFooter(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The last line of a trajectory log.

    Attributes:
        end_ns: End of the recording.
        spans_left_out: Number of spans that were left out because the log was full.
        trajectories_left_out: Number of trajectories that were left out for the same reason.
    """

    end_ns: Ns
    spans_left_out: Count
    trajectories_left_out: Count


Line = (
    LogHeader
    | LoopRecord
    | TrajectoryRecord
    | SpanRecord
    | Block
    | StatusChange
    | Counted
    | LogFooter
)
# the stub does not declare the second one as an exception
_DAMAGE: tuple[type[Exception], ...] = (EOFError, isal_zlib.error, gzip.BadGzipFile)  # type: ignore[assignment]
_DECODER = msgspec.json.Decoder(Line)
_STATUS = b'["status"'  # begin of the lines with a StatusChange
_PARTS = {
    LoopRecord: "loops",
    TrajectoryRecord: "trajectories",
    SpanRecord: "spans",
    Block: "blocks",
    StatusChange: "statuses",
    Counted: "counts",
}
"""Kinds of records in the order of the file, each with its field in ``TrajectoryLog``."""


class TrajectoryLog(msgspec.Struct, kw_only=True):
    """The trajectories of one process.

    Attributes:
        lane: Lane of the process.
        begin_ns: Begin of the recording.
        end_ns: End of the recording; for a cut off file, the latest time in it.
        loops: Event loops of the process.
        trajectories: The recorded trajectories.
        spans: Spans of trajectories, and spans outside trajectories.
        blocks: Periods in which a task blocked an event loop.
        statuses: Status changes after the end of trajectories.
        counts: Values of counters.
        spans_left_out: Number of spans that were left out.
        trajectories_left_out: Number of trajectories that were left out.
        cut: Whether the end of the file is missing.
        damaged: Whether a line is invalid.
        problems: Sentences on unreadable or unrecorded parts.
    """

    lane: str
    begin_ns: int
    end_ns: int = 0
    loops: list[LoopRecord] = []
    trajectories: list[TrajectoryRecord] = []
    spans: list[SpanRecord] = []
    blocks: list[Block] = []
    statuses: list[StatusChange] = []
    counts: list[Counted] = []
    spans_left_out: int = 0
    trajectories_left_out: int = 0
    cut: bool = False
    damaged: bool = False
    problems: list[str] = []

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the log file."""
        yield LogHeader(LOG_VERSION, self.lane, self.begin_ns)
        for name in _PARTS.values():
            yield from getattr(self, name)
        yield LogFooter(self.end_ns, self.spans_left_out, self.trajectories_left_out)


def write_log(path: Path, log: TrajectoryLog) -> int:
    """Write a trajectory log; return the number of bytes on disk.

    Raises:
        OSError: The file cannot be written.
    """
    encoder, lines = msgspec.json.Encoder(), list(log.lines())
    with whole_file(path) as part, gzip.open(part, "wb", compresslevel=3) as file:
        for first in range(0, len(lines), _CHUNK):
            file.write(encoder.encode_lines(lines[first : first + _CHUNK]))
    return path.stat().st_size


def read_log(path: Path, limit_reached: Callable[[int], str] = lambda lines: "") -> TrajectoryLog:
    """Read a trajectory log; of a damaged log, the lines before the damage.

    Args:
        path: The file.
        limit_reached: Function that returns why reading ends after a number of lines, or ``""``.

    Raises:
        TraceFormatError: The file is not a trajectory log, or cannot be read.
    """
    blocks = _decoded(path)
    first = next(blocks, [])
    header = _header(path, first)
    log = TrajectoryLog(lane=header.lane, begin_ns=header.begin_ns, cut=True)
    parts: dict[type, list[Any]] = {kind: getattr(log, name) for kind, name in _PARTS.items()}
    footers: list[LogFooter] = []
    parts[LogFooter] = footers
    number = 0
    try:
        for lines in chain([first], blocks):
            number += len(lines)
            for kind, of_kind in groupby(lines, type):
                parts.get(kind, []).extend(of_kind)
            for footer in footers:
                log.cut, log.end_ns = False, footer.end_ns
                log.spans_left_out = footer.spans_left_out
                log.trajectories_left_out = footer.trajectories_left_out
            reached = limit_reached(number)
            if reached:
                log.problems.append(reached)
                break
    except TraceFormatError as error:
        log.damaged = True
        log.problems.append(f"line {number + 1}: {error.problem}")
    if log.cut:
        ends = [record.end_ns for part in (log.trajectories, log.spans) for record in part]
        log.end_ns = max(ends, default=log.begin_ns)
        if not log.problems:
            log.problems.append(f"is cut off after line {number}")
    for count, what in ((log.trajectories_left_out, "trajectories"), (log.spans_left_out, "spans")):
        if count:
            log.problems.append(
                f"{what} that were not recorded, because the log was full: {count:,}"
            )
    return log


def _header(path: Path, lines: Sequence[Line]) -> LogHeader:
    """Return the header of a trajectory log, given its first lines.

    Raises:
        TraceFormatError: The file is not a trajectory log.
    """
    if not lines:
        raise TraceFormatError(path, "is empty, or cut off before the end of its first line")
    header = lines[0]
    if not isinstance(header, LogHeader):
        raise TraceFormatError(
            path, "is not a log of trajectories: it does not begin with a header"
        )
    if header.version > LOG_VERSION:
        newer = f"of version {header.version}; install a newer verl-profiling to read it"
        raise TraceFormatError(path, f"is a log of trajectories {newer}")
    return header


LaterStatuses = dict[tuple[str, int | str | None], tuple[int, str]]
"""Time and status of the last change on each sample of a group, or on all of it (``None``)."""


def later_statuses(path: Path, offset_ns: int) -> LaterStatuses:
    """Return the status changes in one trajectory log.

    A change may be in the log of another process than the trajectory.

    Args:
        path: The log.
        offset_ns: The clock offset to subtract from its times.
    """
    latest: LaterStatuses = {}
    with suppress(TraceFormatError):  # a damaged log is reported when its trajectories are read
        for text in _whole_lines(path):
            if _STATUS not in text:
                continue
            lines = [line for line in text.split(b"\n") if line.startswith(_STATUS)]
            for change in _decoded_lines(path, b"\n".join(lines)):
                if isinstance(change, StatusChange) and change.group:
                    key = (change.group, change.sample)
                    new = (change.at_ns - offset_ns, change.status)
                    latest[key] = max(latest.get(key, new), new)
    return latest


def task_of(facts: Mapping[str, Any]) -> str:
    """Return the task of a trajectory, with its environment; empty if both are unknown."""
    task, environment = facts.get("task"), facts.get("environment")
    if environment:
        task = f"{task} in {environment}" if task else environment
    return shortened(str(task)).encode("utf-8", "replace").decode() if task else ""


def reward_of(facts: Mapping[str, Any]) -> float | None:
    """Return the reward of a trajectory; ``None`` if it is unknown, or no finite number."""
    reward = facts.get("reward")
    return float(reward) if isinstance(reward, int | float) and isfinite(reward) else None


def last_status(trajectory: TrajectoryRecord, later: LaterStatuses) -> str:
    """Return the last status of a trajectory, including changes after its end."""
    keys = ((trajectory.group, trajectory.sample), (trajectory.group, None))
    return max((later[key] for key in keys if key in later), default=(0, trajectory.status))[1]


def _decoded(path: Path) -> Iterator[list[Line]]:
    """Yield the decoded lines of a file, thousands at once; of damaged lines, one by one."""
    for text in _whole_lines(path):
        try:
            yield _decoded_lines(path, text)
        except TraceFormatError:
            for line in text.split(b"\n")[:-1]:
                yield _decoded_lines(path, line or b"?")  # an empty line is damage, too


def _decoded_lines(path: Path, text: bytes) -> list[Line]:
    try:
        return _DECODER.decode_lines(text)
    except UNDECODABLE as error:
        raise TraceFormatError(path, f"is not a log of trajectories: {error}") from error


def _unpacked(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks, the last one up to any damage."""
    size = 0
    try:
        with opened(path) as packed, igzip.open(packed, "rb") as file:
            while block := file.read1(_BLOCK_BYTES):
                size += len(block)
                yield block
    except _DAMAGE:
        yield _before_damage(path, size)
        raise


def _before_damage(path: Path, begin: int) -> bytes:
    """Return the bytes from ``begin`` to the damage.

    They are read one at a time, as igzip returns nothing of a damaged block.
    """
    content = bytearray()
    with (
        opened(path) as packed,
        igzip.open(packed, "rb") as file,
        suppress(*_DAMAGE),
    ):
        file.seek(begin)
        while byte := file.read1(1):
            content += byte
    return bytes(content)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks that end in a line break, because a file that is cut
    off ends with half a line.
    """
    left, rest = MAX_BYTES, b""
    with reading(path):
        try:
            for block in _unpacked(path):
                left -= len(block)
                if left < 0:
                    raise TraceFormatError(path, f"has more than {MAX_BYTES:,} bytes, {_UNLIKE}")
                text = rest + block
                end = text.rfind(b"\n") + 1
                if max(text.find(b"\n"), len(text) - end) > MAX_LINE:
                    raise TraceFormatError(
                        path, f"has a line of over {MAX_LINE:,} bytes, {_UNLIKE}"
                    )
                rest = text[end:]
                if end:
                    yield text[:end]
        except (EOFError, isal_zlib.error):  # type: ignore[misc]  # the stub does not declare it as an exception
            return
        except gzip.BadGzipFile as error:
            raise TraceFormatError(path, f"is not a gzip file: {error}") from error
