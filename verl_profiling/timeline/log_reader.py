"""Reads a log of trajectories line by line: damage and limits end the reading, and what was read stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.lanes import Source
from verl_profiling.trajectory_log import FateChange, Line, LogFooter, TrajectoryRecord, open_log

__all__ = ["LaterFates", "LogReader"]

_LOOK_EVERY = 64  # records, each of which may unpack to megabytes


class LogReader:
    """The lines of one log behind its header; iterating over a damaged one does not raise.

    Attributes:
        path: The file.
        header: Its first line.
        lines: Number of lines read so far.
        problems: What could not be read, or was not recorded, as sentences.
        damaged: Whether a line is none of a log's.
        cut: Whether the file ends before its footer.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        """Open the file and read its header.

        Raises:
            TraceFormatError: It is not a log of trajectories, or cannot be read.
        """
        self.path = path
        self.lines = 0
        self.problems: list[str] = []
        self.damaged = False
        self.cut = False
        self._limits = limits
        try:
            self.header, self._rest = open_log(path)
        except OSError as error:
            raise TraceFormatError(path, f"cannot be read: {error.strerror or error}") from error

    def __iter__(self) -> Iterator[Line]:
        footer: LogFooter | None = None
        try:
            for line in self._rest:
                if self._is_over():
                    return
                self.lines += 1
                if isinstance(line, LogFooter):
                    footer = line
                yield line
        except (TraceFormatError, OSError) as error:
            self.damaged = True
            problem = error.problem if isinstance(error, TraceFormatError) else error.strerror or str(error)
            self.problems.append(f"line {self.lines + 2}: {problem}")
            return
        if footer is None:
            self.cut = True
            self.problems.append(f"was cut behind line {self.lines + 1}")
            return
        for count, what in ((footer.trajectories_left_out, "trajectories"), (footer.spans_left_out, "spans")):
            if count:
                self.problems.append(f"{what} that were not recorded, because the log was full: {count:,}")

    def _is_over(self) -> bool:
        reason = "" if self.lines % _LOOK_EVERY else self._limits.reached(self.lines)
        self.cut = bool(reason)
        self.problems += filter(None, [reason])
        return self.cut


class LaterFates:
    """What the logs of a step say became of trajectories after they had ended.

    The process that says so may be another than the one that recorded the trajectory.
    """

    def __init__(self, changes: Iterable[tuple[FateChange, int]] = ()) -> None:
        """Keep the last word on each sample, and on all of a group.

        Args:
            changes: The changes, each with what to subtract from its time.
        """
        self._said: dict[tuple[str, int | str | None], tuple[int, str]] = {}
        for change, offset_ns in changes:
            key = change.group, change.sample
            at_ns = change.at_ns - offset_ns
            if change.group and at_ns >= self._said.get(key, (at_ns, ""))[0]:
                self._said[key] = at_ns, change.fate

    @classmethod
    def of(cls, sources: Iterable[Source], limits: Limits) -> LaterFates:
        """Read them from logs; one that cannot be read says nothing, as is said where it is read whole."""
        return cls(_changes(sources, limits))

    def of_trajectory(self, trajectory: TrajectoryRecord) -> str:
        """Return the fate of a trajectory."""
        said = self._said
        if not said:
            return trajectory.fate
        keys = ((trajectory.group, trajectory.sample), (trajectory.group, None))
        return max((said[key] for key in keys if key in said), default=(0, trajectory.fate))[1]


def _changes(sources: Iterable[Source], limits: Limits) -> Iterator[tuple[FateChange, int]]:
    for source in sources:
        try:
            for line in LogReader(source.path, limits):
                if isinstance(line, FateChange):
                    yield line, source.offset_ns
        except TraceFormatError:
            continue
