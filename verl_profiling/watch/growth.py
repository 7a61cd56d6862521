"""Notices memory that grows step by step."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_summary import RankUse, StepSummary
from verl_profiling.units import byte_size
from verl_profiling.watch.suspicion import Suspicion, healthiest

_STEADY = 0.5
"""What grows by less in the second half of the window than by this share of the first is warming up."""


class _Held(NamedTuple):
    """The memory of a process after a step, the ``at``-th of the series."""

    at: int
    step: int
    size: int


class Growth:
    """Follows what every process holds at the end of its steps, those after which it was read.

    Of quick steps it is not read after each: then some readings have to be had, too, before it is a sign.
    Where it grows in several processes of a role, which run the same code, that is one piece of news.

    Args:
        options: By which share it must grow, and in how many steps.
    """

    def __init__(self, options: Anomaly) -> None:
        self._share = options.memory
        self._window = options.window
        self._enough = max(2, options.window // 4)
        self._at = 0
        self._held: dict[str, deque[_Held]] = {}

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return whose memory has grown in every step of the window, by the share in all, and goes on to."""
        self._at += 1
        uses = {use.lane: use for use in (*summary.loop, *summary.workers)}
        for lane in [lane for lane in self._held if lane not in uses]:
            del self._held[lane]
        grown: list[tuple[float, RankUse]] = []
        for lane, use in uses.items():
            held = self._held.setdefault(lane, deque())
            if not use.held_bytes:
                continue
            if held and use.held_bytes <= held[-1].size:
                held.clear()
            held.append(_Held(self._at, summary.step, use.held_bytes))
            while len(held) > self._enough + 1 and held[1].at <= self._at - self._window:
                held.popleft()
            share = held[-1].size / held[0].size - 1
            is_long = len(held) > self._enough and self._at - held[0].at >= self._window
            if self._share is None or not is_long or share < self._share:
                continue
            half = held[len(held) // 2].size
            if held[-1].size - half >= _STEADY * (half - held[0].size):
                grown.append((share, use))
        if not grown:
            return None
        share, most = max(grown, key=lambda each: each[0])
        alike = sum(use.role == most.role for _, use in grown) - 1
        return self._suspicion(summary, share, most, alike, list(uses.values()))

    def _suspicion(
        self, summary: StepSummary, share: float, use: RankUse, alike: int, uses: list[RankUse]
    ) -> Suspicion:
        first, history = self._held[use.lane][0].step, [held.size for held in self._held[use.lane]]
        growth = {
            other.lane: held[-1].size - held[0].size
            for other in uses
            if other.role == use.role and (held := self._held[other.lane])
        }
        for lane in growth:
            self._held[lane].clear()
        others = f"; so it is with {alike} more of its role" if alike else ""
        return Suspicion(
            step=summary.step,
            sign="memory",
            suspects=[use.lane],
            peers=healthiest(growth, [use.lane]),
            value=history[-1],
            median=median(history[:-1]),
            history=list(map(float, history)),
            reason=f"step {summary.step}: {use.lane} has {byte_size(history[-1])}, {share:.0%} more than "
            f"after step {first}, and more each of the {len(history) - 1} times that it was looked at since"
            f"{others}",
        )
