"""Counts that processes recorded with trajectories, such as the length of a queue: last, mean and largest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from verl_profiling.report.rows import CounterRow
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import TrajectoryLog

__all__ = ["Counters"]


class Counters:
    """The counts of a step, from logs that are read one after the other.

    A count holds until the next one of its name; the last one before the step holds at its begin.

    Args:
        begin_ns: Begin of the step, on the controller's clock.
        end_ns: Its end.
    """

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self._begin_ns, self._end_ns = begin_ns, end_ns
        self._said: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def add(self, source: Source, log: TrajectoryLog) -> None:
        """Keep what a log has."""
        for one in log.counts:
            if math.isfinite(one.value):
                said = self._said.setdefault((source.lane, one.name), [])
                said.append((one.at_ns - source.offset_ns, one.value))

    def rows(self) -> list[CounterRow]:
        """Return a row for each count of each process that was said in the step or before it."""
        found = (self._row(lane, name, sorted(said)) for (lane, name), said in self._said.items())
        return [row for row in found if row is not None]

    def _row(self, lane: str, name: str, said: Iterable[tuple[int, float]]) -> CounterRow | None:
        before: list[tuple[int, float]] = []
        inside: list[tuple[int, float]] = []
        for at_ns, value in said:
            if at_ns <= self._begin_ns:
                before = [(self._begin_ns, value)]
            elif at_ns <= self._end_ns:
                inside.append((at_ns, value))
        held = [*before, *inside]
        if not held:
            return None
        until = [*held, (self._end_ns, 0.0)]
        time_ns = self._end_ns - held[0][0]
        area = sum(value * (after - at_ns) for (at_ns, value), (after, _) in pairwise(until))
        return CounterRow(
            lane=lane,
            name=name,
            samples=len(inside),
            last=held[-1][1],
            mean=area / time_ns if time_ns else held[-1][1],
            max=max(value for _, value in held),
        )
