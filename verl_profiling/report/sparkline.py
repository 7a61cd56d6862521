"""A row of numbers as a row of characters, and an axis that one outlier does not flatten."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_BEYOND = "▲"
_FAR = 3.0
"""Times the 90th percentile from which on a value lies beyond the axis."""


def axis_top(values: Sequence[float]) -> float:
    """Return the largest of some values that is no outlier: a first step that warms up is one."""
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
