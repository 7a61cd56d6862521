"""Groups of trajectories: when all samples of a prompt were done, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from verl_profiling.report.rollout.pieces import Pieces
from verl_profiling.report.rollout.records import Trajectory, short_name
from verl_profiling.report.rollout.rows import GroupRow

__all__ = ["GroupTotals", "group_rows"]

_MOST_ROWS = 20

GroupTotals = tuple[list[GroupRow], int, float, float, float]
"""Rows, number of groups, time waited (s), median and largest time from the first end to the last (s)."""


def group_rows(trajectories: Sequence[Trajectory], pieces: Pieces, begin_ns: int) -> GroupTotals:
    """Return the groups of several training trajectories, those whose members waited most first.

    Args:
        trajectories: All trajectories.
        pieces: What they waited for.
        begin_ns: Begin of the step.
    """
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(trajectories):
        if one.group and not one.validate:
            groups.setdefault(one.group, []).append(number)
    found = []
    for group, members in groups.items():
        if len(members) > 1:
            ends = [trajectories[member].end_ns for member in members]
            found.append((max(ends) * len(ends) - sum(ends), group, members, min(ends), max(ends)))
    found.sort(key=lambda item: (-item[0], item[1]))
    rows = []
    for waited, group, members, first, last in found[:_MOST_ROWS]:
        slowest = next(member for member in members if trajectories[member].end_ns == last)
        rows.append(
            GroupRow(
                group=short_name(group),
                members=len(members),
                first_s=(first - begin_ns) / 1e9,
                last_s=(last - begin_ns) / 1e9,
                waited_s=waited / 1e9,
                last_cause=_most(pieces, slowest, first),
                whole=not any(trajectories[member].cut_end for member in members),
            )
        )
    spreads = [(last - first) / 1e9 for _, _, _, first, last in found] or [0.0]
    return rows, len(found), sum(item[0] for item in found) / 1e9, median(spreads), max(spreads)


def _most(pieces: Pieces, trajectory: int, since_ns: int) -> str:
    """Return what a trajectory waited for most since an instant."""
    mine = pieces.of(np.flatnonzero(pieces.owner == trajectory))
    took = np.maximum(mine.end - np.maximum(mine.begin, since_ns), 0)
    by_cause = np.bincount(mine.cause, weights=took, minlength=len(pieces.causes))
    return pieces.causes[int(by_cause.argmax())] if by_cause.any() else ""
