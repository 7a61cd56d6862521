"""Reads the logs of trajectories of a step: its limits end the reading, what is wrong with one is said."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.lanes import Source
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.step_inputs import StepInputs
from verl_profiling.trajectory_log import Line, TrajectoryLog, log_lines, log_of

__all__ = ["ReadLog", "limited_lines", "read_logs"]

_LOOK_EVERY = 4096


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one log.

    Attributes:
        source: The file, its lane, and in ``offset_ns`` what to subtract from its times.
        log: Its records, on the clock of the process that wrote them; ``None`` if it cannot be read.
        problems: What could not be read, or was not recorded, as sentences that name the file.
        limited: Whether a limit is the reason.
    """

    source: Source
    log: TrajectoryLog | None
    problems: list[str] = []
    limited: bool = False


def read_logs(inputs: StepInputs) -> Iterator[ReadLog]:
    """Yield the logs of a step, in the order of their lanes; each is in memory while it is used."""
    for source in inputs.logs:
        yield _read(source, inputs.limits)


def limited_lines(source: Source, limits: Limits, reached: list[str]) -> Iterator[Line]:
    """Yield the lines of a log until a limit is reached, which is then added to ``reached``.

    Raises:
        TraceFormatError: It is not a log of trajectories.
    """
    try:
        for count, line in enumerate(log_lines(source.path)):
            if (count % _LOOK_EVERY == 0 or count >= limits.events) and (reason := limits.reached(count)):
                reached.append(reason)
                return
            yield line
    except OSError as error:
        raise TraceFormatError(source.path, f"cannot be read: {error.strerror or error}") from error


def _read(source: Source, limits: Limits) -> ReadLog:
    reached: list[str] = []
    try:
        log = log_of(limited_lines(source, limits, reached))
    except TraceFormatError as error:
        return ReadLog(source=source, log=None, problems=[str(error)])
    problems = reached or (["was cut before its end"] if log.cut else [])
    for count, what in ((log.trajectories_left_out, "trajectories"), (log.spans_left_out, "spans")):
        if count:
            problems.append(f"{count:,} {what} were not recorded, because the log was full")
    named = [f"{source.path.name}: {problem}" for problem in problems]
    return ReadLog(source=source, log=log, problems=named, limited=bool(reached))
