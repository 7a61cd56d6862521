"""Reads the rings of the workers, and waits for none of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from verl_profiling import clock
from verl_profiling.capture.messages import StopReply
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.calls import Call, Postponed, Target, Worker
from verl_profiling.controller.roster import Roster
from verl_profiling.identity import ProcessId
from verl_profiling.step_account import RankUse
from verl_profiling.watch.lane import Lane, StepTime
from verl_profiling.watch.reading import WatchReading

__all__ = ["WatchedWorkers"]

logger = logging.getLogger(__name__)

_READ = "read_watch"
_HANDSHAKES = 32


class WatchedWorkers:
    """Asks the workers for their stages, and keeps what they answered until it is in an account.

    Args:
        roster: The workers.
        stages: How many stages of a worker are kept at most.

    Attributes:
        asked_ns: When it was last begun to ask them; 0 before.
        loop: Lane of the loop's process, if the workers of that process share its ring.
    """

    def __init__(self, roster: Roster, stages: int) -> None:
        self.asked_ns = self._sent_ns = 0
        self.loop: Lane | None = None
        self._to_ask: deque[Target] = deque()
        self._roster = roster
        self._stages = stages
        self._open: list[Call] = []
        self._silent: list[Call] = []
        self._left_out: set[Target] = set()
        self._named: set[Worker] = set()
        self._lanes: dict[ProcessId, Lane] = {}
        self._process: dict[Worker, ProcessId] = {}
        self._handshakes: dict[str, deque[Handshake]] = {}

    def ask(self) -> None:
        """Have all asked for what they keep, but for those that have not answered since they were before."""
        for call in self._open:
            waited_s = (clock.now_ns() - call.sent_ns) / 1e9
            self._name(call, f"has not answered {_READ} for {waited_s:.1f} s; it is not asked until it has")
        self._silent += self._open
        busy = {call.target for call in self._silent}
        self._to_ask = deque(
            target
            for target in self._roster.driven(None)
            if target not in busy and target not in self._left_out
        )
        self._open = []
        self.asked_ns = clock.now_ns()

    def send(self, until_ns: int | None = None) -> None:
        """Call those that are to be asked.

        Args:
            until_ns: CPU time of this thread at which the rest is left for the next time.
        """
        while self._to_ask:
            target = self._to_ask.popleft()
            self._open += self._roster.send([target], _READ, self._told_ns(target))
            self._sent_ns = clock.now_ns()
            if until_ns is not None and time.thread_time_ns() >= until_ns:
                return

    def collect(self, until_ns: int | None = None) -> None:
        """Take the answers that have come.

        Args:
            until_ns: CPU time of this thread at which the rest is left for the next time.
        """
        for calls in (self._open, self._silent):
            for call in tuple(calls):
                if not (call.future.done() or isinstance(call.future, Postponed)):
                    continue
                calls.remove(call)
                if isinstance(call.future, Postponed):
                    call.future.fail(RuntimeError("it is a coroutine, and no event loop runs"))
                if call.without_method:
                    self._left_out.add(call.target)
                self.take(call)
                if until_ns is not None and time.thread_time_ns() >= until_ns:
                    return

    @property
    def has_any(self) -> bool:
        """Whether the loop has workers, read or not."""
        return bool(self._roster.targets)

    @property
    def are_read(self) -> bool:
        """Whether all have been asked and have answered, but for those that are silent for long."""
        return not (self._open or self._to_ask)

    def are_awaited(self, patience_ns: int) -> bool:
        """Return whether some are still to be asked, or may take so long to answer."""
        return bool(self._to_ask) or (bool(self._open) and clock.now_ns() - self._sent_ns < patience_ns)

    @property
    def calls(self) -> list[Call]:
        """The calls whose answers were not taken, but for those of workers that are silent for long."""
        return self._open

    @property
    def known_until_ns(self) -> int:
        """Up to when the stages of all workers are known that are asked, on the clock of the loop."""
        not_asked = self._left_out | {call.target for call in self._silent}
        asked = [target for target in self._roster.driven(None) if target not in not_asked]
        lanes = [self._lane((target, index)) for target in asked for index in range(target.size)]
        return min((lane.until_ns if lane is not None else 0 for lane in lanes), default=clock.now_ns())

    def take(self, call: Call) -> None:
        """Take what a worker answered, or what came along with its answer to something else."""
        reply = call.reply()
        reading = reply.watch if isinstance(reply, StopReply) else reply
        if isinstance(reply, StopReply | WatchReading) and isinstance(reading, WatchReading):
            handshake = Handshake(call.sent_ns, reply.received_ns, reply.replied_ns, call.returned_ns)
            try:
                self._take_reading(call.worker, reading, handshake)
                self._named.discard(call.worker)
            except Exception as error:
                self._name(call, f"cannot be read: {type(error).__name__}: {error}")
        elif call.method == _READ and (reply is not None or call.raised):
            self._name(call, f"is not read: {call.problem(0.0)}")

    def uses(self, steps: Sequence[StepTime]) -> Iterator[list[RankUse | None]]:
        """Yield what each worker did in each step, by role and rank, and forget what was before.

        See :meth:`Lane.uses`.
        """
        now = set(self._process.values())
        for process, lane in sorted(self._lanes.items(), key=lambda item: item[1].order):
            yield lane.uses(steps)
            lane.forget(steps[-1].begin_ns)
            if process not in now and lane.until_ns < steps[0].begin_ns:
                del self._lanes[process]

    def _take_reading(self, worker: Worker, reading: WatchReading, handshake: Handshake) -> None:
        self._roster.known.setdefault(worker, reading.identity)
        process, domain, offset_ns = reading.process, reading.identity.clock_domain, 0
        if domain != clock.domain():
            known = self._handshakes.setdefault(domain, deque(maxlen=_HANDSHAKES))
            known.append(handshake)
            offset_ns = best_handshake(known).offset_ns
        lane = self._lane_of(process)
        if lane is None:
            identity = self._roster.known[worker]
            lane = Lane(identity.lane(), identity.role, identity.rank, self._stages, identity.replica)
            self._lanes[process] = lane
        self._process[worker] = process
        lane.spans.take(reading.ended_spans(offset_ns))
        lane.take(reading.ended(offset_ns), offset_ns, reading.received_ns)

    def _name(self, call: Call, what: str) -> None:
        """Say of a worker, once until it answers, that nothing is known of it."""
        if call.worker in self._named:
            return
        self._named.add(call.worker)
        known = self._roster.known.get(call.worker)
        who = known or f"worker {call.target.first + call.index} of role {call.target.roles[0]}"
        logger.warning("watch: %s %s", who, what)

    def _told_ns(self, target: Target) -> int:
        """Return up to when all of a target's workers have told their stages, each on its own clock."""
        workers: Iterable[Worker] = ((target, index) for index in range(target.size))
        lanes = map(self._lane, workers)
        return min((lane.told_ns if lane is not None else 0 for lane in lanes), default=0)

    def _lane(self, worker: Worker) -> Lane | None:
        process = self._process.get(worker)
        return self._lane_of(process) if process is not None else None

    def _lane_of(self, process: ProcessId) -> Lane | None:
        if self.loop is not None and process == ProcessId.current():
            return self.loop
        return self._lanes.get(process)
