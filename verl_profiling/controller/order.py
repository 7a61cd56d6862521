"""Checks the order in which the loop calls the hooks, in every step; warns once of each mistake."""

from __future__ import annotations

import logging
from collections.abc import Callable

from verl_profiling.settings.schedule import Schedule
from verl_profiling.units import step_list

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

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step that the loop began."""
        return (self._first, self._last) if self._first is not None and self._last is not None else None

    def train_ends(self, schedule: Schedule, came_before: Callable[[int], bool]) -> list[int]:
        """Warn of steps that the schedule chose and the loop never began; return those that it lists.

        Args:
            schedule: The steps to capture.
            came_before: Returns whether an earlier start of the run came to a step.
        """
        if self.steps is None:
            self._say("training ends and on_step_begin(step) was never called: nothing was captured")
            return []
        ran = "the loop ran from step {} to step {}".format(*self.steps)
        listed = [step for step in schedule.steps or () if step not in self._captured]
        never = [step for step in listed if not came_before(step)]
        if never:
            self._say(f"schedule.steps: {step_list(never)} never came; {ran}")
        elif not self._captured and not listed and schedule.steps != ():
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")
        return never

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)
