"""Decides when a step begins whether it is captured, who requested it, and how; no other module decides this.

The schedule, a person and the watch may all request a step; docs/watch.md has a table of priorities.
In a loop with several ranks, rank 0 decides on requests some steps in advance and announces the captures.
The other ranks check once a second. No rank waits: one that is already past the step counts as failed.

:class:`LoopOrder` checks in every step the order in which the loop calls the hooks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from functools import partial
from itertools import pairwise

import msgspec

from verl_profiling.capture.session import process_session
from verl_profiling.capture_request import Trigger
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.requests import Decision, Requests
from verl_profiling.controller.spmd import PROBLEMS, Ranks, find_ranks, in_a_line, place_of
from verl_profiling.controller.step_folder import StepFolders
from verl_profiling.controller.targets import Roster
from verl_profiling.controller.watch import Watch
from verl_profiling.identity import WorkerIdentity, process_rank
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)

_LEAST_STEPS = 2
_LEAD_S = 2.5
_STEPS = 9


class Decisions:
    """Decides when a step begins whether it is captured.

    Args:
        config: The settings.
        roster: The workers.
        watch: The watch; ``None`` if it is off, which also disables capture requests.

    Attributes:
        ranks: The ranks of the loop, if it has several.
        complete: Whether the setup before the first step is done.
    """

    def __init__(self, config: ProfilingConfig, roster: Roster, watch: Watch | None) -> None:
        self._config, self._roster, self._watch = config, roster, watch
        self._schedule = config.schedule
        self._words = config.schedule.in_words()
        self._requests: Requests | None = None
        self._anomalies: Anomalies | None = None
        self.ranks: Ranks | None = None
        self.complete = watch is None
        self._unreached = ""
        self._agreed: dict[int, Decision] = {}
        self._step: int | None = None
        self._decided = 0
        self._begun_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self, folders: StepFolders) -> None:
        """Start to accept capture requests; in a loop with several ranks, only rank 0 does."""
        if self._watch is None or self._requests is not None:
            return
        rank, ranks = place_of(self._config, self._roster.targets)
        check = partial(self._roster.check_request, ranks=ranks if ranks > 1 else None)
        self._requests = Requests(self._schedule, check, _refer_to_rank_0 if rank else None)
        self._requests.handle_signal()
        if rank:
            return
        if self._config.watch.trigger is not None:
            self._anomalies = Anomalies(self._config.watch.trigger, check, self._watch.recorders)
            self._watch.listeners.append(self._anomalies.listen)
        try:
            run = folders.run
            place = run.url or run.place.path
            self._watch.log_into(run.path)
            self._requests.open(place)
        except OSError as error:
            logger.warning("steps are not logged, nor captures asked for, in the run's folder: %s", error)
        else:
            logger.info("captures are asked for with verl-profiling trigger %s or SIGUSR2", place)

    def find_ranks(self) -> bool:
        """Find the other ranks of the loop, if it has any, to decide together with them.

        Returns:
            Whether this process can be captured; if not, the reason is logged once.
        """
        if self.ranks is None and (self._config.spmd or process_rank() is not None):
            self.ranks, why = find_ranks(self._config, self._roster.targets)
            if why and not self._unreached:
                logger.error("%s", why)
            self._unreached = why
            if self.ranks is not None and self._watch is not None:
                self._watch.begin_with(self.ranks, self._who_is_here())
        self.complete = self._watch is None or not self._unreached
        return not self._unreached

    def _who_is_here(self) -> WorkerIdentity:
        """Return this rank's identity in manifests: its worker's, else one of its role and rank."""
        role = next((target.roles[0] for target in self._roster.driven(None)), "controller")
        own = WorkerIdentity(role=role, rank=(process_rank() or (0, 1))[0])
        return process_session().identity or own

    def end(self, ran: tuple[int, int] | None) -> None:
        """Refuse pending capture requests, and accept no new ones until training begins again.

        Args:
            ran: The first and the last step that the loop began.
        """
        if self._requests is not None:
            self._requests.end(f"training ended after step {ran[1]}" if ran else "training ended")
        if self._watch is not None and self._anomalies is not None:
            self._watch.listeners.remove(self._anomalies.listen)
        self._requests = self._anomalies = None
        self.complete = self._watch is None

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, or ``None``.

        Args:
            step: The step.
            goes_on: Whether an open capture also covers this step, so that no other begins.
        """
        if self._anomalies is not None:
            self._anomalies.step_begins(step)
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
        """Report to the requester that a capture is not made: the limits leave no room, or it failed."""
        if self._requests is not None:
            self._requests.refused(trigger, why)

    def concluded(self, manifest: Manifest) -> None:
        """Record that a capture has ended: the cooldown of the watch begins."""
        if self._anomalies is not None:
            self._anomalies.concluded(manifest)

    def _asked(self, step: int) -> Decision | None:
        """Return the requested capture of a step, or ``None``; a person's request precedes the watch's."""
        scheduled = self._schedule.action(step) is Action.RECORD
        asked = self._requests.asks(step, scheduled) if self._requests is not None else None
        if asked is None and self._anomalies is not None:
            asked = self._anomalies.asks(step, scheduled)
        return asked

    def _agree(self, ranks: Ranks, step: int) -> None:
        """Announce requested captures of later steps (rank 0), or receive announcements (other ranks)."""
        if ranks.leads:
            self._look_ahead(ranks, step)
        self._agreed |= {decision.step_range.first: decision for decision in ranks.announced()}
        for missed in [one for one in self._agreed if one < step]:
            why = f"step {missed} never came, or was part of another capture"
            self.refused(self._agreed.pop(missed).trigger, why)
            if not ranks.leads:
                logger.warning(
                    "rank %d was past step %d when rank 0's request for it arrived; it is not captured here",
                    *(ranks.rank, missed),
                )

    def _look_ahead(self, ranks: Ranks, step: int) -> None:
        """Decide on later steps; every rank has time to receive the announcement before they begin."""
        self._begun_s.append(time.monotonic())
        if self._step is None or step < self._step:  # the loop restarted its step numbers
            self._decided = step
        self._step = step
        times_s = [end_s - begin_s for begin_s, end_s in pairwise(self._begun_s)]
        shortest_s = max(min(times_s, default=_LEAD_S), 0.001)
        last = step + _LEAST_STEPS + math.ceil(_LEAD_S / shortest_s)
        for first in range(max(step + _LEAST_STEPS, self._decided + 1), last + 1):
            if first > self._decided and first not in self._agreed and (decision := self._asked(first)):
                try:
                    ranks.announce(decision)
                    self._agreed[first] = decision
                except PROBLEMS as error:
                    why = f"the other ranks cannot be told of step {first}: {in_a_line(error)}"
                    self.refused(decision.trigger, why)
                self._decided = decision.step_range.last
            self._decided = max(self._decided, first)


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


def _refer_to_rank_0() -> None:
    logger.warning("SIGUSR2: this rank follows rank 0, whose process is to be asked")
