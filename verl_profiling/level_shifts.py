"""Detects from step to step that a duration, e.g. of a stage, became longer than in its own past.

The watch's detector, ``plan`` and the run's view use this module.

A shift is the logarithm of a duration over the median before it: 0.1 is about 10% longer. The
spread is the size that two of three shifts do not exceed, so that outliers hardly matter. If
successive shifts are similar, as in a drift, the spread counts as wider.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log, sqrt
from statistics import median

MATTERS = 0.05
"""Minimum excess of a slow stage over its median, as a share of the median step."""

LEAST_S = 0.001
"""Minimum excess of a slow step or stage (s), which is less than the cost of a capture."""

_LONG_PAST = 8
"""Number of windows of steps whose shifts make the spread."""

_WITHIN = 0.68  # the share of shifts within the spread
_LEAST_SPREAD = 0.05
# How similar successive shifts have to be to widen the spread, and by how much at most.
_ALIKE = 1.3
_MOST_ALIKE = 2.5
# Evidence of a shift is 0 at 1.3 spreads, and 1 at 6 spreads more; _least and _full bound both.
_OF_THE_SPREAD, _FULL = 1.3, 6.0
_SOON, _CHANCE = 8, 1.0
_BELOW, _FULL_SHIFT, _MOST_SHIFT = 0.16, 0.6, 1.2
_LATEST = 8  # steps that join the past with a delay
_FEW, _FEW_LATEST = (
    3,
    2,
)  # least durations that are a past of a seldom stage, and those with a delay
_RARE, _MOST = 0.01, 0.5  # least share of equal shifts in the past; most evidence of one step
_OF_WHAT_MATTERS = 0.7
# Evidence that a step keeps of the sum, the sum for a detection, and what a normal step takes away.
_KEPT, _ENOUGH, _OF_A_QUIET_STEP = 0.98, 0.95, 0.12
_IS_BACK = 0.25
"""Share of a change's excess below which a duration counts as usual again.

If usual durations vary by 8%, nearly all are below it.
"""

_STEPS_BACK = 3
"""Steps in a row below that share that end a change; where steps vary by 30%, fewer are
frequent within a change.
"""

_STAYED = 0.95
"""Least share of a change's steps above half of its excess. A duration that merely varies by 20%
does not reach it.
"""


def noticed_from(ratio: float, spread: float) -> float:
    """Return the ratio to the median from which changes are detected.

    From it on, 19 of 20 lasting changes are detected within eight steps.

    Args:
        ratio: The threshold: the ratio from which a step counts.
        spread: Spread of the durations, as this module computes it.
    """
    return max(ratio, exp(_least(ratio, spread) + _full(spread) / _SOON + _CHANCE * spread))


@dataclass
class _Change:
    """A detected change of a duration, e.g. by a fault of a node, and the past before it.

    Attributes:
        before: The durations (s) before the change.
        usual: Their median (s).
        values: Latest durations (s) since the change was detected, at most a window of steps.
        shifts: Shifts of the change's steps; empty once the change has lasted a window.
        steps_left: Steps until the change's level counts as usual; ``None`` while it goes on.
        is_new: Whether the change has not lasted a window yet.
    """

    before: list[float]
    usual: float
    values: deque[float]
    shifts: list[float]
    steps_left: int | None = None
    is_new: bool = True


class Past:
    """The durations (s) of earlier steps, e.g. of one stage. The latest steps join the past with a
    delay, because they may be a change.

    Steps of a detected change move the median, but do not widen the spread. When the duration is
    usual again, the past before the change is restored. Otherwise a repaired fault of a dozen
    steps would hide the next fault. What does widen the spread: a hiccup of few steps, variation
    inside a change that lasts a window, and a change that often fell below half of its excess.

    Args:
        window: Number of steps in the past.

    Attributes:
        before: Durations (s) in the window before the last step.
        usual: Median (s) of the durations in the window.
        is_seldom: Whether few durations are a past, with a higher threshold, because as many as
            half of a window come late.
    """

    def __init__(self, window: int) -> None:
        self.is_seldom = False
        self.before: list[float] = []
        self.usual = 0.0
        self._values: deque[float] = deque(maxlen=window + _LATEST)
        self._shifts: deque[float] = deque(maxlen=_LONG_PAST * window)
        self._window = window
        self._enough = max(3, window // 2)
        self._change: _Change | None = None

    def join(self, value: float, matters_s: float) -> None:
        """Add the duration of a step (s).

        Variation of durations that are short against ``matters_s`` hardly counts.
        """
        self._least_s = max(_OF_WHAT_MATTERS * matters_s, LEAST_S)
        change = self._change and self._follow(self._change, value)
        self.before = self._earlier(self._values)
        self.usual = median(self.before) if self.before else 0.0
        is_warm = len(self.before) > 2  # the first steps may be a warm-up
        shifts = change.shifts if change is not None and change.is_new else self._shifts
        shifts.append(self._shift(value, self.usual) if is_warm else 0.0)
        self._values.append(value)

    def change_begins(self, steps: int) -> None:
        """Record that a change was detected, to which this number of latest steps belongs."""
        if self._change is not None and self._change.is_new:  # it goes on after a shorter step
            self._change.steps_left = None
            return
        every = [*self._values]
        before = every[: max(_FEW, len(every) - steps)]
        shifts = [self._shifts.pop() for _ in range(min(steps, len(self._shifts)))]
        self._change = _Change(before, self.usual, deque(every[-1:], self._window), shifts[::-1])

    def change_ends(self) -> None:
        """Record that a later step was shorter than those of the change.

        The change ends once as many steps as the past holds have followed.
        """
        if self._change is not None:
            self._change.steps_left = self._values.maxlen

    def _follow(self, change: _Change, value: float) -> _Change | None:
        """Add a step to the change; return the change, or ``None`` if it has ended.

        It ends if the duration is usual again, varies too much, or keeps its new level.
        """
        change.values.append(value)
        every = [*change.values]
        steps, latest = every[:-_STEPS_BACK], every[-_STEPS_BACK:]
        excess = median(steps or latest) - change.usual
        stayed = sum(2 * (one - change.usual) > excess for one in steps)
        if max(latest) < change.usual + _IS_BACK * excess:
            self._values.clear()
            self._values.extend(change.before)
            if len(steps) <= _STEPS_BACK:  # a hiccup is noise
                self._shifts.extend(change.shifts)
            self._change = None
        elif stayed < _STAYED * len(steps):  # it only varies
            self._shifts.extend(change.shifts)
            self._change = None
        elif change.is_new and len(every) == self._window:
            self._shifts.extend(self._shift(one, median(every)) for one in every)
            change.shifts.clear()
            change.is_new = False
        if change.steps_left is not None:
            change.steps_left -= 1
            if not change.steps_left:
                self._change = None
        return self._change

    @property
    def spread(self) -> float:
        """The size that two of three earlier shifts do not exceed; known after half a window."""
        shifts = self._earlier(self._shifts)
        spread, jump = (
            _most(map(abs, shifts)),
            _most(abs(one - before) for before, one in pairwise(shifts)),
        )
        return spread * min(max(sqrt(2) * spread / (_ALIKE * jump), 1.0), _MOST_ALIKE)

    def evidence(self, value: float, usual: float, ratio: float) -> float:
        """Return the evidence of a duration (s) for a change: small at ``ratio`` times the usual
        duration, negative within the spread.

        The evidence is at most half of a detection, and smaller if the past had such shifts often.
        """
        many = len(self.before)
        if many < (_FEW if self.is_seldom else self._enough):
            return -1.0
        shifted, shifts = self._shift(value, usual), self._earlier(self._shifts)
        spread, least = self.spread, 1.0
        if many < self._enough:
            *_, second, _ = sorted(abs(self._shift(one, usual)) for one in self.before)
            spread, least = max(spread, second), sqrt(self._enough / many)  # the first one warms up
        share = max(sum(one >= shifted for one in shifts) / len(shifts), _RARE)
        amount = (shifted - least * _least(ratio, spread)) / _full(spread)
        return min(_MOST, amount) * log(share) / log(_RARE)

    def _earlier(self, of_steps: deque[float]) -> list[float]:
        least = self._enough
        if self.is_seldom:
            least = max(_FEW, min(least, len(of_steps) - _FEW_LATEST))
        return [*of_steps][: max(least, len(of_steps) - _LATEST)]

    def _shift(self, value: float, usual: float) -> float:
        return log((max(value, 0.0) + self._least_s) / (usual + self._least_s))


class Series:
    """A duration (s), step by step, and the evidence that the duration grew.

    Evidence is summed over steps, and fades. A step adds at most half of the evidence for a
    detection, so one outlier is no change. An ongoing change is detected once, and again if it
    becomes larger. A change that comes again within a window of normal steps is detected only if it
    lasts longer than before.

    Attributes:
        value: The current duration.
        past: Durations before the current step.
        score: Sum of the evidence for a change that is not detected yet.
    """

    def __init__(self, window: int) -> None:
        self.value = self.score = 0.0
        self.past = Past(window)
        self._window = window
        self._open: deque[float] = deque(maxlen=4 * window)
        self._is_noticed = False
        self._slow = self._quiet = self._lasted = 0
        self._suspected = 0  # steps since the first evidence
        self._usual_before = self._last_excess = 0.0

    @property
    def excess(self) -> float:
        """The current duration minus the median (s)."""
        return self.value - self.past.usual

    def measure(self, value: float, ratio: float | None, matters_s: float) -> float:
        """Set the duration of a step; return its evidence for a change, negative if there is none.

        Args:
            value: The duration (s).
            ratio: Ratio to the usual duration from which a step counts; ``None`` if none does.
            matters_s: Least excess over the usual duration that counts (s).
        """
        self.value = value
        self.past.join(value, matters_s)
        usual = max(self.past.usual, median(self._open)) if self._is_noticed else self.past.usual
        if ratio is None or value - usual < matters_s:
            return -1.0
        return self.past.evidence(value, usual, ratio)

    def add(self, amount: float) -> bool:
        """Add the evidence of the step; return whether a change is now detected."""
        if self._is_noticed:
            self._end_if_over()
        self.score = max(0.0, _KEPT * self.score + max(-_OF_A_QUIET_STEP, amount))
        # Noise is evidence, too, but is no return of the last change.
        may_be_back = self._is_noticed or 2 * self.excess >= self._last_excess
        self._quiet = 0 if may_be_back else self._quiet + 1
        if self._quiet >= self._window:
            self._lasted = 0
        self._suspected += 1
        if not self.score:
            self._suspected = 0
        if not (self.score or self._is_noticed):
            self._slow = 0
            self._open.clear()
        if self._is_noticed or amount > 0:
            self._slow += 1
            self._open.append(self.value)
        if self._is_noticed:
            self._lasted = max(self._lasted, self._slow)
        return (
            amount > 0 and self.score >= _ENOUGH and (self._is_noticed or self._slow > self._lasted)
        )

    def _end_if_over(self) -> None:
        """End the detected change if less than half of the excess is left."""
        excess = median(self._open) - self._usual_before
        if 2 * (self.value - self._usual_before) < excess:
            self._last_excess = excess
            self._is_noticed, self.score, self._slow, self._suspected = False, 0.0, 0, 0
            self.past.change_ends()

    def notice(self) -> None:
        """Mark the change as detected, if there is evidence."""
        if self.score > 0 and self._open:
            if not self._is_noticed:
                self._usual_before = self.past.usual
            self.past.change_begins(self._suspected)
            self._is_noticed, self.score = True, 0.0
            while len(self._open) > 2:
                self._open.popleft()
            self._lasted = max(self._lasted, self._slow)


def _least(ratio: float, spread: float) -> float:
    return max(log(ratio) - _BELOW, _OF_THE_SPREAD * spread)


def _full(spread: float) -> float:
    return min(max(_FULL_SHIFT, _FULL * spread), _MOST_SHIFT)


def _most(sizes: Iterable[float]) -> float:
    ordered = sorted(sizes)
    return max([_LEAST_SPREAD, *ordered[int(_WITHIN * len(ordered)) :][:1]])
