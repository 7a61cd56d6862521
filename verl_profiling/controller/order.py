"""Checks the order in which the loop calls the hooks, in every step; warns once of each mistake."""

from __future__ import annotations

import logging

from verl_profiling.settings.schedule import Schedule

__all__ = ["LoopOrder"]

logger = logging.getLogger(__name__)


class LoopOrder:
    """Follows the loop. Written for speed: the hooks of every step call it, captured or not."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last: int | None = None
        self._captured: set[int] = set()
        self._in_step = False
        self._in_rollout = False
        self._said: set[str] = set()

    def step_begins(self, step: int, captured: bool) -> None:
        """Follow the begin of a step."""
        self._in_step = True
        self._last = step
        if self._first is None:
            self._first = step
        if captured:
            self._captured.add(step)

    def step_ends(self) -> None:
        """Follow its end."""
        if not self._in_step:
            self._say("on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first")
        self._in_step = False

    def rollout_begins(self) -> None:
        """Follow the begin of generation."""
        self._in_rollout = True

    def rollout_ends(self) -> None:
        """Follow its end."""
        if not self._in_rollout:
            self._say(
                "on_rollout_end without on_rollout_begin: the rollout has no begin and is in no timeline; "
                "call on_rollout_begin() before generation"
            )
        self._in_rollout = False

    def train_ends(self, schedule: Schedule) -> None:
        """Warn of steps that the schedule chose and the loop never began."""
        if self._first is None:
            self._say("training ends and on_step_begin(step) was never called: nothing was captured")
            return
        ran = f"the loop ran from step {self._first} to step {self._last}"
        never = [step for step in schedule.steps or () if step not in self._captured]
        if self._captured:
            # Of a resumed run, the earlier steps were those of the start before it.
            never = [step for step in never if step > self._first]
        if never:
            self._say(f"schedule.steps: {_listed(never)} never came; {ran}")
        elif not self._captured:
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def _listed(steps: list[int], most: int = 10) -> str:
    listed = ", ".join(map(str, steps[:most]))
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {listed}{more}"
