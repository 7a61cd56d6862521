"""Steps of a run: figures that they share, steps that differ, and a row of numbers as a row of characters."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from verl_profiling.report.model import Report

_BARS = "▁▂▃▄▅▆▇█"
_BEYOND = "▲"
_FAR = 3.0
"""Times the 90th percentile from which on a value lies beyond the axis."""


class Shift:
    """When a stage or a cause of lost time left the range that it had in the steps before.

    Attributes:
        FEWEST: Steps before, of which a range is known.
        OF_ITSELF: Share of its median before by which it changed.
        OF_THE_STEP: The same, as a share of the step (for a cause, of all devices' time).
    """

    FEWEST = 2
    OF_ITSELF = 0.1
    OF_THE_STEP = 0.02


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, or a cause of lost time, that left the range it had in all captured steps before.

    Attributes:
        index: Which of the captured steps it is.
        kind: What changed.
        name: Name of the stage or cause.
        seconds: How long it took in this step.
        before: Median of the steps before (s).
        steps_before: Number of these.
    """

    index: int
    kind: Literal["stage", "cause"]
    name: str
    seconds: float
    before: float
    steps_before: int


def stage_seconds(report: Report) -> dict[str, float]:
    """Return the time of each outermost stage of the controller, and of the rest of the step."""
    return {row.name: row.duration_us / 1e6 for row in report.stages if row.depth == 0}


def unaimed(reports: Sequence[Report]) -> list[int]:
    """Return the indices of steps captured by the schedule; requested captures may record other things."""
    return [
        at for at, report in enumerate(reports) if report.asked is None or report.asked.kind == "schedule"
    ]


def slowest(seconds: Sequence[float]) -> int:
    """Return the index of the longest step; the first step is ignored if it is an outlier (warm-up)."""
    warms_up = seconds[0] > axis_top(seconds)
    return max(range(warms_up, len(seconds)), key=lambda index: seconds[index])


def excess(stages: Sequence[dict[str, float]], index: int) -> tuple[str, float] | None:
    """Return the stage of a step that took longest over its median in all steps, and how much longer (s)."""
    usual = {name: median(row.get(name, 0.0) for row in stages) for name in stages[index]}
    over = {name: took - usual[name] for name, took in stages[index].items()}
    name = max(over, key=lambda name: over[name], default=None)
    return None if name is None or over[name] <= 0 else (name, over[name])


def first_change(reports: Sequence[Report]) -> Change | None:
    """Return the largest change of the first step in which a stage or a cause left its range.

    The range is that of at least two steps, and half as much on either side. A change is larger than a
    tenth of the median before and than 2 % of the step (for a cause, of all devices' time). Stages count
    before causes: lost time is what follows from them.
    """
    for index in range(Shift.FEWEST, len(reports)):
        span_s = reports[index].span_us / 1e6
        lanes_s = sum(row.span_us for row in reports[index].devices) / 1e6
        stages = _left_its_range([stage_seconds(report) for report in reports[: index + 1]], span_s)
        causes = _left_its_range([report.lost_s for report in reports[: index + 1]], lanes_s)
        kind: Literal["stage", "cause"] = "stage" if stages else "cause"
        for name, seconds, before in stages or causes:
            return Change(
                index=index, kind=kind, name=name, seconds=seconds, before=before, steps_before=index
            )
    return None


def _left_its_range(rows: list[dict[str, float]], whole_s: float) -> list[tuple[str, float, float]]:
    """Return name, time and median before of what left its range in the last row, largest change first."""
    *before, last = rows
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        took, past = last.get(name, 0.0), [row.get(name, 0.0) for row in before]
        usual = median(past)
        margin = (max(past) - min(past)) / 2
        outside = not min(past) - margin <= took <= max(past) + margin
        if outside and abs(took - usual) > max(Shift.OF_ITSELF * usual, Shift.OF_THE_STEP * whole_s):
            found.append((name, took, usual))
    return sorted(found, key=lambda row: -abs(row[1] - row[2]))


def axis_top(values: Sequence[float]) -> float:
    """Return the largest value that is no outlier, such as a first step that warms up."""
    usual = sorted(values)[int(0.9 * (len(values) - 1))] if len(values) > 2 else 0.0
    return max((value for value in values if value <= _FAR * usual or usual <= 0), default=0.0)


def sparkline(values: Sequence[float], most: int) -> str:
    """Return one character for each of the last values, as high as the value on the axis; a sign beyond it.

    Args:
        values: Numbers of at least 0.
        most: How many are shown.
    """
    shown = values[-most:]
    top = axis_top(shown)
    return "".join(
        _BEYOND if value > top else _BARS[round(max(value, 0.0) / (top or 1.0) * (len(_BARS) - 1))]
        for value in shown
    )
