"""What the spans of one process add up to, on the way into the accounts of the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from verl_profiling.step_account import SpanTotal
from verl_profiling.watch.reading import EndedSpans
from verl_profiling.watch.ring import MAX_NAMES
from verl_profiling.watch.span_tally import PIECES

__all__ = ["SpanPieces"]

_MOST = 2 * PIECES * (MAX_NAMES + 1)


class SpanPieces:
    """Keeps what ended in each piece of time until that is in an account; at most what two answers hold."""

    def __init__(self) -> None:
        self._known: dict[str, SpanTotal] = {}
        self._heard = False
        self._pieces: deque[tuple[int, int, SpanTotal]] = deque(maxlen=_MOST)

    def take(self, told: Iterable[EndedSpans]) -> None:
        """Take the sums of an answer, of which only what is new is kept: they go on from answer to answer.

        With the first answer, what was told before was told to another; later, it was lost on the way.
        """
        for name, begin_ns, end_ns, *sums in told:
            now = SpanTotal(name, *sums)
            known = self._known.get(name) or SpanTotal(name, 0, 0)
            if not end_ns:
                self._known[name] = known if self._heard else now
            elif now.runs > known.runs and now.duration_ns >= known.duration_ns:
                self._known[name] = now
                self._pieces.append(((begin_ns + end_ns) // 2, end_ns, now - known))
        self._heard = True

    def of_steps(
        self, befores: Sequence[int], begins: Sequence[int], ends: Sequence[int]
    ) -> list[list[SpanTotal]]:
        """Return what ended in each step, by name.

        A piece belongs to the step in which its middle lies, and to the one after it if it lies between two
        and lasts until that.

        Args:
            befores: When the step before each step ended, in their order.
            begins: When the steps began.
            ends: When they ended.
        """
        found: list[dict[str, SpanTotal]] = [{} for _ in begins]
        for middle_ns, end_ns, more in self._pieces:
            place = bisect_right(befores, middle_ns) - 1
            if place >= 0 and middle_ns < ends[place] and end_ns > begins[place]:
                of_step = found[place]
                of_step[more.name] = of_step[more.name] + more if more.name in of_step else more
        return [list(totals.values()) for totals in found]

    def forget(self, before_ns: int) -> None:
        """Forget what ended before that."""
        while self._pieces and self._pieces[0][1] < before_ns:
            self._pieces.popleft()
