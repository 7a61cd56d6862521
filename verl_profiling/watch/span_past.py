"""Compares the spans of trajectories and services with their past: by mean per call, and by total.

The mean per call is judged in every step. The totals explain why a stage became slow.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from statistics import median

from verl_profiling.files.step_summary import MOST_SPANS, OTHERS, SpanTotal, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import GC, WAIT, WEIGHT_SYNC
from verl_profiling.settings.groups import Anomaly
from verl_profiling.shifts import LEAST_S, MATTERS, Series
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import duration

NEWS = 1.25
"""Ratio of a duration or lead to the known one from which it is worth a mention."""

_OF_A_STAGE = 0.4
"""Evidence of a span relative to that of a stage:
few calls with long tails have means that vary.
"""

GENERATE = "generate"

SpanKey = tuple[str, str]
"""Role of the processes, and name of the spans."""


class SpanPast:
    """The spans of the last steps, by role and name.

    Args:
        options: Thresholds; ``slow_span`` and ``window`` are used.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._totals: deque[dict[SpanKey, SpanTotal]] = deque(maxlen=options.window)
        self.series = defaultdict[SpanKey, Series](partial(Series, options.window))

    def join(self, totals: dict[SpanKey, SpanTotal], summary: StepSummary) -> list[SpanKey]:
        """Add the spans of a step; return those that became slow, by mean per call."""
        self._totals.append(totals)
        if self._options.slow_span is None:
            return []
        return [key for key, total in totals.items() if self._is_slow(key, total, totals, summary)]

    def _is_slow(
        self, key: SpanKey, total: SpanTotal, totals: dict[SpanKey, SpanTotal], summary: StepSummary
    ) -> bool:
        role, name = key
        trajectories = totals.get((role, TRAJECTORY))
        if not total.runs or is_wait(name) or (trajectories is not None and name == GENERATE):
            return False
        if key not in self.series and len(self.series) >= MOST_SPANS:
            return False
        # Spans of trajectories overlap, so their sum is compared with that of the trajectories.
        whole_s = max(summary.seconds, trajectories.seconds if trajectories is not None else 0.0)
        matters_s = max(MATTERS * whole_s / total.runs, LEAST_S)
        series = self.series[key]
        amount = series.measure(total.seconds / total.runs, self._options.slow_span, matters_s)
        return series.add(_OF_A_STAGE * amount)

    def grown(self, totals: dict[SpanKey, SpanTotal], enough_ns: float) -> dict[SpanKey, str]:
        """Return the spans whose totals grew by so much, with their usual totals as sentences.

        The largest growth is first, and trajectories are last.
        """
        rows = []
        for key, total in totals.items():
            past = self._past_of(key)
            usual_ns, runs = (
                median(one.duration_ns for one in past),
                median(one.runs for one in past),
            )
            more_ns = total.duration_ns - usual_ns
            if (
                more_ns >= enough_ns
                and total.duration_ns > NEWS * usual_ns
                and not key[1].startswith(WAIT)
            ):
                sentence = (
                    f"{key[1]} of {key[0]} took {duration(total.seconds)} in {calls(total.runs)}, "
                    f"usually {duration(usual_ns / 1e9)} in {calls(runs)}"
                )
                rows.append((key[1] == TRAJECTORY, -more_ns, key, sentence))
        return {key: sentence for *_, key, sentence in sorted(rows)}

    def longer(self, totals: dict[SpanKey, SpanTotal]) -> list[str]:
        """Return sentences on trajectories with more tokens than usual."""
        sentences = []
        for (role, name), total in totals.items():
            past = [one.tokens / one.runs for one in self._past_of((role, name)) if one.runs]
            usual = median(past) if past else 0.0
            if name == TRAJECTORY and usual and total.tokens > NEWS * usual * total.runs:
                mean = total.tokens / total.runs
                sentences.append(f"a {name} of {role} has {mean:,.0f} tokens, usually {usual:,.0f}")
        return sentences

    def _past_of(self, key: SpanKey) -> list[SpanTotal]:
        none = SpanTotal(key[1], 0, 0)
        return [totals.get(key, none) for totals in self._totals] or [none]


def is_wait(name: str) -> bool:
    """Return whether spans of this name wait for others, are no work of their own,
    or part of a stage.
    """
    return name in (TRAJECTORY, GC, OTHERS) or name.startswith((WAIT, f"{WEIGHT_SYNC}/"))


def by_role(summary: StepSummary) -> dict[SpanKey, SpanTotal]:
    """Return the totals of the spans of all processes of a role."""
    totals: dict[SpanKey, SpanTotal] = {}
    for process in summary.processes:
        for total in process.spans:
            key = process.role, total.name
            totals[key] = totals[key] + total if key in totals else total
    return totals


def worker_role(name: str) -> str:
    """Return the role that does the work of a span, if its processes exist."""
    return ROLLOUT_ROLE if name in (GENERATE, TRAJECTORY) else name


def calls(runs: float) -> str:
    """Return a number of calls as text."""
    return f"{runs:,.0f} {'call' if runs == 1 else 'calls'}"
