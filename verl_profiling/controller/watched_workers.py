"""Reads the stages of the watched workers, and leaves out those that do not answer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait

from verl_profiling import clock
from verl_profiling.capture.protocol import NOT_SET_UP
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.worker_calls import Call, Postponed, Target, Worker, WorkerLostError
from verl_profiling.files.step_summary import Period, RankUse, StepSummary
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.watch.process_recorder import note_death
from verl_profiling.watch.process_sums import (
    WatchQuestion,
    WatchReading,
)

logger = logging.getLogger(__name__)

_Uses = dict[ProcessId, tuple[WorkerIdentity, list[RankUse | None]]]
"""The replies of processes: the worker, and its stages in each step."""

_HANDSHAKES = 32  # the latest ones, as clocks drift; the shortest counts
_LONGEST_WAIT_S = 1.0  # of one wait for replies: the end of training shortens the time that is left
_SWITCHED_OFF = (
    "is not read: the settings passed to its init_capture switch it or its watch off; pass the "
    "same settings as the callback's"
)
_RESTART_PAUSE_S = 0.2  # Ray restarts the actor meanwhile


class WatchedWorkers:
    """The workers of a watched loop. A worker with an unanswered call is not called again.

    Args:
        roster: The workers.

    Attributes:
        alone: Whether this process runs the loop alone. Otherwise its own reply is ignored.
    """

    def __init__(self, roster: Roster) -> None:
        self.alone = True
        self._roster = roster
        self._late: list[Call] = []
        self._said: set[Worker | str] = set()
        self._handshakes: dict[str, deque[Handshake]] = {}

    def read(
        self,
        steps: Sequence[StepSummary],
        collectives: bool,
        reports: tuple[str, float] | None,
        left_s: Callable[[], float],
    ) -> None:
        """Read all workers into the steps; log late workers once, and leave them out.

        Args:
            steps: Summaries of the steps, which get the workers' stages.
            collectives: Whether the collectives that the workers entered are requested, too.
            reports: ``HangWatch.told``, for processes that were started again.
            left_s: Returns the remaining seconds to wait for replies.
        """
        times = times_of(steps)
        uses: _Uses = {}
        self._late = [call for call in self._late if not call.future.done()]
        targets = {*self._roster.driven(None)}
        while (targets := targets - {call.target for call in self._late}) and left_s() > 0:
            question = WatchQuestion(
                steps=times,
                offsets_ns=self._offsets_ns(),
                collectives=collectives,
                hangs=reports,
                has_start=steps[0].is_start_up,
            )
            calls = [call for target in targets for call in target.call("read_watch", question)]
            self._wait(calls, left_s)
            unread = [call for call in calls if not self._take(call, times, uses)]
            targets = {call.target for call in unread}
            if any(call.error is not None for call in unread):
                time.sleep(_RESTART_PAUSE_S)
        ordered = sorted(uses.values(), key=_order_of)
        by_step = zip(*[of_steps for _, of_steps in ordered], strict=True)
        for step, workers in zip(steps, by_step, strict=False):  # without a reply there is none
            step.workers = [*filter(None, workers)]

    def _offsets_ns(self) -> dict[str, int]:
        offsets_ns = {clock.domain(): 0}
        for domain, handshakes in self._handshakes.items():
            offsets_ns[domain] = best_handshake(handshakes).offset_ns
        return offsets_ns

    def _wait(self, calls: Sequence[Call], left_s: Callable[[], float]) -> None:
        for call in calls:
            if isinstance(call.future, Postponed):
                call.future.fail(RuntimeError("read_watch is a coroutine, and no event loop runs"))
        futures = [call.future for call in calls]
        while wait(futures, max(0.0, min(left_s(), _LONGEST_WAIT_S))).not_done and left_s() > 0:
            pass
        late = [call for call in calls if not call.future.done()]
        for call in late:
            waited_s = (clock.now_ns() - call.sent_ns) / 1e9
            self._say(
                call,
                f"has not replied to read_watch for {waited_s:.1f} s; read again after the reply",
            )
        self._late += late

    def _take(self, call: Call, times: Sequence[object], uses: _Uses) -> bool:
        """Add a reply, if any; return ``False`` if the worker has to be called again.

        The reason is that Ray restarts it, or that its clock offset was unknown.
        """
        reading = call.reply()
        if not isinstance(reading, WatchReading):
            if call.error is not None and "ActorUnavailableError" in call.problem():
                return False  # Ray restarts it
            if isinstance(call.error, WorkerLostError) and call.error.pid:
                note_death(call.worker.identity.lane(), call.error.pid, call.error.at_ns)
            if reading is not None or call.error is not None:
                self._say(call, f"is not read: {call.problem()}")
            elif call.future.done() and self._has_stages(call.target):
                self._say(call, _SWITCHED_OFF)
            return True
        try:
            self._measure(call, reading)
            if reading.steps is None:
                return False
            if not call.worker.identity.pid:
                call.worker.identity = reading.identity
            of_steps = reading.uses()
            if len(of_steps) != len(times):
                raise ValueError(f"the reply has {len(of_steps)} steps instead of {len(times)}")
            if self.alone or reading.process != ProcessId.current():
                uses.setdefault(reading.process, (reading.identity, of_steps))
            self._said.discard(call.worker)
        except Exception as error:
            self._say(call, f"cannot be read: {type(error).__name__}: {error}")
        return True

    def _has_stages(self, target: Target) -> bool:
        """Return whether a worker should have stages: its role is on, and it is no engine node."""
        return not target.is_rollout and self._roster.config.for_role(target.roles[0]).enable

    def _measure(self, call: Call, reading: WatchReading) -> None:
        domain = reading.identity.clock_domain
        if domain != clock.domain():
            handshake = Handshake(
                call.sent_ns, reading.received_ns, reading.replied_ns, call.returned_ns
            )
            self._handshakes.setdefault(domain, deque(maxlen=_HANDSHAKES)).append(handshake)

    def _say(self, call: Call, what: str) -> None:
        """Log a problem of a worker once, and again only after a good reply.

        A mistake in the set-up is logged for the first worker of a role: their code is the same.
        """
        who: Worker | str = call.worker
        if NOT_SET_UP in what or what == _SWITCHED_OFF:
            who = call.target.roles[0]
            what = f"{what}; until then the log has no stage of role {who}"
        if who in self._said:
            return
        self._said.add(who)
        logger.warning("watch: %s %s", call.worker.identity, what)


def times_of(steps: Iterable[StepSummary]) -> list[Period]:
    """Return begin and end of each step."""
    return [(step.begin_ns, step.end_ns) for step in steps]


def _order_of(use: tuple[WorkerIdentity, object]) -> tuple[str, int, int]:
    identity, _ = use
    return identity.role, identity.rank, identity.replica or 0
