"""Decides at each step's begin whether it is captured, for whom, and how: the one place where that is done.

The schedule, a person and the watch may all want a step. The table of docs/watch.md says who comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_profiling.aim import Aim
from verl_profiling.settings.schedule import Action, Schedule, StepRange
from verl_profiling.trigger import Trigger

__all__ = ["Asker", "Decision", "Decisions"]


@dataclass(frozen=True)
class Decision:
    """A capture that begins now.

    Attributes:
        step_range: The steps that it covers.
        trigger: Who asked for it, and why.
        aim: What it does differently from the settings.
    """

    step_range: StepRange
    trigger: Trigger
    aim: Aim | None = None


class Asker(Protocol):
    """Somebody who may ask for a capture while the run goes on."""

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture that is asked for at the begin of a step, if there is one.

        Args:
            step: The step.
            scheduled: The schedule records it anyway; what is asked for joins that, and is not returned.
        """

    def refused(self, decision: Decision, why: str) -> None:
        """Note that a capture was asked for, and is not made."""


class Decisions:
    """Decides at each step's begin.

    Args:
        schedule: The settings' schedule.

    Attributes:
        askers: Who else may ask, the first one first.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._words = schedule.in_words()
        self.askers: list[Asker] = []

    def at(self, step: int) -> Decision | None:
        """Return the capture that begins with a step, if one does."""
        found = self._schedule.step_range(step)
        scheduled = found is not None and found.action is Action.RECORD
        asked = None
        for asker in self.askers:
            asked = asked or asker.asks(step, scheduled)
        if found is None or (asked is not None and not scheduled):
            return asked
        return Decision(found, Trigger(reason=self._words))

    def refused(self, decision: Decision, why: str) -> None:
        """Tell who asked that a capture is not made: the limits leave no room for it."""
        for asker in self.askers:
            asker.refused(decision, why)
