"""The standing of processes: the comparison of the processes of a role in one stage of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.slices.slices import Floats, Ints, Slices

TIED = 0.05
"""Tolerance, as a share of a stage's longest duration, within which processes count as tied."""

LATE = 0.08
"""Minimum lateness to collectives with which a process leads, as a share of the stage."""


class Standing(NamedTuple):
    """Comparison of the processes of one role in one stage of the loop.

    Attributes:
        role: The role.
        lanes: Lanes of the role's processes.
        durations: Nanoseconds that each process spent in the stage.
        leader: Lane of the process that was waited for; empty if unknown.
        lead_ns: The leader's time in the stage minus the median of the others; 0 if the leader
            waited for the others.
        imbalance: Longest duration over the mean of all.
        clear: Whether the others waited for the leader; also ``True`` for a single process.
        ran: Names of the workers' own stages inside the loop's stage; empty for processes of the
            loop.
    """

    role: str
    lanes: Sequence[str]
    durations: Floats
    leader: str
    lead_ns: int
    imbalance: float
    clear: bool
    ran: tuple[str, ...] = ()

    def by_lane(self) -> dict[str, float]:
        """Return the durations (ns) by lane."""
        return dict(zip(self.lanes, self.durations.tolist(), strict=True))

    def unclear(self) -> Standing:
        """Return the standing without a leader."""
        return self._replace(leader="", lead_ns=0, clear=False)


def compared(role: str, lanes: Sequence[str], slices: Slices, group: Ints) -> list[Standing]:
    """Return the standing of a role's processes in each group of slices.

    All ranks leave a collective together, and the rank that arrives first spends the most time in
    it. So a rank whose stage ends together with the others' does not lead. The last rank to enter
    leads, if known. Engines have no collectives.

    Args:
        role: Role of the processes.
        lanes: Lanes of the processes.
        slices: The slices, without overlap within a process.
        group: Number of each slice's group, from 0.
    """
    many, groups = len(lanes), int(group.max(initial=-1)) + 1
    place = group * many + slices.who
    durations = np.bincount(place, slices.took, groups * many).reshape(groups, many).astype(float)
    if many == 1:
        return [Standing(role, lanes, took, lanes[0], 0, 1.0, True) for took in durations]
    last_ends = np.full(groups * many, -np.inf)
    np.maximum.at(last_ends, place, slices.end)
    ends = last_ends.reshape(groups, many)
    tied_ns = TIED * durations.max(axis=1)
    near = ends >= (ends.max(axis=1) - tied_ns)[:, None]
    leader = np.where(near, durations, -1.0).argmax(axis=1)
    lead_ns = _leads(durations, leader)
    clear = (near.sum(axis=1) == 1) & (lead_ns > tied_ns)
    if role != ROLLOUT_ROLE:
        for row in np.flatnonzero(clear).tolist():
            clear[row] = _ended_last(ends[row], int(leader[row]), float(lead_ns[row]))
    lead_ns = np.where(clear, lead_ns, 0.0)
    work = durations
    if slices.late.any():
        lateness = np.zeros(groups * many)
        np.maximum.at(lateness, place, slices.late)
        work = durations.copy()
        for row in range(groups):
            late = lateness.reshape(groups, many)[row]
            late_ns, longest_ns = float(late.max()), float(durations[row].max())
            if late_ns > max(LATE * longest_ns, lead_ns[row]):
                leader[row] = late.argmax()
                lead_ns[row] = late_ns - np.delete(late, leader[row]).max()
                clear[row] = lead_ns[row] > LATE * longest_ns
                work[row] = max(0.0, longest_ns - late_ns) + late
    ratios = np.maximum(many * work.max(axis=1) / np.maximum(work.sum(axis=1), 1.0), 1.0)
    columns = (leader.tolist(), lead_ns.tolist(), ratios.tolist(), clear.tolist())
    return [
        Standing(role, lanes, took, lanes[first], round(lead), ratio, is_clear)
        for took, first, lead, ratio, is_clear in zip(durations, *columns, strict=True)
    ]


def _leads(values: Floats, leader: Ints) -> Floats:
    """Return each leader's value minus the median of the others in its row; at least 0."""
    rows, others = np.arange(leader.size), values.shape[1] - 1
    ordered, value = np.sort(values, axis=1), values[rows, leader]
    place = (ordered < value[:, None]).sum(axis=1)
    low, high = (others - 1) // 2, others // 2
    middle = ordered[rows, low + (low >= place)] + ordered[rows, high + (high >= place)]
    return np.asarray(np.maximum(value - middle / 2, 0.0))


def _ended_last(ends: Floats, leader: int, lead_ns: float) -> bool:
    """Return whether a leader ended half of its lead or more after the median of the others."""
    others = np.delete(ends, leader)
    others = others[others > -np.inf]
    return not others.size or bool(2 * (ends[leader] - np.median(others)) >= lead_ns)
