"""A row of numbers as a row of characters."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-:=+*#"


def sparkline(values: Sequence[float], most: int, ascii_only: bool = False) -> str:
    """Return one character for each of the last values, as high as the value is of the highest.

    Args:
        values: Numbers of at least 0.
        most: How many are shown.
        ascii_only: Whether the terminal knows no other characters.
    """
    levels = _ASCII if ascii_only else _BARS
    shown = values[-most:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return levels[0] * len(shown)
    return "".join(levels[round(max(value, 0.0) / highest * (len(levels) - 1))] for value in shown)
