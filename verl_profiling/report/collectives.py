"""Collectives: which calls of different ranks belong together, and how long ranks wait in them.

All ranks leave a collective together. So of the runs of one call the shortest is that of the rank which
came last, and the call itself costs as long as that run. By what another rank's run is longer, it waited for
the last one, at the begin of its run:

    waiting of a rank = union, over its calls, of [begin, end - cost)

An instant counts once, however many calls wait in it (a rank may have several under way). Waiting lies
inside the calls, so it is never longer than the communication of the rank. Only durations of different ranks
are compared, so clocks that differ change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.intervals import EMPTY, Spans, length, union
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.rows import CollectiveRow

__all__ = ["Calls", "collective_rows", "matched_calls", "waiting_by_lane"]

_TOP_COLLECTIVES = 20


class Calls(NamedTuple):
    """All calls of one collective by the ranks of a role.

    Attributes:
        role: The role.
        name: The collective.
        lanes: The ranks.
        runs: Begin and end of each rank's run of each call (ranks, calls, 2).
    """

    role: str
    name: str
    lanes: list[Lane]
    runs: NDArray[np.int64]

    @property
    def took(self) -> NDArray[np.int64]:
        """How long each rank's run of each call took (ns)."""
        took: NDArray[np.int64] = self.runs[:, :, 1] - self.runs[:, :, 0]
        return took

    def waiting(self) -> list[Spans]:
        """Return when each rank waited in one of the calls."""
        cost = self.took.min(axis=0)
        return [union(np.stack((run[:, 0], run[:, 1] - cost), axis=1)) for run in self.runs]


def matched_calls(step: Step) -> list[Calls]:
    """Return the collectives that all ranks of a role called equally often: the nth runs are of one call.

    Where some ranks called it more often, it is not known which runs belong together.
    """
    found = []
    for role in dict.fromkeys(lane.source.role for lane in step.lanes):
        peers = [lane for lane in step.lanes if lane.source.role == role and not _beside(lane)]
        names = Counter(name for lane in peers for name in lane.activity.collectives)
        for name in (name for name, count in names.items() if count == len(peers) > 1):
            runs = [lane.activity.collectives[name] for lane in peers]
            if len({len(run) for run in runs}) == 1:
                found.append(Calls(role, name, peers, np.stack(runs)))
    return found


def _beside(lane: Lane) -> bool:
    """Return whether a lane is a further device of its process, which takes no part in collectives."""
    return lane.activity.is_one_of_several and not lane.activity.collectives


def waiting_by_lane(calls: Iterable[Calls]) -> dict[str, Spans]:
    """Return when each rank waited in any collective, by the name of its lane."""
    found: dict[str, list[Spans]] = {}
    for one in calls:
        for lane, spans in zip(one.lanes, one.waiting(), strict=True):
            found.setdefault(lane.name, [EMPTY]).append(spans)
    return {name: union(*spans) for name, spans in found.items()}


def collective_rows(calls: Iterable[Calls]) -> list[CollectiveRow]:
    """Return the collectives in which ranks waited longest."""
    rows = []
    for one in calls:
        shortest = one.took.min(axis=0)
        late = Counter(np.argmin(one.took, axis=0).tolist()).most_common(1)[0]
        rows.append(
            CollectiveRow(
                name=one.name,
                role=one.role,
                calls=len(shortest),
                median_us=float(np.median(shortest)) / 1000,
                wait_us=sum(length(spans) for spans in one.waiting()) / 1000,
                late=one.lanes[late[0]].name,
                late_share=late[1] / len(shortest),
            )
        )
    return sorted(rows, key=lambda row: -row.wait_us)[:_TOP_COLLECTIVES]
