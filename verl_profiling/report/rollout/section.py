"""Builds the section "Rollout" of a step from the logs of its trajectories."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import Request
from verl_profiling.report.intervals import spans_of, union
from verl_profiling.report.lanes import Step
from verl_profiling.report.lost import ROLLOUT
from verl_profiling.report.rollout.axes import Sharing
from verl_profiling.report.rollout.calls import OTHERS, call_rows
from verl_profiling.report.rollout.explain import Explanation, few_causes
from verl_profiling.report.rollout.failures import Failures
from verl_profiling.report.rollout.fates import fate_rows
from verl_profiling.report.rollout.freshness import version_rows
from verl_profiling.report.rollout.groups import group_rows
from verl_profiling.report.rollout.lag import block_rows
from verl_profiling.report.rollout.pieces import (
    BEFORE,
    LOOP_LAG,
    UNEXPLAINED,
    Pieces,
    process_pieces,
    trajectory_pieces,
)
from verl_profiling.report.rollout.polling import polling_of
from verl_profiling.report.rollout.records import Records, read_records
from verl_profiling.report.rollout.rows import CauseRow, FailureRow, PartRow, Rollout
from verl_profiling.report.rollout.tail import last_trajectories
from verl_profiling.timeline.requests import joined, requests_by_id
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import TrajectoryLog

__all__ = ["rollout_of"]

_GENERATE = "generate"
_MOST_CAUSES = 100


def rollout_of(
    step: Step, logs: Iterable[tuple[Source, TrajectoryLog]]
) -> tuple[Rollout, Explanation] | None:
    """Return the section, and what says of any time what went on; ``None`` without a record.

    Args:
        step: The step.
        logs: The logs of its trajectories, each with its source.
    """
    if step.manifest is None:
        return None
    failures = Failures(step.begin_ns, step.end_ns)
    records = read_records(failures.seen(logs), step.begin_ns, step.end_ns)
    if not len(records.trajectories) and not len(records.spans.begin):
        return None
    names = [index for index, name in enumerate(records.names) if name == _GENERATE]
    generating = np.isin(records.spans.name, names)
    served = joined(
        (
            (number, id, int(records.spans.begin[number]), int(records.spans.end[number]))
            for number, id in records.spans.requests.items()
            if generating[number]
        ),
        requests_by_id(step.manifest),
    )
    pieces = trajectory_pieces(records, served)
    explanation = Explanation(pieces, process_pieces(records), step.stages, union(*step.served.values()))
    return _section(step, records, pieces, explanation, served, failures.rows()), explanation


def _section(
    step: Step,
    records: Records,
    pieces: Pieces,
    explanation: Explanation,
    served: dict[int, Request],
    failures: list[FailureRow],
) -> Rollout:
    found = records.trajectories
    begin = np.array([one.begin_ns for one in found], dtype=np.int64)
    end = np.array([one.end_ns for one in found], dtype=np.int64)
    validate = np.array([one.validate for one in found], dtype=bool)
    training = np.flatnonzero(~validate)
    whole = [number for number in training if not (found[number].cut_begin or found[number].cut_end)]
    took = (end - begin)[whole] / 1e9
    p50, p99 = (float(value) for value in np.percentile(took, (50, 99))) if len(took) else (None, None)
    shares = Sharing(pieces.owner, pieces.begin, pieces.end).shares()
    causes = [row for kind in (False, True) for row in _causes(pieces, shares, validate, kind)]
    uncertain = pieces.uncertain & ~validate[pieces.owner]
    lag = pieces.of(np.flatnonzero(pieces.cause == pieces.causes.index(LOOP_LAG)))
    last = last_trajectories(training, begin[training], end[training], pieces, step.begin_ns)
    window = step.during(ROLLOUT)
    if not len(window) and len(begin):
        window = spans_of([(int(begin.min()), int(end.max()))])
    time = _parts(explanation.of(window))
    groups, groups_seen, waited_s, spread_p50_s, spread_max_s = group_rows(found, pieces, step.begin_ns)
    trained = step.manifest.policy_version if step.manifest else None
    versions, versioned, partial = version_rows(found, records.spans, served, trained)
    first = int(begin[training].min()) if len(training) else step.begin_ns
    return Rollout(
        trajectories=len(training),
        validation=int(validate.sum()),
        cut=sum(one.cut_begin or one.cut_end for one in found),
        seconds=float((end - begin)[training].sum()) / 1e9,
        p50_s=p50,
        p99_s=p99,
        begin_s=(first - step.begin_ns) / 1e9,
        wall_s=(int(end[training].max()) - first) / 1e9 if len(training) else 0.0,
        causes=causes,
        uncertain_lag_s=float(shares[uncertain].sum()) / 1e9,
        time=time,
        explained=sum(part.share for part in time if part.cause not in (BEFORE, UNEXPLAINED)),
        last=last,
        calls=call_rows(records),
        blocks=block_rows(records.blocks, lag.loop, lag.owner, lag.begin, lag.end),
        groups=groups,
        groups_seen=groups_seen,
        group_waited_s=waited_s,
        group_spread_p50_s=spread_p50_s,
        group_spread_max_s=spread_max_s,
        fates=fate_rows(records, served),
        failures=failures,
        versions=versions,
        versioned=versioned,
        partial=partial,
        polling=polling_of(step, step.during(ROLLOUT), end[training]),
    )


def _causes(
    pieces: Pieces, shares: NDArray[np.float64], validate: NDArray[np.bool_], kind: bool
) -> list[CauseRow]:
    """Return what training or validation trajectories waited for; they add up to their time."""
    rows = np.flatnonzero((validate[pieces.owner] == kind) & (shares > 0))
    took = np.bincount(pieces.cause[rows], weights=shares[rows], minlength=len(pieces.causes)) / 1e9
    pairs = np.unique(pieces.cause[rows] * len(validate) + pieces.owner[rows])
    members = np.bincount(pairs // max(len(validate), 1), minlength=len(pieces.causes))
    whole = float(took.sum())
    found = zip(took.tolist(), members.tolist(), pieces.causes, strict=True)
    ranked = [row for row in found if row[0]]
    ranked.sort(key=lambda row: (row[2] == UNEXPLAINED, -row[0]))
    if rest := ranked[_MOST_CAUSES:]:
        most = (sum(row[0] for row in rest), max(row[1] for row in rest), OTHERS)
        ranked = [*ranked[:_MOST_CAUSES], most]
    return [
        CauseRow(validate=kind, cause=cause, seconds=seconds, share=seconds / whole, trajectories=count)
        for seconds, count, cause in ranked
    ]


def _parts(seconds: dict[str, float]) -> list[PartRow]:
    whole = sum(seconds.values())
    return [
        PartRow(cause=cause, seconds=took, share=took / whole if whole else 0.0)
        for cause, took in few_causes(seconds).items()
    ]
