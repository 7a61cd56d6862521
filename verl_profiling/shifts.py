"""Shifts of durations against their own past: their spread, and the evidence for changes.

A shift is the logarithm of a duration over the median before it. The spread is robust: two of three shifts
are within it. If successive shifts are similar, as in a drift, the spread counts as wider.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from math import exp, log, sqrt
from statistics import median

LEAST_S = 0.001
"""Minimum excess of a slow step or stage (s), which is less than the cost of a capture."""

_LONG_PAST = 8
"""Number of windows of shifts for the spread."""

_WITHIN = 0.68
_LEAST_SPREAD = 0.05
_ALIKE = 1.3
_MOST_ALIKE = 2.5
_OF_THE_SPREAD, _FULL = 1.3, 6.0
_SOON, _CHANCE = 8, 1.0
_BELOW, _FULL_SHIFT, _MOST_SHIFT = 0.16, 0.6, 1.2
_LATEST = 8
_RARE, _MOST = 0.01, 0.5
_OF_WHAT_MATTERS = 0.7


def noticed_from(ratio: float, spread: float) -> float:
    """Return the ratio from which 19 of 20 lasting changes are detected within eight steps."""
    return max(ratio, exp(_least(ratio, spread) + _full(spread) / _SOON + _CHANCE * spread))


class Past:
    """The past of a duration (s). The latest steps join the past with a delay, because they may be a change.

    Attributes:
        before: Durations in the window before the last step.
        usual: Median of the durations in the window.
    """

    def __init__(self, window: int, durations: Iterable[float] = (), matters_s: float = 0.0) -> None:
        self.before: list[float] = []
        self.usual = 0.0
        self._values: deque[float] = deque(maxlen=window + _LATEST)
        self._shifts: deque[float] = deque(maxlen=_LONG_PAST * window)
        self._enough = max(3, window // 2)
        for value in durations:
            self.join(value, matters_s)

    def join(self, value: float, matters_s: float) -> None:
        """Add the duration of a step; variation of very short durations is ignored."""
        self._least_s = max(_OF_WHAT_MATTERS * matters_s, LEAST_S)
        self.before = self._earlier(self._values)
        self.usual = median(self.before) if self.before else 0.0
        is_warm = len(self.before) > 2  # the first steps may be a warm-up
        self._shifts.append(self._shift(value, self.usual) if is_warm else 0.0)
        self._values.append(value)

    @property
    def spread(self) -> float:
        """The spread of the past, known after half a window."""
        shifts = self._earlier(self._shifts)
        spread, jump = _most(map(abs, shifts)), _most(abs(one - before) for before, one in pairwise(shifts))
        return spread * min(max(sqrt(2) * spread / (_ALIKE * jump), 1.0), _MOST_ALIKE)

    def evidence(self, value: float, usual: float, ratio: float) -> float:
        """Return the evidence of a duration for a change: small at ``ratio``, negative within the spread.

        The evidence is at most half of a detection, and smaller if the past had such shifts often.
        """
        if len(self.before) < self._enough:
            return -1.0
        shifted, spread, shifts = self._shift(value, usual), self.spread, self._earlier(self._shifts)
        share = max(sum(one >= shifted for one in shifts) / len(shifts), _RARE)
        return min(_MOST, (shifted - _least(ratio, spread)) / _full(spread)) * log(share) / log(_RARE)

    def _earlier(self, of_steps: deque[float]) -> list[float]:
        return [*of_steps][: max(self._enough, len(of_steps) - _LATEST)]

    def _shift(self, value: float, usual: float) -> float:
        return log((max(value, 0.0) + self._least_s) / (usual + self._least_s))


def _least(ratio: float, spread: float) -> float:
    return max(log(ratio) - _BELOW, _OF_THE_SPREAD * spread)


def _full(spread: float) -> float:
    return min(max(_FULL_SHIFT, _FULL * spread), _MOST_SHIFT)


def _most(sizes: Iterable[float]) -> float:
    ordered = sorted(sizes)
    return max([_LEAST_SPREAD, *ordered[int(_WITHIN * len(ordered)) :][:1]])
