"""Checks in every step the order in which the loop calls the hooks; warns once per mistake."""

from __future__ import annotations

import logging

from verl_profiling.settings.schedule import Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)


class LoopOrder:
    """Tracks the steps and rollouts that the loop has begun and ended.

    Attributes:
        in_step: Whether a step has begun and not ended.
        in_rollout: Whether generation has begun and not ended.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._last: int | None = None
        self._newest: int | None = None
        self._captured: set[int] = set()
        self.in_step = False
        self.in_rollout = False
        self._said: set[str] = set()

    def step_begins(self, step: int, captured: bool) -> None:
        """Record that a step begins; warn if the last one has not ended, or the number does not rise."""
        if self.in_step and "not ended" not in self._said:
            self._say(
                f"step {step} begins and step {self._last} has not ended: call on_step_end() last in every "
                "step, or on_exception(error) where it raised",
                "not ended",
            )
        if self._newest is not None and step <= self._newest and "again" not in self._said:
            self._say(
                f"step {step} begins after step {self._newest}: pass on_step_begin(step) a number that rises "
                "over the whole training, not over an epoch; the schedule chooses steps by it",
                "again",
            )
        self.in_step = True
        self._last = self._newest = step
        if self._first is None:
            self._first = step
        if captured:
            self._captured.add(step)

    def step_without_begin(self) -> None:
        """Warn of a step that ends and has not begun."""
        self._say("on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first")

    def rollout_without_begin(self) -> None:
        """Warn of a rollout that ends and has not begun."""
        self._say(
            "on_rollout_end without on_rollout_begin: the rollout has no begin and is in no timeline; "
            "call on_rollout_begin() before generation"
        )

    def is_left(self) -> None:
        """Record that the loop raised or ended; the next loop may begin with any step."""
        self.in_step, self._newest = False, None

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step that the loop began."""
        return (self._first, self._last) if self._first is not None and self._last is not None else None

    def train_ends(self, schedule: Schedule, resumes: bool) -> list[int]:
        """Warn of scheduled steps that never began; return those that ``schedule.steps`` lists.

        Args:
            schedule: The steps to capture.
            resumes: Whether an earlier run of the same name may have run the steps before this run's first.
        """
        if self.steps is None:
            self._say("training ends and on_step_begin(step) was never called: nothing was captured")
            return []
        ran = "the loop ran from step {} to step {}".format(*self.steps)
        listed = [step for step in schedule.steps or () if step not in self._captured]
        first = self.steps[0] if resumes else None
        never = [step for step in listed if first is None or step >= first]
        if never:
            self._say(f"schedule.steps: {step_list(never)} never came; {ran}")
        elif not self._captured and not listed and schedule.steps != ():
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")
        return never

    def _say(self, text: str, mistake: str = "") -> None:
        if (mistake or text) not in self._said:
            self._said.add(mistake or text)
            logger.warning("%s", text)
