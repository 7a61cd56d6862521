"""The table of a run of several steps: median, spread and change of the step and its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from verl_profiling.report.phrases import sparkline
from verl_profiling.report.tables import cells
from verl_profiling.report.terminal import print_table
from verl_profiling.report.watch_frame import STEP
from verl_profiling.units import duration

_BARS = 20
_SHOWN_STAGES = 16

_LEAST_DRIFT = 0.01  # least change that is shown, as a share of the step
# z of the best of all changes; chance exceeds it once in a thousand stages of 12 to 400 steps
_BY_CHANCE = 4.3
_FITTED = 4  # numbers that a change has: two levels, its begin and its end
_LEAST_VALUES = 7
# Correlation of successive steps that chance may have; above, the change is one of several
_MOST_ALIKE = 0.4
# By how much a rise has to fit better than a jump, as n log(error): 2% of jumps exceed it
_CLEARLY = 8.0
_LEAST_RISE = 4  # steps; a fault may come within three
_MOST_VALUES = 400  # every second of more steps, and so on: any pair of 400 is tried in 10 ms
_AT_ENDS = 5  # steps whose median is the level at the begin, and at the end
_OUTLIER = 5.0  # multiple of the median distance; normal noise exceeds it once in 1,300 steps
_ROUNDING = 1 + 1e-12


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
    """A change of a duration in a run, from one level to another.

    Attributes:
        before: The level before (s).
        after: The level after (s).
        last: Index of the last value at the level before.
        first: Index of the first value at the level after.
    """

    before: float
    after: float
    last: int
    first: int

    @property
    def kind(self) -> str:
        """``jump``, or ``drift`` over several steps."""
        return "jump" if self.first - self.last < _LEAST_RISE else "drift"

    @property
    def seconds(self) -> float:
        """Its size (s)."""
        return self.after - self.before

    def fitted(self, values: Sequence[float]) -> Trend:
        """Return the change of a duration, e.g. of a stage, in the same steps as this one."""
        shares = np.interp(range(len(values)), [self.last, self.first], [0.0, 1.0])
        size, before = np.polyfit(shares, _without_outliers(values), 1).tolist()
        return self._replace(before=before, after=before + size)


def trend_of(values: Sequence[float], least: float) -> Trend | None:
    """Return the change in a run; ``None`` if small, perhaps chance, or over."""
    if len(values) < _LEAST_VALUES:
        return None
    near = _without_outliers(values)
    if near.min() == near.max():
        return None
    trend = Trend(0.0, 0.0, *_best_fit(near - near.mean())).fitted(near.tolist())
    middle_s = (trend.before + trend.after) / 2
    begin_s = median(values[: trend.last + 1][:_AT_ENDS])
    end_s = median(values[trend.first :][-_AT_ENDS:])
    is_over = (begin_s < middle_s) == (end_s < middle_s)  # e.g. a fault that was repaired
    if is_over or abs(trend.seconds) < least or _may_be_chance(trend, near):
        return None
    return trend


def _trend(values: Sequence[float], least: float) -> str:
    trend = trend_of(values[:: 1 + len(values) // _MOST_VALUES], least)
    return f"{trend.kind} {duration(trend.seconds, signed=True)}" if trend else ""


def _without_outliers(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the values; one far from the median of the seven around it is replaced by that."""
    around = np.lib.stride_tricks.sliding_window_view(values, 7)
    medians = np.pad(np.median(around, axis=1), 3, "edge")
    far = np.abs(values - medians)
    return np.where(far > _OUTLIER * np.median(far), medians, values)


def _best_fit(near: NDArray[np.float64]) -> tuple[int, int]:
    """Return the last index before and the first index after the change between two levels that
    fits best: between neighbours, between both ends, or between any two steps.

    Args:
        near: Durations with the mean 0.
    """
    many = len(near)
    last, first = np.triu_indices(many, 1)
    steps = first - last
    # Least squares in closed form: the products of each change with the durations, ones and itself
    rising = np.append(near[:0:-1].cumsum().cumsum()[::-1], 0.0)
    product = (rising[last] - rising[first]) / steps
    total = (steps - 1) / 2 + many - first
    squares = (steps - 1) * (2 * steps - 1) / (6 * steps) + many - first
    errors = near @ near * _ROUNDING - product**2 / (squares - total**2 / many)
    is_free = (steps > 1) & (steps < many - 1)  # both ends are fitted, in place of one or none
    best = (many * np.log(errors) + _CLEARLY * is_free).argmin()
    return int(last[best]), int(first[best])


def _may_be_chance(trend: Trend, near: NDArray[np.float64]) -> bool:
    rest = near - np.interp(range(len(near)), trend[2:], trend[:2])
    error = rest @ rest + _ROUNDING - 1
    alike = np.clip((rest[1:] @ rest[:-1]) / error, 0.0, _MOST_ALIKE)
    independent = (len(near) - _FITTED) * (1 - alike) / (1 + alike)
    return bool(independent * np.log(near.var() * len(near) / error) < _BY_CHANCE**2)
