"""Shifts of durations against their own past, over the steps of a run: their spread, and evidence for
changes.

A shift is the logarithm of a duration over the median before it. The spread is robust: two of three shifts
are within it. If successive shifts are similar, as in a drift, the spread counts as wider.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import median

LEAST_S = 0.001
"""Minimum excess of a slow step or stage (s), which is less than the cost of a capture."""

LONG_PAST = 4
"""Number of windows of shifts for the spread."""

_WITHIN = 0.68
_LEAST_SPREAD = 0.05
_ALIKE = 1.3
_MOST_ALIKE = 2.5
_OF_THE_SPREAD, _FULL = 1.3, 6.0
_OF_A_WIDE_ONE, _WIDE = 2.1, 0.16
_SOON, _CHANCE = 8, 1.0
_BELOW, _FULL_SHIFT, _MOST_SHIFT = 0.15, 0.6, 1.2


def shift(value: float, usual: float) -> float:
    """Return the shift of a duration against the median before it (both in s)."""
    return log((max(value, 0.0) + LEAST_S) / (usual + LEAST_S))


def spread_of(shifts: Sequence[float]) -> float:
    """Return the spread of a series of at least two shifts."""
    spread, jump = _most(map(abs, shifts)), _most(abs(after - before) for before, after in pairwise(shifts))
    return spread * min(max(sqrt(2) * spread / (_ALIKE * jump), 1.0), _MOST_ALIKE)


def evidence(shifted: float, ratio: float, spread: float) -> float:
    """Return the evidence of one shift for a change: small at ``ratio``, negative within the spread."""
    return (shifted - _least(ratio, spread)) / _full(spread)


def noticed_from(ratio: float, spread: float) -> float:
    """Return the ratio from which 19 of 20 lasting changes are detected within eight steps."""
    return max(ratio, exp(_least(ratio, spread) + _full(spread) / _SOON + _CHANCE * spread))


def spread_so_far(durations: Iterable[float], window: int) -> float:
    """Return the spread of a duration (s), step by step; 0 for less than half a window."""
    past, shifts = deque[float](maxlen=window), deque[float](maxlen=LONG_PAST * window)
    for value in durations:
        if past:
            shifts.append(shift(value, median(past)))
        past.append(value)
    return spread_of(shifts) if 2 * len(shifts) > window else 0.0


def _least(ratio: float, spread: float) -> float:
    return max(log(ratio) - _BELOW, _OF_THE_SPREAD * spread, _OF_A_WIDE_ONE * spread - _WIDE)


def _full(spread: float) -> float:
    return min(max(_FULL_SHIFT, _FULL * spread), _MOST_SHIFT)


def _most(sizes: Iterable[float]) -> float:
    ordered = sorted(sizes)
    return max(ordered[int(_WITHIN * len(ordered))], _LEAST_SPREAD)
