"""The order in which a loop calls the hooks, and the steps that it ran."""

from __future__ import annotations

import logging
from weakref import WeakSet

from verl_profiling.settings.schedule import Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)


class LoopOrder:
    """Tracks the steps and rollouts that the loop has begun and ended.

    Attributes:
        in_step: Whether a step has begun and not ended.
        in_rollout: Whether generation has begun and not ended.
        runs: Whether the loop has begun, and has not ended.
        is_shared: Whether another callback's loop began in this step; if the step then ends, both
            loops run.
        steps: The first and the last step that the loop began; empty before the first one.
    """

    def __init__(self) -> None:
        self.runs = False
        self.steps: list[int] = []
        self.in_step = False
        self.in_rollout = False
        self.is_shared = False
        self._newest: int | None = None
        self._rises = True
        self._captured: set[int] = set()
        self._said: set[str] = set()

    def begin(self, step: int, schedule: Schedule, last_step: int | None) -> None:
        """Record the begin of the loop; warn of a first step after the end of the schedule.

        Args:
            step: The first step.
            schedule: The steps to capture.
            last_step: The last step that may be captured, if there is one.
        """
        self.runs = True
        for other in _running:
            other.is_shared = other.in_step
        _running.add(self)
        # Listed steps are logged at the end.
        if schedule.steps is None and last_step is not None and step > last_step:
            logger.warning(
                "the loop begins with step %d, and the schedule ends with step %d (%s): nothing "
                "is captured; steps count from the first start of a resumed run",
                step,
                last_step,
                schedule.in_words(),
            )

    def end(self) -> None:
        """Record the end of training."""
        self.runs = False
        _running.discard(self)
        self.is_left()

    def step_begins(self, step: int, captured: bool) -> None:
        """Record the begin of a step; warn if the last step has not ended,
        or the number does not rise.
        """
        if self.in_step:
            self._say(
                "step %d begins and step %s has not ended: call on_step_end() last in every step, "
                "or on_exception(error) where it raised",
                step,
                self._newest,
            )
        if self._rises and self._newest is not None and step <= self._newest:
            self._rises = False
            logger.warning(
                "step %d begins after step %d: pass on_step_begin(step) a number that rises over "
                "the whole training, not over an epoch; the schedule chooses steps by it",
                step,
                self._newest,
            )
        self._newest = step
        self.in_step = True
        self.is_shared = False
        if self.steps:
            self.steps[1] = step
        else:
            self.steps = [step, step]
        if captured:
            self._captured.add(step)

    def step_ends(self) -> None:
        """Record the end of a step; warn of one without a begin,
        and of one in which another loop began.
        """
        if not self.in_step:
            self._say(
                "on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first"
            )
        elif self.is_shared:
            self._say(
                "two callbacks of this process are in a step at the same time, and a process is "
                "recorded by one: call the hooks of one callback only"
            )
        self.in_step = False

    def rollout_without_begin(self) -> None:
        """Warn of the end of a rollout without a begin."""
        self._say(
            "on_rollout_end without on_rollout_begin: the rollout has no begin and is in no "
            "timeline; call on_rollout_begin() before generation"
        )

    def is_left(self) -> None:
        """Record that the loop raised or ended; the next loop may begin with any step."""
        self.in_step = False
        self._newest = None

    def train_ends(self, schedule: Schedule, resumes: bool) -> list[int]:
        """Warn of scheduled steps that never began; return those in ``schedule.steps``.

        Args:
            schedule: The steps to capture.
            resumes: Whether an earlier run of the same name may have run the steps before this
                run's first step.
        """
        if not self.steps:
            self._say(
                "training ends and on_step_begin(step) was never called: nothing was captured"
            )
            return []
        ran = "the loop ran from step {} to step {}".format(*self.steps)
        listed = [step for step in schedule.steps or () if step not in self._captured]
        never = [step for step in listed if not resumes or step >= self.steps[0]]
        if never:
            self._say(f"schedule.steps: {step_list(never)} never came; {ran}")
        elif not self._captured and not listed and schedule.steps != ():
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")
        return never

    def _say(self, text: str, *arguments: object) -> None:
        """Log a warning, once for each text."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *arguments)


_running: WeakSet[LoopOrder] = WeakSet()
"""The loops of this process that have begun, and have not ended."""
