"""Where a loop finds what it is asked for, and leaves what it says: a folder, or an actor of Ray."""

from __future__ import annotations

from typing import Protocol

from verl_profiling.demand import Answer, Demand, LoopState

__all__ = ["Inbox"]


class Inbox(Protocol):
    """One way in which people reach the loop. No method raises, or waits for anybody."""

    def has_changed(self) -> bool:
        """Return whether something may have come; each step asks this."""

    def take(self) -> tuple[list[Demand], list[str]]:
        """Return the requests that came, the eldest first, and the ids of those to be cancelled."""

    def answer(self, answer: Answer) -> None:
        """Leave an answer."""

    def answers(self) -> list[Answer]:
        """Return the answers that earlier starts of the run have left."""

    def beat(self, state: LoopState, wait: bool = False) -> None:
        """Leave a sign of life.

        Args:
            state: The sign.
            wait: Wait for a moment until it is there: at the begin of training and at its end.
        """
