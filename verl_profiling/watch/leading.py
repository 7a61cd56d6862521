"""Notices a process that the others wait for, step after step."""

from __future__ import annotations

from collections import deque
from statistics import median

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_summary import StepSummary
from verl_profiling.units import duration
from verl_profiling.watch.suspicion import Suspicion

__all__ = ["IN_A_ROW", "Leading"]

IN_A_ROW = 3
"""In so many steps that were read, one after another, a process must lead to be noticed."""

NEWS = 1.25
"""By this ratio a process must lead by more than when it was noticed, to be noticed again."""


class Leading:
    """Follows who leads in which stage, where nothing speaks against it.

    A process that leads always is noticed once, and again when it leads by more.

    Args:
        options: By which share of the step a process must lead.
    """

    def __init__(self, options: Anomaly) -> None:
        self._share = options.leader
        self._window = options.window
        self._shares: dict[tuple[str, str], deque[float]] = {}
        self._noticed: dict[tuple[str, str], float] = {}

    def observe(self, summary: StepSummary, before: StepSummary | None, quiet: bool) -> Suspicion | None:
        """Return who leads in a step, if it has led long enough.

        Args:
            summary: The summary of a step whose workers were read.
            before: That of the step before.
            quiet: Only follow: something else is noticed in this step.
        """
        leads = {
            (row.name, row.leader): min(row.lead_ns, row.exposed_ns)
            for row in summary.exposed
            if row.name and row.leader and row.lead_ns
        }
        found = None
        for who in {*self._shares, *leads}:
            lead_ns = leads.get(who, 0)
            share = lead_ns / summary.duration_ns if summary.duration_ns > 0 else 0.0
            past = self._shares.setdefault(who, deque(maxlen=self._window))
            past.append(share)
            if not any(past):
                del self._shares[who]
            elif not quiet and found is None and self._is_news(who, past):
                self._noticed[who] = share
                found = _suspicion(summary, who, lead_ns, past).aimed_with(summary, before)
        return found

    def _is_news(self, who: tuple[str, str], past: deque[float]) -> bool:
        if self._share is None or len(past) < IN_A_ROW:
            return False
        least = min(list(past)[-IN_A_ROW:])
        return least >= max(self._share, NEWS * self._noticed.get(who, 0.0))


def _suspicion(summary: StepSummary, who: tuple[str, str], lead_ns: int, past: deque[float]) -> Suspicion:
    stage, lane = who
    share = past[-1]
    return Suspicion(
        step=summary.step,
        sign="leader",
        stage=stage,
        value=share,
        median=median(past),
        history=list(past),
        reason=f"step {summary.step}: {lane} was in stage {stage} {duration(lead_ns / 1e9)} longer than its "
        f"peers, {share:.0%} of the step, and so it was in the {IN_A_ROW - 1} steps before",
    )
