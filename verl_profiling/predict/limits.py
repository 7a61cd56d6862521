"""Limits of concurrency: which release gave a trajectory the slot that it waited for.

A trajectory waits in a span ``wait:NAME``, or in its own code before a call that others are in. A
limit of n slots explains the waits if the nth last release before each acquire came just before it.
So for each way in which a slot may be held (until the end of a later span, of the span around the
wait, or of the trajectory), the least number of slots is computed that all holders need, and the
share of the waits that it explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from verl_profiling.files.trajectory_log import NO_SPAN
from verl_profiling.manifest import WAIT
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.records import OWN_CODE, Records

# a span of the holder may end this much after the next acquire: both are tasks of a loop
_ERROR_NS = 1_000_000
# of the waits that a limit explains; waits for anything else are explained by chance only
_LEAST_SHARE = 0.9
_LEAST_WAITS = 3  # fewer may end with another span by chance
_LEAST_WAIT_NS = 5_000_000  # shorter ones are code, or the way to the next task of the loop


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
        queue: Name of its queue, which no other limit has.
    """

    name: str
    slots: int
    holds: list[Hold]
    queue: str = ""


def limits_of(records: Records, pieces: Pieces) -> list[Limit]:
    """Return the limits that explain waits of trajectories; of processes alone, else of all
    together.

    Args:
        records: The trajectories.
        pieces: Their time by cause.
    """
    waits, processes = _Waits(records, pieces), records.spans.process.tolist()
    calls = defaultdict[str, list[int]](list)
    for trajectory, spans in waits.inner.items():
        if trajectory < 0:
            continue
        for span in spans:
            calls[waits.names[span]].append(span)
    limits = list[Limit]()
    for name, spans in calls.items():
        by_process = defaultdict[int, list[int]](list)
        for span in spans:
            by_process[processes[span]].append(span)
        alone = [waits.limit(name, of_process) for of_process in by_process.values()]
        if all(alone):
            limits += filter(None, alone)
        elif len(alone) > 1:
            limits += filter(None, [waits.limit(name, spans)])
    return [limit._replace(queue=f"{limit.name} {number}") for number, limit in enumerate(limits)]


class _Waits:
    """The waits of trajectories, and what may have ended them.

    Args:
        records: The trajectories.
        pieces: Their time by cause.

    Attributes:
        inner: The spans of each trajectory, in order of begin.
        names: Name of each span.
    """

    def __init__(self, records: Records, pieces: Pieces) -> None:
        table, self._trajectories = records.spans, records.trajectories
        self.names = [records.names[name] for name in table.name.tolist()]
        self._owner, self._parent = table.trajectory.tolist(), table.parent.tolist()
        self._begin, self._end = table.begin.tolist(), table.end.tolist()
        self.inner = defaultdict[int, list[int]](list)
        for span, trajectory in enumerate(self._owner):
            self.inner[trajectory].append(span)
        is_code = pieces.cause == records.names.index(OWN_CODE)
        columns = (column[is_code].tolist() for column in (pieces.owner, pieces.end, pieces.begin))
        self._code = {
            (owner, end_ns): begin_ns for owner, end_ns, begin_ns in zip(*columns, strict=True)
        }

    def limit(self, name: str, spans: list[int]) -> Limit | None:
        """Return the limit that explains the waits in, or before, all spans of a name."""
        if any(self._trajectories[self._owner[span]].cut_end for span in spans):
            return None  # slots that are held on are not known
        times = dict[int, tuple[int, int]]()  # begin and end of the wait, by span
        for span in spans:
            begin_ns = self._begin[span]
            if name.startswith(WAIT):
                times[span] = begin_ns, self._end[span]
            else:
                times[span] = self._code.get((self._owner[span], begin_ns), begin_ns), begin_ns
        ordered = sorted(times, key=lambda span: times[span][1])
        since, begin = np.array([times[span] for span in ordered]).T
        if (begin - since >= _LEAST_WAIT_NS).sum() < _LEAST_WAITS:
            return None
        best, limit = _LEAST_SHARE, None
        for ends in self._releases(times):
            if len(ends) == len(times):
                share, slots = _explained(since, begin, np.array([ends[span] for span in ordered]))
                if share >= best:
                    best, limit = share, (slots, ends)
        if limit is None:
            return None
        holds = [Hold(self._owner[span], *times[span], limit[1][span]) for span in ordered]
        return Limit(name, limit[0], holds)

    def _releases(self, times: Mapping[int, tuple[int, int]]) -> Iterable[dict[int, int]]:
        """Return the end of each hold, for each way in which a slot may be released,
        by the wait's span.
        """
        first, last = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        whole, around = dict[int, int](), dict[int, int]()
        for trajectory in dict.fromkeys(self._owner[span] for span in times):
            wait, until_ns = NO_SPAN, 0
            for span in self.inner[trajectory]:
                if span in times:
                    wait, until_ns = span, times[span][1]
                    whole[wait] = self._trajectories[trajectory].end_ns
                    if self._parent[span] != NO_SPAN:
                        around[wait] = self._end[self._parent[span]]
                if wait != NO_SPAN and self._begin[span] >= until_ns:
                    first[self.names[span]].setdefault(wait, self._end[span])
                    last[self.names[span]][wait] = self._end[span]
        return [whole, around, *first.values(), *last.values()]


def _explained(since: Ints, begin: Ints, end: Ints) -> tuple[float, int]:
    """Return the share of the waits that the least possible limit explains, and its number of
    slots.

    Args:
        since: Begin of each wait, in order of their ends.
        begin: End of each wait.
        end: Release of the slot.
    """
    released = np.sort(end)
    holders = np.arange(1, len(begin) + 1) - np.searchsorted(released, begin + _ERROR_NS, "right")
    slots = int(holders.max())
    if not 0 < slots < len(begin):  # none: the calls are shorter than the error
        return 0.0, slots
    free = np.concatenate((since[:slots], released[:-slots]))
    left = (begin - np.maximum(since, free)).clip(0)
    return float(1 - left.sum() / (begin - since).sum()), slots
