"""The table of a run of several steps: median, spread and change of the step and its stages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain
from math import sqrt
from statistics import correlation, median
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from verl_profiling.report.phrases import sparkline
from verl_profiling.report.tables import cells
from verl_profiling.report.terminal import print_table
from verl_profiling.report.watch_frame import STEP
from verl_profiling.units import duration

_BARS = 20
_SHOWN_STAGES = 16

# z of Spearman's correlation with the step; chance exceeds it once in a thousand stages
_BY_CHANCE = 3.3
_JUMP_BY_CHANCE = 4.3  # as above, of the largest of all jumps
_LEAST_DRIFT = 0.01  # least change that is shown, as a share of the step


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return least and largest value, without a tenth of the values at each end.

    Of five values or more, at least one is left out at each end.
    """
    ordered, cut = sorted(values), min(-(-len(values) // 10), (len(values) - 1) // 4)
    return ordered[cut], ordered[-1 - cut]


class _RunRow(msgspec.Struct, frozen=True):
    columns: ClassVar[str] = "name, median_s, from=low_s, to=high_s, change, trend"

    name: str
    median_s: float
    low_s: float
    high_s: float
    change: str
    trend: str


def print_run(steps: Sequence[Mapping[str, float]], which: str, console: Console) -> None:
    """Print median, spread and change of the step and the longest stages, for a run of several
    steps.

    Args:
        steps: Time of each step, and of its stages, by name (s).
        which: Kind of the steps, for the title of the table.
        console: Where to print it.
    """
    if len(steps) < 2:
        return
    series = {
        name: [step.get(name, 0.0) for step in steps]
        for name in dict.fromkeys(chain([STEP], *steps))
    }
    least_s = _LEAST_DRIFT * median(series[STEP])
    rows = [
        _RunRow(
            name,
            median(values),
            *middle(values),
            _trend(values, least_s),
            sparkline(values, _BARS),
        )
        for name, values in series.items()
    ]
    shown = sorted(rows, key=lambda row: (row.name != STEP, -row.median_s))[:_SHOWN_STAGES]
    note = (
        "from, to: without a tenth of the steps at each end; change: over the run, if "
        "beyond chance and 1%"
    )
    print_table(console, f"{len(steps):,} {which}", *cells(shown), note)


class Trend(NamedTuple):
    """A change of a duration in a run.

    Attributes:
        kind: ``jump`` or ``drift``.
        seconds: Its size (s).
        since: Index of the first value after a jump; 0 for a drift.
    """

    kind: str
    seconds: float
    since: int


def trend_of(values: Sequence[float], least: float) -> Trend | None:
    """Return the jump in a run, or the drift over it; ``None`` if small or perhaps chance."""
    ordered, third = sorted(values), len(values) // 3
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]
    if third == 0 or ordered[0] == ordered[-1]:
        return None
    split = _jumps_at(values)
    if split:
        kind, change = "jump", median(values[split:]) - median(values[:split])
    elif abs(correlation(ranks, range(len(ranks)))) * sqrt(len(ranks) - 1) >= _BY_CHANCE:
        kind, change = "drift", 1.5 * (median(values[-third:]) - median(values[:third]))
    else:
        return None
    return Trend(kind, change, split) if abs(change) >= least else None


def _trend(values: Sequence[float], least: float) -> str:
    trend = trend_of(values, least)
    return f"{trend.kind} {duration(trend.seconds, signed=True)}" if trend else ""


def _jumps_at(values: Sequence[float]) -> int:
    """Return the index of the first value after a jump of the durations of a run's steps.

    Return 0 if a line fits the values better than two levels, or if the jump may be chance.
    """
    near = np.clip(values, *middle(values))  # an outlier is no level
    near -= near.mean()
    many = np.arange(1, len(near))
    of_levels = near.cumsum()[:-1] ** 2 * len(near) / (many * many[::-1])  # explained squared error
    steps = np.arange(len(near)) - many.mean() + 0.5
    of_line = (near @ steps) ** 2 / (steps @ steps)
    split, by_chance = int(of_levels.argmax()), _JUMP_BY_CHANCE**2 / len(many) * (near @ near)
    if of_levels[split] > max(of_line, by_chance):
        return split + 1
    return 0
