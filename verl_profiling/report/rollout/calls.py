"""Tools, environments, scoring and other spans by name: how long they took, and how many ran at once."""

from __future__ import annotations

import numpy as np

from verl_profiling.report.intervals import length, union
from verl_profiling.report.rollout.axes import Ints
from verl_profiling.report.rollout.records import Records
from verl_profiling.report.rollout.rows import CallRow

__all__ = ["OTHERS", "call_rows"]

OTHERS = "(all others)"
"""What is behind the rows that are shown."""

_MOST_ROWS = 50


def call_rows(records: Records) -> list[CallRow]:
    """Return the spans by the role of their process and their name, those that took most first.

    Durations are those of whole spans, with what is inside of them, as far as they are in the step. Those
    beyond 50 rows are one, ``(all others)``.
    """
    spans = records.spans
    roles = list(dict.fromkeys(role for _, role in records.processes))
    role_of = np.array([roles.index(role) for _, role in records.processes], dtype=np.int64)
    keys = role_of[spans.process] * max(len(records.names), 1) + spans.name
    known, place = np.unique(keys, return_inverse=True)
    took = np.bincount(place, weights=spans.end - spans.begin, minlength=len(known))
    ranked = np.argsort(-took, kind="stable")
    rank = np.empty(len(known), dtype=np.int64)
    rank[ranked] = np.minimum(np.arange(len(known)), _MOST_ROWS)
    row_of = rank[place]
    order = np.argsort(row_of, kind="stable")
    bounds = np.searchsorted(row_of[order], np.arange(_MOST_ROWS + 2))
    rows = []
    for number in range(min(len(known), _MOST_ROWS + 1)):
        role, name = divmod(int(known[ranked[number]]), max(len(records.names), 1))
        other = number == _MOST_ROWS
        rows.append(
            _row(
                "" if other else roles[role],
                OTHERS if other else records.names[name],
                order[bounds[number] : bounds[number + 1]],
                records,
            )
        )
    return rows


def _row(role: str, name: str, rows: Ints, records: Records) -> CallRow:
    begin, end = records.spans.begin[rows], records.spans.end[rows]
    took = (end - begin) / 1e9
    p50, p90, p99 = (float(value) for value in np.percentile(took, (50, 90, 99)))
    covered = length(union(np.stack((begin, end), axis=1)))
    return CallRow(
        role=role,
        name=name,
        calls=len(rows),
        failed=int(records.spans.failed[rows].sum()),
        seconds=float(took.sum()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        longest_s=float(took.max()),
        mean_running=float(took.sum()) * 1e9 / covered if covered else 0.0,
        most_running=_most_at_once(begin, end),
    )


def _most_at_once(begin: Ints, end: Ints) -> int:
    """Return how many spans run at once at the most; where one ends another may begin."""
    ran = end > begin
    before = np.searchsorted(np.sort(end[ran]), np.sort(begin[ran]), side="right")
    return int((np.arange(1, ran.sum() + 1) - before).max(initial=0))
