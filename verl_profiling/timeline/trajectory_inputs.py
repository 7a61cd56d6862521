"""The logs of trajectories of a step, read whole, with what contradicts itself left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.lanes import Source
from verl_profiling.timeline.log_reader import LaterFates, LogReader
from verl_profiling.timeline.log_shape import shape_of
from verl_profiling.timeline.step_inputs import StepInputs
from verl_profiling.trajectory_log import NO_SPAN, TrajectoryLog, log_of

__all__ = ["ReadLog", "read_logs"]


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one log.

    Attributes:
        source: The file, its lane, and in ``offset_ns`` what to subtract from its times.
        log: Its records, on the clock of the process that wrote them; ``None`` if it cannot be read. No
            number repeats, nothing ends before it begins, trajectories and parents are there, a parent is
            of the same trajectory, and fates are the last that any log of the step says.
        problems: What could not be read, or was not recorded, as sentences that name the file.
    """

    source: Source
    log: TrajectoryLog | None
    problems: list[str] = []


def read_logs(inputs: StepInputs) -> Iterator[ReadLog]:
    """Yield the logs of a step, in the order of their lanes; each is in memory while it is used."""
    fates = LaterFates.of(inputs.logs, inputs.limits)
    for source in inputs.logs:
        yield _read(source, inputs.limits, fates)


def _read(source: Source, limits: Limits, fates: LaterFates) -> ReadLog:
    try:
        reader = LogReader(source.path, limits)
    except TraceFormatError as error:
        return ReadLog(source=source, log=None, problems=[str(error)])
    log = log_of(reader.header, reader)
    problems = [*reader.problems, *_mend(log, fates)]
    named = [f"{source.path.name}: {problem}" for problem in problems]
    return ReadLog(source=source, log=log, problems=named)


def _mend(log: TrajectoryLog, fates: LaterFates) -> list[str]:
    """Leave out or correct what contradicts itself; return what that was."""
    trajectories = [(t.id, t.begin_ns, t.end_ns) for t in log.trajectories]
    spans = [(s.id, s.trajectory, s.parent, s.begin_ns, s.end_ns) for s in log.spans]
    shape = shape_of(_table(trajectories, 3), _table(spans, 5))
    log.trajectories = [
        t if (fate := fates.of_trajectory(t)) == t.fate else msgspec.structs.replace(t, fate=fate)
        for t, stands in zip(log.trajectories, shape.trajectories.tolist(), strict=True)
        if stands
    ]
    mended = []
    for span, stands, owner, parent in zip(
        log.spans, shape.spans.tolist(), shape.owner.tolist(), shape.parent.tolist(), strict=True
    ):
        trajectory = span.trajectory if owner >= 0 else NO_SPAN
        around = span.parent if parent >= 0 else NO_SPAN
        if (trajectory, around) != (span.trajectory, span.parent):
            span = msgspec.structs.replace(span, trajectory=trajectory, parent=around)
        if stands:
            mended.append(span)
    log.spans = mended
    return shape.problems


def _table(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(rows, np.int64).reshape(-1, width)
