"""Decides at each step's begin whether it is captured, for whom, and how: the one place where that is done.

The schedule, a person and the watch may all want a step. The table of docs/watch.md says who comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from verl_profiling.aim import Aim
from verl_profiling.manifest import Manifest
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

    def step_begins(self, step: int) -> None:
        """Note that a step begins, in which an open capture may go on."""

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture that is asked for at the begin of a step, if there is one.

        Args:
            step: The step.
            scheduled: The schedule records it, in its own way; what is returned joins that.
        """

    def refused(self, decision: Decision, why: str) -> None:
        """Note that the capture is not made: the limits leave no room for it."""

    def begun(self, folder: str) -> None:
        """Note the name of the step folder of a capture that begins, whoever asked for it."""

    def concluded(self, manifest: Manifest) -> None:
        """Note what became of it."""

    def train_ends(self) -> None:
        """Note that there will be no further step."""


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

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, if one does.

        Args:
            step: The step.
            goes_on: A capture is open that goes on in it, so that none begins.
        """
        for asker in self.askers:
            asker.step_begins(step)
        if goes_on:
            return None
        found = self._schedule.step_range(step)
        scheduled = found is not None and found.action is Action.RECORD
        asked = None
        for asker in self.askers:
            asked = asked or asker.asks(step, scheduled)
        if found is None or (asked is not None and not scheduled):
            return asked
        trigger = Trigger(reason=self._words)
        if asked is not None:
            reason = f"{self._words}; besides {asked.trigger.reason}"
            trigger = msgspec.structs.replace(asked.trigger, kind="schedule", reason=reason)
        return Decision(found, trigger)

    def refused(self, decision: Decision, why: str) -> None:
        """Tell all who may have asked that a capture is not made."""
        for asker in self.askers:
            asker.refused(decision, why)

    def begun(self, folder: str) -> None:
        """Tell them that a capture begins, and the name of its folder."""
        for asker in self.askers:
            asker.begun(folder)

    def concluded(self, manifest: Manifest) -> None:
        """Tell them what became of it."""
        for asker in self.askers:
            asker.concluded(manifest)

    def train_ends(self) -> None:
        """Tell them that there will be no further step."""
        for asker in self.askers:
            asker.train_ends()
