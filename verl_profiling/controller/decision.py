"""Decides at each step's begin whether it is captured, for whom, and how: the one place where that is done.

The schedule, a person and the watch may all want a step. The table of docs/watch.md says who comes first.
Where a loop has several ranks, rank 0 decides what is asked for some steps before, and tells the others, who
look once a second. Nobody waits for that: a rank that is past the step is a failed entry of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec

from verl_profiling.aim import Aim
from verl_profiling.controller.spmd import PROBLEMS, Announced, Ranks, in_a_line
from verl_profiling.manifest import Manifest
from verl_profiling.settings.schedule import Action, Schedule, StepRange
from verl_profiling.trigger import Trigger

__all__ = ["Asker", "Decision", "Decisions"]

logger = logging.getLogger(__name__)

_LEAST_STEPS = 2
_LEAD_S = 2.5
_STEP_TIMES = 8


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

    def concluded(self, manifest: Manifest) -> None:
        """Note what became of a capture."""

    def train_ends(self) -> None:
        """Note that there will be no further step."""


class Decisions:
    """Decides at each step's begin.

    Args:
        schedule: The settings' schedule.

    Attributes:
        askers: Who else may ask, the first one first.
        ranks: The ranks of the loop, if it has several.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._words = schedule.in_words()
        self.askers: list[Asker] = []
        self.ranks: Ranks | None = None
        self._agreed: dict[int, Decision] = {}
        self._step: int | None = None
        self._decided = 0
        self._begun_s = 0.0
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, if one does.

        Args:
            step: The step.
            goes_on: A capture is open that goes on in it, so that none begins.
        """
        for asker in self.askers:
            asker.step_begins(step)
        if self.ranks is not None:
            self._agree(self.ranks, step)
        if goes_on:
            return None
        found = self._schedule.step_range(step)
        asked = self._asked(step) if self.ranks is None else self._agreed.pop(step, None)
        if found is None or (asked is not None and found.action is not Action.RECORD):
            return asked
        trigger = Trigger(reason=self._words)
        if asked is not None:
            reason = f"{self._words}; besides {asked.trigger.in_words()}"
            trigger = msgspec.structs.replace(asked.trigger, kind="schedule", reason=reason)
        return Decision(found, trigger)

    def refused(self, trigger: Trigger, why: str) -> None:
        """Tell all who may have asked that a capture is not made."""
        for asker in self.askers:
            asker.refused(trigger, why)

    def concluded(self, manifest: Manifest) -> None:
        """Tell them what became of it."""
        for asker in self.askers:
            asker.concluded(manifest)

    def train_ends(self) -> None:
        """Tell them that there will be no further step."""
        for asker in self.askers:
            asker.train_ends()

    def _asked(self, step: int) -> Decision | None:
        """Return what is asked for at the begin of a step; who comes first, decides."""
        scheduled = self._schedule.action(step) is Action.RECORD
        asked = None
        for asker in self.askers:
            asked = asked or asker.asks(step, scheduled)
        return asked

    def _agree(self, ranks: Ranks, step: int) -> None:
        """Announce the steps to come that are asked for, or take what rank 0 has announced."""
        if ranks.leads:
            self._look_ahead(ranks, step)
        for request in ranks.announced():
            trigger = Trigger(kind="demand", reason="rank 0 announced it")  # its manifest says who asked
            decision = Decision(StepRange(request.first, request.last), trigger, request.aim)
            self._agreed[request.first] = decision
        for missed in [one for one in self._agreed if one < step]:
            why = f"step {missed} never came, or was part of another capture"
            self.refused(self._agreed.pop(missed).trigger, why)
            if not ranks.leads:
                logger.warning(
                    "rank %d was past step %d when rank 0's request for it arrived; it is not captured here",
                    *(ranks.rank, missed),
                )

    def _look_ahead(self, ranks: Ranks, step: int) -> None:
        """Decide the steps that are far enough away for all ranks to have looked."""
        now_s = time.monotonic()
        if self._begun_s:
            self._step_times.append(now_s - self._begun_s)
        self._begun_s = now_s
        if self._step is None or step < self._step:  # the loop counts anew
            self._decided = step
        self._step = step
        shortest_s = max(min(self._step_times, default=_LEAD_S), 0.001)
        last = step + _LEAST_STEPS + math.ceil(_LEAD_S / shortest_s)
        for first in range(max(step + _LEAST_STEPS, self._decided + 1), last + 1):
            if first > self._decided and first not in self._agreed and (decision := self._asked(first)):
                self._announce(ranks, first, decision)
                self._decided = decision.step_range.last
            self._decided = max(self._decided, first)

    def _announce(self, ranks: Ranks, first: int, decision: Decision) -> None:
        try:
            ranks.announce(Announced(first, decision.step_range.last, decision.aim))
        except PROBLEMS as error:
            why = f"the other ranks cannot be told of step {first}: {in_a_line(error)}"
            self.refused(decision.trigger, why)
        else:
            self._agreed[first] = decision
