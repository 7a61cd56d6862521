"""Notices steps and stages that are slower than those before them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import median

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_summary import StepSummary
from verl_profiling.units import duration
from verl_profiling.watch.suspicion import Suspicion

__all__ = ["IN_A_ROW", "LEAST_S", "MATTERS", "Slowness"]

MATTERS = 0.1
"""Share of a usual step by which a stage must be longer than usual, to be slow."""

LEAST_S = 0.001
"""What is slow by less is no matter of a capture, whose recording takes longer (s)."""

IN_A_ROW = 2
"""So many times one after another something must be slow: what is slow once is over when it is captured."""


@dataclass
class _Seen:
    """A step: its duration, and the exposed time of its stages, in seconds."""

    duration_s: float
    stages: dict[str, float]

    def without(self, stages: Set[str]) -> float:
        return self.duration_s - sum(self.stages.get(stage, 0.0) for stage in stages)


@dataclass
class _Slow:
    """A stage that is longer than its median."""

    stage: str
    value: float
    history: list[float]
    news: bool

    @property
    def excess(self) -> float:
        return self.value - median(self.history)


@dataclass
class _Streak:
    """How many times one after another something is slow, and when and for how many it last was."""

    looks: int = 0
    in_a_row: int = 0
    is_told: bool = False
    last: int = 0
    lasted: int = 0

    def is_news(self, slow: bool, window: int) -> bool:
        self.looks += 1
        if not slow:
            self.in_a_row, self.is_told = 0, False
            return False
        self.in_a_row += 1
        if self.in_a_row < IN_A_ROW:
            return False
        lasted = self.lasted if self.last and self.looks - self.last < window else 0
        is_news = not self.is_told and self.in_a_row > lasted
        self.is_told |= is_news
        self.last, self.lasted = self.looks, max(self.in_a_row, lasted)
        return is_news


class Slowness:
    """Compares every step with those before it, and every stage with the times that it ran before.

    Something is noticed when it is slow for the second time one after another. While that goes on, and within
    a window after it, it is noticed again only where it lasts longer than before. Stages that run in less
    than half of the steps, such as a checkpoint, are no part of what is compared of the step: each is
    compared with itself alone.

    Args:
        options: From where on something is slow.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._enough = max(3, options.window // 2)
        self._steps: deque[_Seen] = deque(maxlen=options.window)
        self._stages: dict[str, deque[float]] = {}
        self._streaks: dict[str | None, _Streak] = {}

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return what is slow in a step and was not before, if anything is."""
        seen = _Seen(summary.duration_ns / 1e9, {row.name: row.exposed_ns / 1e9 for row in summary.exposed})
        found = self._judged(summary.step, seen) if len(self._steps) >= self._enough else None
        self._steps.append(seen)
        for stage, value in seen.stages.items():
            self._stages.setdefault(stage, deque(maxlen=self._options.window)).append(value)
        return found

    def _judged(self, step: int, seen: _Seen) -> Suspicion | None:
        ran = Counter(stage for before in self._steps for stage in before.stages)
        seldom = {stage for stage in {*ran, *seen.stages} if stage and 2 * ran[stage] < len(self._steps)}
        history = [before.without(seldom) for before in self._steps]
        value, usual = seen.without(seldom), median(history)
        ratio = self._options.slow_step
        is_slow = ratio is not None and value > ratio * usual and value - usual >= LEAST_S
        step_is_news = self._is_news(None, is_slow)
        slow = self._slow_stages(seen, max(MATTERS * usual, LEAST_S))
        worst = max((stage for stage in slow if stage.news), key=lambda stage: stage.excess, default=None)
        if worst is not None and (not step_is_news or worst.excess >= (value - usual) / 2):
            return _of_stage(step, worst)
        if not step_is_news:
            return None
        longer = [stage for stage in slow if stage.stage not in seldom and stage.excess > 0]
        return _of_step(step, value, history, max(longer, key=lambda stage: stage.excess, default=None))

    def _slow_stages(self, seen: _Seen, matters: float) -> list[_Slow]:
        """Return the stages of a step that have been seen often enough, and which of them are news."""
        ratio = self._options.slow_stage
        found = []
        for stage, value in seen.stages.items():
            past = self._stages.get(stage, ())
            if len(past) >= self._enough:
                usual = median(past)
                slow = ratio is not None and value > ratio * usual and value - usual >= matters
                found.append(_Slow(stage, value, list(past), self._is_news(stage, slow)))
        return found

    def _is_news(self, what: str | None, slow: bool) -> bool:
        """Return whether a stage, or the step, has been slow often enough now to be noticed."""
        return self._streaks.setdefault(what, _Streak()).is_news(slow, self._options.window)


def _of_stage(step: int, slow: _Slow) -> Suspicion:
    usual = median(slow.history)
    where = f"stage {slow.stage}" if slow.stage else "what lies in no stage"
    return Suspicion(
        step=step,
        sign="slow_stage",
        stage=slow.stage,
        value=slow.value,
        median=usual,
        history=[*slow.history, slow.value],
        reason=f"step {step}: {where} took {duration(slow.value)} of the step, {_times(slow.value, usual)} "
        f"in the {len(slow.history)} times before",
    )


def _of_step(step: int, value: float, history: Sequence[float], longer: _Slow | None) -> Suspicion:
    usual = median(history)
    stage = longer.stage if longer is not None else ""
    where = ""
    if longer is not None:
        where = f", by {duration(longer.excess)} in {f'stage {stage}' if stage else 'no stage'}"
    return Suspicion(
        step=step,
        sign="slow_step",
        stage=stage,
        value=value,
        median=usual,
        history=[*history, value],
        reason=f"step {step} took {duration(value)}{where}: {_times(value, usual)} of the "
        f"{len(history)} steps before",
    )


def _times(value: float, usual: float) -> str:
    return f"{value / usual:.1f} times the median" if usual > 0 else "and the median was 0"
