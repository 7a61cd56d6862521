"""Selects from the metrics of a loop what is kept: finite numbers, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite_numbers"]

_MOST_NAMED = 10


def finite_numbers(metrics: Mapping[str, Any] | None) -> tuple[dict[str, float], list[str]]:
    """Return the entries that are finite numbers, and notes on numbers that are not finite.

    Args:
        metrics: The loop's metrics, of any type; scalars of NumPy and torch are numbers. Nothing in
            them raises: a captured step must not fail where another one does not.
    """
    numbers: dict[str, float] = {}
    infinite: list[str] = []
    try:
        entries = list(metrics.items()) if metrics is not None else []
    except Exception:
        return {}, [f"the metrics are a {type(metrics).__name__}, no mapping from names to numbers: left out"]
    for key, value in entries:
        if isinstance(value, str | bytes):
            continue
        try:
            name, number = str(key).encode(errors="replace").decode(), float(value)
        except Exception:
            continue
        if math.isfinite(number):
            numbers[name] = number
        else:
            infinite.append(f"{name} is {number}")
    if not infinite:
        return numbers, []
    more = f" and {len(infinite) - _MOST_NAMED} more" if len(infinite) > _MOST_NAMED else ""
    return numbers, [f"metrics that are not finite were left out: {', '.join(infinite[:_MOST_NAMED])}{more}"]
