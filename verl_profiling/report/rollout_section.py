"""Builds the section "Rollout" of a step from the logs of its trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from verl_profiling.manifest import POLLING, StageSpan
from verl_profiling.report.intervals import (
    EMPTY,
    Ints,
    Sharing,
    Spans,
    intersection,
    length,
    percentiles,
    spans_of,
    subtract,
    time_of,
    union,
)
from verl_profiling.report.lanes import Step
from verl_profiling.report.lost import ROLLOUT
from verl_profiling.report.outcomes import (
    block_rows,
    call_rows,
    failure_rows,
    group_rows,
    last_trajectories,
    part_rows,
    status_rows,
    version_rows,
)
from verl_profiling.report.records import (
    BEFORE,
    GENERATE,
    LOOP_LAG,
    UNEXPLAINED,
    Pieces,
    Records,
    pieces_of,
    ranked,
)
from verl_profiling.report.rows import CauseRow, Polling, Rollout
from verl_profiling.timeline.processes import joined, requests_by_id
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import TrajectoryLog

_NO_TRAJECTORY = "requests of no trajectory"


def rollout_of(
    step: Step, logs: Iterable[tuple[Source, TrajectoryLog]]
) -> tuple[Rollout, Explanation] | None:
    """Return the section and the explanation of the step's time; ``None`` if no trajectory was recorded.

    Args:
        step: The step.
        logs: The trajectory logs of the step, each with its source.
    """
    if step.manifest is None:
        return None
    records = Records(logs, step.begin_ns, step.end_ns)
    found, spans = records.trajectories, records.spans
    if not found and not len(spans.begin):
        return None
    served = joined(
        (
            (number, id, int(spans.begin[number]), int(spans.end[number]))
            for number, id in records.requests.items()
            if records.names[spans.name[number]] == GENERATE
        ),
        requests_by_id(step.manifest),
    )
    pieces, of_processes = pieces_of(records, served)
    explanation = Explanation(pieces, of_processes, step.stages, union(*step.served.values()))
    columns = [(one.begin_ns, one.end_ns, one.validate) for one in found]
    begin, end, validate = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    training = np.flatnonzero(validate == 0)
    whole = [number for number in training if not (found[number].cut_begin or found[number].cut_end)]
    p50, p99 = percentiles((end - begin)[whole] / 1e9, 50, 99)
    shares = Sharing(pieces.owner, pieces.begin, pieces.end).shares()
    window = step.during(ROLLOUT)
    if not len(window):
        window = spans_of([(int(begin.min(initial=step.end_ns)), int(end.max(initial=0)))])
    time = part_rows(explanation.of(window))
    groups, of_groups = group_rows(found, pieces, step.begin_ns)
    versions, versioned, partial = version_rows(records, served, step.manifest.policy_version)
    first = int(begin[training].min()) if len(training) else step.begin_ns
    lag = pieces.of(np.flatnonzero(pieces.cause == pieces.causes.index(LOOP_LAG)))
    rollout = Rollout(
        trajectories=len(training),
        validation=int(validate.sum()),
        cut=sum(one.cut_begin or one.cut_end for one in found),
        seconds=float((end - begin)[training].sum()) / 1e9,
        p50_s=p50,
        p99_s=p99,
        begin_s=(first - step.begin_ns) / 1e9,
        wall_s=(int(end[training].max()) - first) / 1e9 if len(training) else 0.0,
        causes=[row for kind in (0, 1) for row in _causes(pieces, shares, validate, kind)],
        uncertain_lag_s=float(shares[pieces.uncertain & (validate[pieces.owner] == 0)].sum()) / 1e9,
        time=time,
        explained=sum(part.share for part in time if part.cause not in (BEFORE, UNEXPLAINED)),
        last=last_trajectories(training, begin[training], end[training], pieces, step.begin_ns),
        calls=call_rows(records),
        blocks=block_rows(records, lag),
        groups=groups,
        **of_groups,
        statuses=status_rows(records, served),
        failures=failure_rows(found),
        versions=versions,
        versioned=versioned,
        partial=partial,
        polling=_polling(step, end[training]),
    )
    return rollout, explanation


def _causes(pieces: Pieces, shares: NDArray[np.float64], validate: Ints, kind: int) -> list[CauseRow]:
    """Return the time of training or validation trajectories by cause; causes add up to the total time."""
    rows = np.flatnonzero((validate[pieces.owner] == kind) & (shares > 0))
    pairs = set(zip(pieces.cause[rows].tolist(), pieces.owner[rows].tolist(), strict=True))
    members = Counter(pieces.causes[cause] for cause, _ in pairs)
    return [
        CauseRow(validate=bool(kind), trajectories=members[part.cause], **structs.asdict(part))
        for part in part_rows(pieces.of(rows).seconds(shares[rows]))
    ]


def _polling(step: Step, ends: Ints) -> Polling | None:
    """Return the cost of the trainer's polling in the rollout; ``None`` if the trainer did not poll.

    In each interval of the rollout stage, polling after the last trajectory's end is lost time. Polling
    before it is a wait for trajectories, which costs nothing.

    Args:
        step: The step.
        ends: Ends of the training trajectories (unix ns).
    """
    rollout = step.during(ROLLOUT)
    pauses = [(span.begin_ns, span.end_ns) for span in step.stages if span.name == POLLING]
    inside = [pause for pause in pauses if len(intersection(rollout, spans_of([pause])))]
    if not inside:
        return None
    polling = intersection(rollout, spans_of(inside))
    late_ns = 0
    for begin, end in rollout.tolist():
        there = ends[(begin <= ends) & (ends <= end)]
        if len(there):
            late_ns += length(intersection(polling, spans_of([(int(there.max()), end)])))
    return Polling(
        pauses=len(inside),
        interval_s=float(np.median([end - begin for begin, end in inside])) / 1e9,
        seconds=length(polling) / 1e9,
        late_s=late_ns / 1e9,
        late_share=late_ns / max(step.span_ns, 1),
    )


class Explanation:
    """Attributes any time window to causes.

    An instant is divided equally among the causes of all trajectories that run then. If none runs, it goes
    to spans outside trajectories; else to the controller's innermost nested stage; else to requests that
    run in an engine; else it is unexplained.

    Args:
        trajectories: Time of the trajectories by cause.
        processes: Time of the processes outside trajectories by cause.
        stages: The controller's stages.
        requests: Intervals in which an engine had a request.
    """

    def __init__(
        self, trajectories: Pieces, processes: Pieces, stages: Sequence[StageSpan], requests: Spans
    ) -> None:
        nested = sorted((span for span in stages if span.depth), key=lambda span: (-span.depth, span.name))
        inner = {name: time_of(nested, name) for name in dict.fromkeys(span.name for span in nested)}
        self._names = [*trajectories.causes, *(f"controller: {name}" for name in inner), _NO_TRAJECTORY]
        self._levels: list[tuple[Ints, Sharing]] = []
        taken = EMPTY
        for pieces in (trajectories, processes):
            self._levels.append((pieces.cause, _sharing(pieces.begin, pieces.end, taken)))
            taken = union(taken, np.stack((pieces.begin, pieces.end), axis=1))
        for number, spans in enumerate((*inner.values(), requests), start=len(trajectories.causes)):
            left = subtract(spans, taken)
            cause = np.full(len(left), number, dtype=np.int64)
            self._levels.append((cause, _sharing(left[:, 0], left[:, 1], EMPTY)))
            taken = union(taken, left)

    def of(self, window: Spans) -> dict[str, float]:
        """Return seconds by cause, largest first and ``unexplained`` last; they add up to the window.

        Args:
            window: Intervals of time; an instant in two intervals counts twice.
        """
        took = np.zeros(len(self._names))
        for cause, sharing in self._levels:
            took += np.bincount(cause, weights=sharing.shares(window), minlength=len(self._names))
        took[self._names.index(UNEXPLAINED)] += length(window) - took.sum()
        return ranked(self._names, took)


def _sharing(begin: Ints, end: Ints, hidden: Spans) -> Sharing:
    return Sharing(np.zeros(len(begin), dtype=np.int64), begin, end, hidden)
