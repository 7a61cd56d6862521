"""Reads the workers' stages of ended steps, on the watch's thread; a late reply counts for its steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

from verl_profiling import clock
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.targets import Call, Postponed, Roster, Target, Worker
from verl_profiling.identity import ProcessId
from verl_profiling.step_summary import RankUse
from verl_profiling.watch.reading import WatchQuestion, WatchReading

logger = logging.getLogger(__name__)

_HANDSHAKES = 32


@dataclass(eq=False)
class PendingStep:
    """A step whose summary is not made yet; its times are on the loop's clock.

    Attributes:
        step: Its number.
        begin_ns: When it began.
        end_ns: When it ended; 0 until then.
        policy_version: Version of the weights that it began with, if the loop reports it.
        captured: Name of its step folder, if it is captured.
        workers: The stages of each process that has replied.
        lacks: Workers whose reply is missing.
        since_s: When the wait for replies began, on the monotonic clock.
    """

    step: int
    begin_ns: int
    end_ns: int = 0
    policy_version: int | None = None
    captured: str = ""
    workers: dict[ProcessId, RankUse] = field(default_factory=dict)
    lacks: set[Target] = field(default_factory=set)
    since_s: float = 0.0


class WatchedWorkers:
    """The workers of a watched loop, and the calls that they have not answered yet.

    Args:
        roster: The workers.

    Attributes:
        alone: Whether this process runs the loop alone; one of several ranks ignores its own reply.
    """

    def __init__(self, roster: Roster) -> None:
        self.alone = True
        self._roster = roster
        self._open: list[tuple[Call, list[PendingStep]]] = []
        self._late: set[Target] = set()
        self._without: set[Target] = set()
        self._said: set[Worker] = set()
        self._handshakes: dict[str, deque[Handshake]] = {}

    @property
    def has_any(self) -> bool:
        """Whether the loop has workers."""
        return bool(self._roster.targets)

    @property
    def are_asked(self) -> bool:
        """Whether a call is unanswered."""
        return bool(self._open)

    def expected(self) -> set[Target]:
        """Return the workers to wait for: all but late ones and those without ``read_watch``."""
        return {*self._roster.driven(None)} - self._late - self._without

    def ask(self, steps: Sequence[PendingStep], collectives: bool) -> None:
        """Call the workers whose reply is missing, unless they have an unanswered call.

        Args:
            steps: The steps.
            collectives: Whether the collectives that they entered are requested, too.
        """
        busy = {call.target for call, _ in self._open}
        offsets_ns = {domain: best_handshake(known).offset_ns for domain, known in self._handshakes.items()}
        offsets_ns[clock.domain()] = 0
        for target in dict.fromkeys(target for step in steps for target in step.lacks):
            if target not in busy:
                asked = [step for step in steps if target in step.lacks]
                times = [(step.begin_ns, step.end_ns) for step in asked]
                question = WatchQuestion(steps=times, offsets_ns=offsets_ns, collectives=collectives)
                self._open += [(call, asked) for call in target.call("read_watch", question)]

    def wait(self, timeout_s: float) -> None:
        """Wait for replies, and add them to their steps."""
        wait([call.future for call, _ in self._open if not isinstance(call.future, Postponed)], timeout_s)
        still_open, answered = [], set()
        for call, asked in self._open:
            if isinstance(call.future, Postponed):
                call.future.fail(RuntimeError("it is a coroutine, and no event loop runs"))
            if not call.future.done():
                still_open.append((call, asked))
                continue
            answered.add(call.target)
            if self._take(call, asked):
                for step in asked:
                    step.lacks.discard(call.target)
        self._open = still_open
        for call, asked in still_open:  # a group is complete with its last reply
            if call.target in answered:
                for step in asked:
                    step.lacks.add(call.target)
        self._late -= answered - {call.target for call, _ in still_open}

    def give_up(self, steps: Sequence[PendingStep]) -> None:
        """Stop waiting for missing replies of steps; each late worker is logged once."""
        late = {target for step in steps for target in step.lacks}
        self._late |= late
        for call, _ in self._open:
            if call.target in late and not call.future.done():
                waited_s = (clock.now_ns() - call.sent_ns) / 1e9
                self._say(call, f"has not answered read_watch for {waited_s:.1f} s; it is asked when it has")

    def _take(self, call: Call, asked: Sequence[PendingStep]) -> bool:
        """Add a reply to its steps; return whether the worker need not be called again for them."""
        reading = call.reply()
        if call.error is not None and "ActorUnavailableError" in call.problem():  # Ray restarts it
            return False
        if type(call.error) is AttributeError:  # it has no such method
            self._without.add(call.target)
        if not isinstance(reading, WatchReading):
            if reading is not None or call.error is not None:
                self._say(call, f"is not read: {call.problem()}")
            return True
        try:
            self._measure(call, reading)
            if reading.steps is None:
                return False
            if not call.worker.identity.pid:
                call.worker.identity = reading.identity
            if self.alone or reading.process != ProcessId.current():
                for step, use in zip(asked, reading.uses(len(asked)), strict=True):
                    if use is not None:
                        step.workers.setdefault(reading.process, use)
            if reading.dropped:
                self._say(call, f"ended {reading.dropped} stages more than are kept; is one in a hot loop?")
            else:
                self._said.discard(call.worker)
        except Exception as error:
            self._say(call, f"cannot be read: {type(error).__name__}: {error}")
        return True

    def _measure(self, call: Call, reading: WatchReading) -> None:
        domain = reading.identity.clock_domain
        if domain != clock.domain():
            handshake = Handshake(call.sent_ns, reading.received_ns, reading.replied_ns, call.returned_ns)
            self._handshakes.setdefault(domain, deque(maxlen=_HANDSHAKES)).append(handshake)

    def _say(self, call: Call, what: str) -> None:
        """Log a problem of a worker, once until it answers."""
        if call.worker in self._said:
            return
        self._said.add(call.worker)
        logger.warning("watch: %s %s", call.worker.identity, what)
