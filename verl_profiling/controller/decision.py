"""Decides at each step's begin whether it is captured, for whom, and how: the one place where that is done.

The schedule, a person and the watch may all want a step. The table of docs/watch.md says who comes first.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def refused(self, trigger: Trigger, why: str) -> None:
        """Note that a capture is not made, whoever asked for it: the limits leave no room, or it failed."""

    def begun(self, trigger: Trigger, folder: str) -> None:
        """Note the name of the step folder of a capture that begins, whoever asked for it."""

    def concluded(self, manifest: Manifest) -> None:
        """Note what became of it."""

    def train_ends(self) -> None:
        """Note that there will be no further step."""


class Ahead(Protocol):
    """Decides a step before it begins, and tells the other ranks of the loop."""

    def look(self, step: int, asked: Callable[[int], Decision | None]) -> None:
        """Decide the steps that come a little after the one that begins."""

    def at(self, step: int) -> Decision | None:
        """Return what was decided on a step."""


class Decisions:
    """Decides at each step's begin.

    Args:
        schedule: The settings' schedule.

    Attributes:
        askers: Who else may ask, the first one first.
        ahead: Decides some steps before, where other ranks have to be told.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._words = schedule.in_words()
        self.askers: list[Asker] = []
        self.ahead: Ahead | None = None

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, if one does.

        Args:
            step: The step.
            goes_on: A capture is open that goes on in it, so that none begins.
        """
        for asker in self.askers:
            asker.step_begins(step)
        if self.ahead is not None:
            self.ahead.look(step, self._asked)
        if goes_on:
            return None
        found = self._schedule.step_range(step)
        asked = self._asked(step) if self.ahead is None else self.ahead.at(step)
        if found is None or (asked is not None and found.action is not Action.RECORD):
            return asked
        trigger = Trigger(reason=self._words)
        if asked is not None:
            reason = f"{self._words}; besides {asked.trigger.in_words()}"
            trigger = msgspec.structs.replace(asked.trigger, kind="schedule", reason=reason)
        return Decision(found, trigger)

    def _asked(self, step: int) -> Decision | None:
        """Return what is asked for at the begin of a step; who comes first, decides."""
        scheduled = self._schedule.action(step) is Action.RECORD
        asked = None
        for asker in self.askers:
            asked = asked or asker.asks(step, scheduled)
        return asked

    def refused(self, trigger: Trigger, why: str) -> None:
        """Tell all who may have asked that a capture is not made."""
        for asker in self.askers:
            asker.refused(trigger, why)

    def begun(self, trigger: Trigger, folder: str) -> None:
        """Tell them that a capture begins, and the name of its folder."""
        for asker in self.askers:
            asker.begun(trigger, folder)

    def concluded(self, manifest: Manifest) -> None:
        """Tell them what became of it."""
        for asker in self.askers:
            asker.concluded(manifest)

    def train_ends(self) -> None:
        """Tell them that there will be no further step."""
        for asker in self.askers:
            asker.train_ends()
