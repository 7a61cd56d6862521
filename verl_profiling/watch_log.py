"""The file that a run writes of its watch: one JSON object a line, of which there is an older part, too.

Both parts are bounded, so a long run keeps its latest steps. What writes them is
:mod:`verl_profiling.watch.log`; ``top`` and the report read them with :class:`WatchLogReader`, while they
grow and are rotated.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MAX_NS, Count, Ns
from verl_profiling.run_files import named_file
from verl_profiling.step_summary import StepSummary

WATCH_LOG = "watch.jsonl"
OLDER_WATCH_LOG = "watch.1.jsonl"
MAX_LINE = 1 << 20
MAX_BYTES = 1 << 26
"""Bytes at the end of each part that are read at most."""
_CHUNK = 1 << 20
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_Duration = Annotated[int, msgspec.Meta(ge=0, le=MAX_NS)]


class LoggedStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage's share of a step: as :class:`~verl_profiling.step_summary.ExposedStage`, and bounded."""

    name: str
    exposed_ns: _Duration
    role: str = "controller"
    leader: str = ""
    lead_ns: _Duration = 0
    imbalance: float = 1.0


class LoggedSpans(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All spans of one name: as :class:`~verl_profiling.step_summary.SpanTotal`, and bounded."""

    name: str
    runs: Count
    duration_ns: _Duration
    failed: Count = 0

    @property
    def seconds(self) -> float:
        """How long they took, added up (s)."""
        return self.duration_ns / 1e9


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of the processes of a role.

    Attributes:
        role: The role.
        processes: How many of them were read.
        lane: The process whose peak was highest.
        peak_bytes: That peak.
        held_bytes: The most that any of them held at the end of the step.
    """

    role: str
    processes: Count = 1
    lane: str = ""
    peak_bytes: Count | None = None
    held_bytes: Count | None = None


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: the summary of a step, without the stages of every process.

    Of a step that has several, the last line counts: it is the most complete.

    Attributes:
        step: Number of the step.
        begin_ns: When it began, on the clock of the loop's process.
        end_ns: When it ended.
        policy_version: Version of the weights, if the loop reports one.
        exposed: Where its time went, in order of the stages.
        memory: Memory by role.
        spans: What the trajectories and their spans add up to, the longest first.
        captured: Name of its step folder, if it was captured.
    """

    step: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
    begin_ns: Ns
    end_ns: Ns
    policy_version: int | None = None
    exposed: list[LoggedStage] = []
    memory: list[RoleMemory] = []
    spans: list[LoggedSpans] = []
    captured: str = ""

    @property
    def seconds(self) -> float:
        """How long the step took (s)."""
        return max(self.end_ns - self.begin_ns, 0) / 1e9

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed time by stage (s); the time in no stage has an empty name."""
        found: dict[str, float] = {}
        for stage in self.exposed:
            found[stage.name] = found.get(stage.name, 0.0) + stage.exposed_ns / 1e9
        return found


def logged(summary: StepSummary) -> LoggedStep:
    """Return what is logged of a summary."""
    processes = [*summary.loop, *summary.workers]
    memory = []
    for role in dict.fromkeys(process.role for process in processes):
        of_role = [process for process in processes if process.role == role]
        most = max(of_role, key=lambda process: process.peak_bytes or 0)
        held = [process.held_bytes for process in of_role if process.held_bytes is not None]
        memory.append(
            RoleMemory(
                role=role,
                processes=len(of_role),
                lane=most.lane if most.peak_bytes is not None else "",
                peak_bytes=most.peak_bytes,
                held_bytes=max(held, default=None),
            )
        )
    return LoggedStep(
        step=summary.step,
        begin_ns=summary.begin_ns,
        end_ns=summary.end_ns,
        policy_version=summary.policy_version,
        exposed=[LoggedStage(**msgspec.structs.asdict(stage)) for stage in summary.exposed],
        memory=memory,
        spans=[LoggedSpans(**msgspec.structs.asdict(total)) for total in summary.spans],
        captured=summary.captured,
    )


def has_watch_log(run: Path) -> bool:
    """Return whether a run's folder holds a log of its watch."""
    return (run / WATCH_LOG).exists() or (run / OLDER_WATCH_LOG).exists()


class WatchLogReader:
    """Reads the watch's log of a run, and follows it while it grows.

    Args:
        run: The run's folder. A log that is not there yet is waited for.

    Attributes:
        skipped: Number of lines that were none of a log's, or too long.
    """

    def __init__(self, run: Path) -> None:
        self.skipped = 0
        self._run = run
        self._part: _Part | None = None
        self._decoder = msgspec.json.Decoder(LoggedStep)

    def read(self) -> Iterator[LoggedStep]:
        """Yield the steps logged since the last call; the first call yields all steps in the log.

        Raises:
            TraceFormatError: The log is not a file, leads out of the run's folder, or cannot be read.
        """
        try:
            if self._part is None:
                yield from self._begin()
            if self._part is not None:
                yield from self._steps(self._part)
            while self._was_rotated():
                yield from self._following()
        except OSError as error:
            raise TraceFormatError(self._run / WATCH_LOG, f"cannot be read ({error.strerror})") from error

    def close(self) -> None:
        """Close the file."""
        if self._part is not None:
            self._part.file.close()
            self._part = None

    def _begin(self) -> Iterator[LoggedStep]:
        """Open the part to follow, and yield what the one before it holds."""
        self._part, older = _opened(self._run, WATCH_LOG), _opened(self._run, OLDER_WATCH_LOG)
        if older is not None and self._part is None:  # the next part is about to be begun
            self._part = older
        elif older is not None and self._part is not None:
            with older.file:
                if older.identity != self._part.identity:
                    yield from self._steps(older)

    def _was_rotated(self) -> bool:
        """Return whether the log goes on in another file, or from its beginning."""
        if self._part is None:
            return False
        try:
            found = (self._run / WATCH_LOG).stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) != self._part.identity or found.st_size < self._part.file.tell()

    def _following(self) -> Iterator[LoggedStep]:
        """Yield the end of a part that was rotated away, and the beginning of the next one."""
        if self._part is not None:
            yield from self._steps(self._part)
            self._part.file.close()
        self._part = _opened(self._run, WATCH_LOG)
        if self._part is not None:
            yield from self._steps(self._part)

    def _steps(self, part: _Part) -> Iterator[LoggedStep]:
        for line in part.lines():
            try:
                yield self._decoder.decode(line)
            except _UNREADABLE:
                self.skipped += 1
        self.skipped += part.take_too_long()


class _Part:
    """One file of the log, and how far it was read."""

    def __init__(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        self.file = file
        self.identity = (found.st_dev, found.st_ino)
        self._begun = b""
        self._too_long = 0
        self._within_a_line = found.st_size > MAX_BYTES
        if self._within_a_line:
            file.seek(found.st_size - MAX_BYTES)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines completed since the last call, except lines that are too long."""
        while chunk := self.file.read(_CHUNK):
            *ended, rest = chunk.split(b"\n")
            for line in ended:
                whole, self._begun = self._begun + line, b""
                if self._within_a_line:
                    self._within_a_line = False
                elif len(whole) > MAX_LINE:
                    self._too_long += 1
                elif whole.strip():
                    yield whole
            self._begun += rest
            if len(self._begun) > MAX_LINE:
                self._too_long += not self._within_a_line
                self._begun, self._within_a_line = b"", True

    def take_too_long(self) -> int:
        """Return the number of lines that were too long since the last call."""
        count, self._too_long = self._too_long, 0
        return count


def _opened(run: Path, name: str) -> _Part | None:
    """Open one part; ``None`` if it is not there."""
    path = named_file(run, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TraceFormatError(path, "is not a file")
    return _Part(os.fdopen(descriptor, "rb", buffering=0))
