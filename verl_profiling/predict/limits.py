"""Limits of concurrency: which release gave a trajectory the slot that it waited for.

A trajectory waits in a span ``wait:NAME``, or in its own code before a call that others are in. A limit of n
slots explains the waits if the nth last release before each acquire came just before it. So for each way in
which a slot may be held (until the end of a later span, of the span around the wait, or of the trajectory),
the least number of slots is computed that all holders need, and the share of the waits that it explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from verl_profiling.manifest import WAIT
from verl_profiling.report.records import OWN_CODE, Pieces, Records
from verl_profiling.trajectory_log import NO_SPAN

_ERROR_NS = (
    1_000_000  # a span of the holder may end this much after the next acquire: both are tasks of a loop
)
_LEAST_SHARE = 0.9  # of the waits that a limit explains; waits for anything else are explained by chance only
_LEAST_WAITS = 3  # fewer may end with another span by chance
_LEAST_WAIT_NS = 5_000_000  # shorter ones are code, or the way to the next task of the loop


_Code = Mapping[tuple[int, int], int]  # begin of own code, by its trajectory and its end


class Hold(NamedTuple):
    """A slot that a trajectory waits for and then holds.

    Attributes:
        trajectory: Number of the trajectory.
        since_ns: Begin of the wait.
        begin_ns: End of the wait.
        end_ns: Release of the slot.
    """

    trajectory: int
    since_ns: int
    begin_ns: int
    end_ns: int


class Limit(NamedTuple):
    """A limit of concurrency.

    Attributes:
        name: Name of the spans that wait, or of the calls.
        slots: Most trajectories that hold a slot at once.
        holds: All slots that trajectories held.
    """

    name: str
    slots: int
    holds: list[Hold]


def limits_of(records: Records, pieces: Pieces) -> Iterator[Limit]:
    """Yield the limits that explain waits of trajectories; of processes alone, else of all together.

    Args:
        records: The trajectories.
        pieces: Their time by cause.
    """
    calls, inner = defaultdict[str, list[int]](list), defaultdict[int, list[int]](list)
    for span, (name, trajectory) in enumerate(
        zip(records.spans.name.tolist(), records.spans.trajectory.tolist(), strict=True)
    ):
        inner[trajectory].append(span)
        if trajectory >= 0:
            calls[records.names[name]].append(span)
    is_code = pieces.cause == records.names.index(OWN_CODE)
    columns = (column[is_code].tolist() for column in (pieces.owner, pieces.end, pieces.begin))
    code = {(owner, end_ns): begin_ns for owner, end_ns, begin_ns in zip(*columns, strict=True)}
    for name, spans in calls.items():
        by_process = defaultdict[int, list[int]](list)
        for span in spans:
            by_process[int(records.spans.process[span])].append(span)
        alone = [_limit(name, own, records, inner, code) for own in by_process.values()]
        if all(alone):
            yield from filter(None, alone)
        elif together := _limit(name, spans, records, inner, code):
            yield together


def _limit(
    name: str, spans: list[int], records: Records, inner: Mapping[int, list[int]], code: _Code
) -> Limit | None:
    """Return the limit that explains the waits in, or before, all spans of a name."""
    if any(records.trajectories[int(records.spans.trajectory[span])].cut_end for span in spans):
        return None  # slots that are held on are not known
    table = records.spans
    columns = (column[spans].tolist() for column in (table.trajectory, table.begin, table.end))
    times = dict[int, tuple[int, int]]()  # begin and end of the wait, by span
    for span, trajectory, begin_ns, end_ns in zip(spans, *columns, strict=True):
        if name.startswith(WAIT):
            times[span] = begin_ns, end_ns
        else:
            times[span] = code.get((trajectory, begin_ns), begin_ns), begin_ns
    limits = (_explained(name, holds) for holds in _held(times, records, inner))
    share, limit = max(limits, key=lambda one: one[0], default=(0.0, None))
    return limit if share >= _LEAST_SHARE else None


def _held(
    times: Mapping[int, tuple[int, int]], records: Records, inner: Mapping[int, list[int]]
) -> Iterator[list[Hold]]:
    """Yield the slots that are held after waits, for each way in which one may be released.

    Args:
        times: Begin and end of the waits, by the span that waits or that is waited for.
        records: The trajectories.
        inner: The spans of each trajectory.
    """
    table = records.spans
    releases = defaultdict[tuple[str, str], dict[int, int]](dict)  # by name, and which one: end by wait
    for trajectory in dict.fromkeys(table.trajectory[[*times]].tolist()):
        wait = NO_SPAN
        for span in inner[trajectory]:
            if span in times:
                wait = span
                releases["", "trajectory"][wait] = records.trajectories[trajectory].end_ns
                if table.parent[span] != NO_SPAN:
                    releases["", "span around"][wait] = int(table.end[table.parent[span]])
            if wait != NO_SPAN and table.begin[span] >= times[wait][1]:
                name, end_ns = records.names[int(table.name[span])], int(table.end[span])
                releases[name, "first"].setdefault(wait, end_ns)
                releases[name, "last"][wait] = end_ns
    for ends in releases.values():
        if len(ends) == len(times):
            yield [Hold(int(table.trajectory[at]), *times[at], ends[at]) for at in times]


def _explained(name: str, holds: Iterable[Hold]) -> tuple[float, Limit | None]:
    """Return the share of the waits that the least possible limit explains, and the limit."""
    ordered = sorted(holds, key=lambda hold: hold.begin_ns)
    since, begin, end = np.array([hold[1:] for hold in ordered]).T
    released = np.sort(end)
    numbers = np.arange(len(ordered))
    slots = int((numbers + 1 - np.searchsorted(released, begin + _ERROR_NS, "right")).max())
    waited = begin - since
    if (waited >= _LEAST_WAIT_NS).sum() < _LEAST_WAITS or slots >= len(ordered):
        return 0.0, None
    free = np.concatenate((since[:slots], released[:-slots]))
    left = (begin - np.maximum(since, free)).clip(0)
    return float(1 - left.sum() / waited.sum()), Limit(name, slots, ordered)
