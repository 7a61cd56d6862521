"""The logs of trajectories of a step, read whole, without the records that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.trajectory_log import (
    NO_SPAN,
    LaterFates,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    read_log,
)

_Numbered = TypeVar("_Numbered", TrajectoryRecord, SpanRecord)


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """One log of a step.

    Attributes:
        source: The file, its lane, and in ``offset_ns`` what to subtract from its times.
        log: Its records, on the clock of the process that wrote them; ``None`` if it cannot be read. No
            number repeats, nothing ends before it begins, trajectories and parents are there, a parent is
            of the same trajectory and comes first, and fates are the last that any log of the step has.
        problems: What could not be read, or was not recorded, as sentences that name the file.
    """

    source: Source
    log: TrajectoryLog | None
    problems: list[str] = []


def read_logs(inputs: StepInputs) -> Iterator[ReadLog]:
    """Yield the logs of a step, in the order of their lanes; each is in memory while it is used."""
    fates = LaterFates.of((source.path, source.offset_ns) for source in inputs.logs)
    for source in inputs.logs:
        try:
            log = mended_log(source, inputs.limits, fates)
        except TraceFormatError as error:
            yield ReadLog(source=source, log=None, problems=[str(error)])
            continue
        problems = [f"{source.path.name}: {problem}" for problem in log.problems]
        yield ReadLog(source=source, log=log, problems=problems)


def mended_log(source: Source, limits: Limits, fates: LaterFates) -> TrajectoryLog:
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
        t if (fate := fates.of_trajectory(t)) == t.fate else msgspec.structs.replace(t, fate=fate)
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
