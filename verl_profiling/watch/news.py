"""Whether something that is slow is news."""

from __future__ import annotations

from collections import deque

__all__ = ["NEWS", "News"]

NEWS = 1.25
"""By this ratio something must exceed what was like it before, to be noticed again."""


class News:
    """Remembers the last slow values of one thing, so that what recurs is noticed once.

    A slow value is news if no remembered one was about as large, or if the value before it was slow as well;
    then none is, until a value is not slow.

    Args:
        remembered: How many slow values are remembered.
    """

    def __init__(self, remembered: int) -> None:
        self._slow: deque[float] = deque(maxlen=remembered)
        self._in_a_row = 0
        self._noticed = False

    def notice(self, value: float, slow: bool) -> bool:
        """Return whether the next value is news."""
        if not slow:
            self._in_a_row, self._noticed = 0, False
            return False
        self._in_a_row += 1
        recurs = any(value <= NEWS * before for before in self._slow)
        self._slow.append(value)
        if self._noticed or (recurs and self._in_a_row == 1):
            return False
        self._noticed = True
        return True
