"""Captures asked for in a loop of several ranks: rank 0 decides some steps before, and tells the others.

Nobody waits for that. The other ranks look once a second, so rank 0 decides on steps that begin some seconds
later; a rank that has not heard in time is a failed entry of that step, like one that does not answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from verl_profiling.controller.decision import Decision
from verl_profiling.controller.spmd import PROBLEMS, Announced, Ranks, in_a_line
from verl_profiling.manifest import Manifest
from verl_profiling.settings.schedule import StepRange
from verl_profiling.trigger import Trigger

__all__ = ["AnnouncedByRank0", "Announcing"]

logger = logging.getLogger(__name__)

_LEAST_STEPS = 2
_NOTICE_S = 2.5
_STEP_TIMES = 8


class Announcing:
    """Rank 0's side: decides steps before they begin.

    Args:
        peers: The other ranks.
        lost: Called with who asked for a capture that is not made after all, and why.
    """

    def __init__(self, peers: Ranks, lost: Callable[[Trigger, str], None]) -> None:
        self._peers = peers
        self._lost = lost
        self._step: int | None = None
        self._decided = 0
        self._later: dict[int, Decision] = {}
        self._begun_s = 0.0
        self._step_times: deque[float] = deque(maxlen=_STEP_TIMES)

    def look(self, step: int, asked: Callable[[int], Decision | None]) -> None:
        """Decide the steps that are far enough away, and announce what is captured of them."""
        now_s = time.monotonic()
        if self._begun_s:
            self._step_times.append(now_s - self._begun_s)
        self._begun_s = now_s
        for missed in [one for one in self._later if one < step]:
            why = f"step {missed} never came, or was part of another capture"
            self._lost(self._later.pop(missed).trigger, why)
        if self._step is None or step < self._step:  # the loop counts anew
            self._decided = step
        self._step = step
        first = max(step + _LEAST_STEPS, self._decided + 1)
        last = step + self._notice()
        while first <= last:
            if first not in self._later and (decision := asked(first)) is not None:
                self._announce(first, decision)
                first = decision.step_range.last
            self._decided = first
            first += 1

    def at(self, step: int) -> Decision | None:
        """Return what was decided on a step."""
        return self._later.pop(step, None)

    def _announce(self, first: int, decision: Decision) -> None:
        try:
            self._peers.announce(Announced(first, decision.step_range.last, decision.aim))
        except PROBLEMS as error:
            self._lost(
                decision.trigger, f"the other ranks cannot be told of step {first}: {in_a_line(error)}"
            )
        else:
            self._later[first] = decision

    def _notice(self) -> int:
        """Return how many steps before a capture the others have to be told, so that all have looked."""
        shortest_s = min(self._step_times, default=_NOTICE_S)
        return _LEAST_STEPS + math.ceil(_NOTICE_S / max(shortest_s, 0.001))


class AnnouncedByRank0:
    """The side of the other ranks: asks for what rank 0 has announced.

    Args:
        peers: Rank 0.
    """

    def __init__(self, peers: Ranks) -> None:
        self._peers = peers
        self._requests: dict[int, Announced] = {}

    def step_begins(self, step: int) -> None:
        """Take what was announced since, and forget what did not come."""
        for request in self._peers.announced():
            self._requests[request.first] = request
            if request.first < step:
                logger.warning(
                    "rank %d was past step %d when rank 0's request for it arrived; it is not captured here",
                    *(self._peers.rank, request.first),
                )
        if self._requests:
            self._requests = {first: one for first, one in self._requests.items() if first >= step}

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """See :class:`~verl_profiling.controller.decision.Asker`; rank 0's manifest says who asked."""
        request = self._requests.get(step)
        if request is None or scheduled:
            return None
        trigger = Trigger(kind="demand", reason="rank 0 announced it")
        return Decision(StepRange(request.first, request.last), trigger, request.aim)

    def begun(self, trigger: Trigger, folder: str) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""

    def refused(self, trigger: Trigger, why: str) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""

    def concluded(self, manifest: Manifest) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""

    def train_ends(self) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""
