"""The file that a run writes of its watch: one JSON object a line, of which there is an older part, too.

Both parts are bounded, so a long run keeps its latest steps. What writes them is
:mod:`verl_profiling.watch.log`; ``top`` and the report read them with :class:`WatchLogReader`, while they
grow and are rotated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import Count, Ns
from verl_profiling.run_files import named_file
from verl_profiling.step_summary import Duration, ExposedStage, StepSummary

WATCH_LOG = "watch.jsonl"
OLDER_WATCH_LOG = "watch.1.jsonl"
MAX_LINE = 1 << 20
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class LoggedSpans(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All spans of one name: as :class:`~verl_profiling.step_summary.SpanTotal`, and bounded."""

    name: str
    runs: Count
    duration_ns: Duration
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
    exposed: list[ExposedStage] = []
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
        exposed=summary.exposed,
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
        self._read_to = ((0, 0, b""), 0)  # identity of the last part, and the end of its last whole line
        self._decoder = msgspec.json.Decoder(LoggedStep)

    def read(self) -> Iterator[LoggedStep]:
        """Yield the steps logged since the last call; the first call yields all steps in the log.

        Raises:
            TraceFormatError: The log is not a file, leads out of the run's folder, or cannot be read.
        """
        try:
            with ExitStack() as opened:
                # The newer one first: rotated meanwhile, it is the older one, too, and no part is missed.
                found = [_opened(self._run, name, opened) for name in (WATCH_LOG, OLDER_WATCH_LOG)]
                parts = {_identity(part): part for part in reversed(found) if part is not None}
                known = list(parts)
                since = known.index(self._read_to[0]) if self._read_to[0] in parts else 0
                for identity in known[since:]:
                    yield from self._steps(identity, parts[identity])
        except OSError as error:
            raise TraceFormatError(self._run / WATCH_LOG, f"cannot be read ({error.strerror})") from error

    def _steps(self, identity: tuple[int, int, bytes], part: BinaryIO) -> Iterator[LoggedStep]:
        """Yield the steps of one part behind what was read of it."""
        last, position = self._read_to
        if identity == last and position <= os.fstat(part.fileno()).st_size:
            part.seek(position)
        within_a_line = False
        while line := part.readline(MAX_LINE):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < MAX_LINE:
                return  # its end is still to come
            self._read_to = (identity, part.tell())
            if is_whole and line.strip() and not within_a_line:
                try:
                    yield self._decoder.decode(line)
                except _UNREADABLE:
                    self.skipped += 1
            self.skipped += not (is_whole or within_a_line)
            within_a_line = not is_whole


def _opened(run: Path, name: str, opened: ExitStack) -> BinaryIO | None:
    """Open one part; ``None`` if it is not there."""
    path = named_file(run, name)
    try:
        part = opened.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise TraceFormatError(path, "is not a file") from None
    return part


def _identity(part: BinaryIO) -> tuple[int, int, bytes]:
    found, first = os.fstat(part.fileno()), part.readline(MAX_LINE)
    part.seek(0)
    return found.st_dev, found.st_ino, first
