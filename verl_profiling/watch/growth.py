"""Notices memory that grows step by step."""

from __future__ import annotations

from collections import deque
from statistics import median

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_account import RankUse, StepAccount
from verl_profiling.units import byte_size
from verl_profiling.watch.suspicion import Suspicion, healthiest

__all__ = ["Growth"]

_STEADY = 0.5
"""What grows by less in the second half of the window than by this share of the first is warming up."""


class Growth:
    """Follows what every process holds at the end of its steps, those after which it was read.

    Where it grows in several processes of a role, which run the same code, that is one piece of news.

    Args:
        options: By which share it must grow, and in how many steps.
    """

    def __init__(self, options: Anomaly) -> None:
        self._share = options.memory
        self._window = options.window
        self._held: dict[str, deque[tuple[int, int]]] = {}

    def observe(self, account: StepAccount, quiet: bool) -> Suspicion | None:
        """Return whose memory has grown in every step of the window, by the share in all, and goes on to.

        Args:
            account: The account of a step whose workers were read.
            quiet: Only follow: something else is noticed in this step.
        """
        uses = {use.lane: use for use in (*account.loop, *account.workers)}
        for lane in [lane for lane in self._held if lane not in uses]:
            del self._held[lane]
        grown: list[tuple[float, RankUse]] = []
        for lane, use in uses.items():
            held = self._held.setdefault(lane, deque(maxlen=self._window + 1))
            if not use.held_bytes:
                continue
            if held and use.held_bytes <= held[-1][1]:
                held.clear()
            held.append((account.step, use.held_bytes))
            share = held[-1][1] / held[0][1] - 1
            if self._share is None or len(held) <= self._window or share < self._share:
                continue
            half = held[len(held) // 2][1]
            if held[-1][1] - half >= _STEADY * (half - held[0][1]):
                grown.append((share, use))
        if not grown or quiet:
            return None
        share, most = max(grown, key=lambda each: each[0])
        alike = sum(use.role == most.role for _, use in grown) - 1
        return self._suspicion(account, share, most, alike, list(uses.values()))

    def _suspicion(
        self, account: StepAccount, share: float, use: RankUse, alike: int, uses: list[RankUse]
    ) -> Suspicion:
        first, history = self._held[use.lane][0][0], [size for _, size in self._held[use.lane]]
        growth = {
            other.lane: held[-1][1] - held[0][1]
            for other in uses
            if other.role == use.role and (held := self._held[other.lane])
        }
        for lane in growth:
            self._held[lane].clear()
        others = f"; so it is with {alike} more of its role" if alike else ""
        return Suspicion(
            step=account.step,
            sign="memory",
            suspects=[use.lane],
            peers=healthiest(growth, [use.lane]),
            value=history[-1],
            median=median(history[:-1]),
            history=list(map(float, history)),
            reason=f"step {account.step}: {use.lane} has {byte_size(history[-1])}, {share:.0%} more than "
            f"after step {first}, and more each of the {self._window} times that it was looked at since"
            f"{others}",
        )
