"""Decides at the begin of a step on its capture: whether, requested by whom, and with which
settings.

The schedule, a person and the watch can request a capture; docs/watch.md has their priorities. In a
loop with several ranks, rank 0 decides on requests some steps in advance and announces the
captures. The other ranks check once a second. No rank waits: a rank that is already past the step
counts as failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from functools import partial
from itertools import pairwise
from statistics import median

import msgspec

from verl_profiling.capture.session import process_session
from verl_profiling.capture_request import Trigger
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.person_requests import PersonRequests
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.run import Run
from verl_profiling.controller.spmd import PROBLEMS, Ranks, find_ranks, in_a_line, place_of
from verl_profiling.controller.watch import Watch
from verl_profiling.identity import WorkerIdentity, process_rank
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Decision

logger = logging.getLogger(__name__)

_LEAST_STEPS = 2  # another rank may be in the next step already
_LEAD_S = 2.5  # ranks look for announcements once a second
_STEPS = 9  # of which the median duration is taken


class Decisions:
    """Decides at the begin of each step whether the step is captured.

    Args:
        config: The settings.
        roster: The workers.
        watch: The watch; ``None`` if switched off, together with capture requests.

    Attributes:
        ranks: The ranks of the loop, if it has several.
        complete: Whether the setup before the first step is done.
    """

    def __init__(self, config: ProfilingConfig, roster: Roster, watch: Watch | None) -> None:
        self._config = config
        self._roster = roster
        self._watch = watch
        self._schedule = config.schedule
        self._words = config.schedule.in_words()
        self._requests: PersonRequests | None = None
        self._anomalies: Anomalies | None = None
        self.ranks: Ranks | None = None
        self.complete = watch is None
        self._unreached = ""
        self._agreed: dict[int, Decision] = {}
        self._step: int | None = None
        self._decided = 0
        self._begun_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self, run: Run) -> None:
        """Start to accept capture requests; in a loop with several ranks, only rank 0 does."""
        if self._watch is None or self._requests is not None:
            return
        rank, ranks = place_of(self._config, self._roster.targets)
        check = partial(self._roster.check_request, ranks=ranks if ranks > 1 else None)
        self._requests = PersonRequests(self._schedule, check, _refer_to_rank_0 if rank else None)
        if rank:
            return
        if self._config.watch.trigger is not None:
            self._anomalies = Anomalies(self._config.watch.trigger, check, self._watch.recorders)
            self._watch.listeners.append(self._anomalies.listen)
        try:
            place = run.place.url or run.place.path
            self._watch.log_into(run.path)
            self._requests.open(place)
        except OSError as error:
            logger.warning(
                "the run's folder takes no log of steps and no capture requests: %s", error
            )
        else:
            logger.info("request captures with verl-profiling trigger %s or SIGUSR2", place)

    def find_ranks(self) -> bool:
        """Find the other ranks of the loop, if there are any, for common decisions.

        Returns:
            Whether this process can be captured; else the reason is logged once.
        """
        if self.ranks is None and (self._config.spmd or process_rank() is not None):
            self.ranks, why = find_ranks(self._config, self._roster.targets)
            if why and not self._unreached:
                logger.error("%s", why)
            self._unreached = why
            if self.ranks is not None and self._watch is not None:
                role = next((target.roles[0] for target in self._roster.driven(None)), "controller")
                rank, _ = process_rank() or (0, 1)
                identity = process_session().identity or WorkerIdentity(role=role, rank=rank)
                self._watch.begin_with(self.ranks, identity)
        self.complete = self._watch is None or not self._unreached
        return not self._unreached

    def end(self, ran: list[int]) -> None:
        """Refuse pending capture requests, and accept no new ones until training begins again.

        Args:
            ran: The first and the last step of the loop; empty without steps.
        """
        if self._requests is not None:
            self._requests.end(f"training ended after step {ran[1]}" if ran else "training ended")
        if self._watch is not None and self._anomalies is not None:
            self._watch.listeners.remove(self._anomalies.listen)
        self._requests = self._anomalies = None
        self.complete = self._watch is None

    def leave_ranks(self) -> None:
        """Disconnect from the other ranks of the loop, at the end of training."""
        if self.ranks is not None:
            self.ranks.end()
            self.ranks = None

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, or ``None``.

        Args:
            step: The step.
            goes_on: Whether an open capture also covers this step, so that no other capture begins.
        """
        if self._anomalies is not None:
            self._anomalies.step_begins(step)
        if self.ranks is not None:
            self._agree(self.ranks, step)
        if goes_on:
            return None
        scheduled = self._schedule.step_range(step)
        requested = self._requested(step) if self.ranks is None else self._agreed.pop(step, None)
        if scheduled is None:
            return requested
        if requested is None:
            return Decision(scheduled, Trigger(reason=self._words))
        if requested.selection or scheduled.action is not Action.RECORD:
            return requested
        reason = f"{self._words}; besides {requested.trigger.in_words()}"
        trigger = msgspec.structs.replace(requested.trigger, kind="schedule", reason=reason)
        return Decision(scheduled, trigger)

    def refused(self, trigger: Trigger, why: str) -> None:
        """Report a refused capture to its requester: the limits leave no room,
        or the capture failed.
        """
        if self._requests is not None and trigger.request:
            self._requests.refuse(trigger.request, trigger.by, why)

    def concluded(self, manifest: Manifest) -> None:
        """Record that a capture has ended: the cooldown of the watch begins."""
        if self._anomalies is not None:
            self._anomalies.concluded(manifest)

    def _requested(self, step: int) -> Decision | None:
        """Return the requested capture of a step, or ``None``;
        a person's request precedes the watch's.
        """
        scheduled = self._schedule.action(step) is Action.RECORD
        for source in (self._requests, self._anomalies):
            if source is not None and (decision := source.asks(step, scheduled)):
                return decision
        return None

    def _agree(self, ranks: Ranks, step: int) -> None:
        """Announce requested captures of later steps (rank 0),
        or receive announcements (other ranks).
        """
        if ranks.leads:
            self._look_ahead(ranks, step)
        self._agreed |= {decision.step_range.first: decision for decision in ranks.announced()}
        for missed in [agreed for agreed in self._agreed if agreed < step]:
            decision = self._agreed.pop(missed)
            if ranks.leads:
                self.refused(
                    decision.trigger, f"step {missed} never came, or was part of another capture"
                )
                continue
            logger.warning(
                "rank %d was past step %d when rank 0's capture request arrived; this rank "
                "is not captured",
                ranks.rank,
                missed,
            )

    def _look_ahead(self, ranks: Ranks, step: int) -> None:
        """Decide on captures of later steps, early enough for the announcement
        to reach every rank.
        """
        self._begun_s.append(time.monotonic())
        if self._step is None or step < self._step:  # the loop restarted its step numbers
            self._decided = step
        self._step = step
        times_s = [end_s - begin_s for begin_s, end_s in pairwise(self._begun_s)]
        usual_s = max(median(times_s or [_LEAD_S]), 0.001)
        last = step + _LEAST_STEPS + math.ceil(_LEAD_S / usual_s)
        for first in range(max(step + _LEAST_STEPS, self._decided + 1), last + 1):
            if first > self._decided and first not in self._agreed:
                self._decide(ranks, first)
            self._decided = max(self._decided, first)

    def _decide(self, ranks: Ranks, step: int) -> None:
        """Announce the requested capture of a later step, if there is one."""
        decision = self._requested(step)
        if decision is None:
            return
        try:
            ranks.announce(decision)
            self._agreed[step] = decision
        except PROBLEMS as error:
            why = f"step {step} cannot be announced to the other ranks: {in_a_line(error)}"
            self.refused(decision.trigger, why)
        self._decided = decision.step_range.last


def _refer_to_rank_0(*_: object) -> None:
    logger.warning("SIGUSR2: rank 0 decides on captures; send the signal to its process")
