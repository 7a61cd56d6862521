"""The watch in the loop's process: an account of every step, made from the stages of all processes.

Nothing here waits. A step's own account is there when it ends; the stages of the workers come later, and
with them the account is complete.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Protocol

import msgspec

from verl_profiling import clock
from verl_profiling.capture.stage import Both, StageSink
from verl_profiling.controller.calls import Call
from verl_profiling.controller.open_capture import ROLLOUT
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.watched_workers import WatchedWorkers
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.watch import WatchOptions
from verl_profiling.step_account import RankUse, StepAccount
from verl_profiling.watch.frontier import exposed
from verl_profiling.watch.lane import Lane, StepTime
from verl_profiling.watch.reading import ended_stages
from verl_profiling.watch.ring import STAGES_OF_A_STEP, OpenStage, StageRing, process_ring

__all__ = ["Listener", "OtherRanks", "Watch"]

logger = logging.getLogger(__name__)

Listener = Callable[[StepAccount], object]

LOOP = "controller"
"""Lane and role of the process that runs the loop."""

SHARE, ALLOWANCE_NS = 0.002, 5_000_000
"""At each step the loop's thread asks workers and takes their answers for this share of a step, and for so
long at least. Where something is slow, it does all at once."""


class OtherRanks(Protocol):
    """The other ranks of a loop that all of them run."""

    def take(self, accounts: Iterable[StepAccount]) -> None:
        """Take the accounts of this rank's next steps."""

    def whole(self) -> Iterator[StepAccount]:
        """Yield those that are whole now, with the other ranks where this one hears of them."""

    def wait(self, timeout_s: float) -> None:
        """Wait for what is told when training ends."""


class Watch:
    """Follows the loop, and accounts for every step.

    Workers are asked for their stages when ``watch.every`` steps have ended since they were asked, and what
    they answer is taken when a later step begins. The answers to the end of a capture carry them, too.

    Args:
        options: The settings.
        roster: The workers.
        patience_s: How long an answer may take before those of the others are taken without it.

    Attributes:
        ring: The stages of the loop's process.
        accounts: The accounts of the last steps that are complete.
        early: Called at the end of every step with its account, in which the workers are still missing.
        listeners: Called with every account once it is complete: when the workers were read, or are due to
            be read again and have not answered for long.
    """

    def __init__(self, options: WatchOptions, roster: Roster, patience_s: float) -> None:
        kept = options.steps * STAGES_OF_A_STEP
        self.ring = StageRing(kept)
        self.accounts: deque[StepAccount] = deque(maxlen=options.steps)
        self.early: list[Listener] = []
        self.listeners: list[Listener] = []
        self._every, self._steps = options.every, options.steps
        self._patience_ns = int(patience_s * 1e9)
        self._kept = kept
        self._ranks: OtherRanks | None = None
        self._workers = WatchedWorkers(roster, kept)
        self._lane = Lane(LOOP, LOOP, 0, kept)
        self._step: StepTime | None = None
        self._ended: deque[StepTime] = deque()
        self._before_ns = 0
        self._steps_unread = 0
        self._soon = self._at_once = False
        self._step_ns = 0
        self._left: deque[Iterator[None]] = deque()
        self._rollout: OpenStage | None = None
        self._beside: tuple[str, ...] = ()
        self._failed: set[int] = set()

    def begin_with(self, ranks: OtherRanks | None, own: WorkerIdentity) -> None:
        """Account for this process as one of the ranks of a loop: the loop and its workers here are one lane.

        Args:
            ranks: The others; ``None`` if nothing is told.
            own: Who this one is in manifests.
        """
        self._ranks = ranks
        self.ring = process_ring(self._kept)
        self._lane = self._workers.loop = Lane(own.lane(), own.role, own.rank, self._kept)
        self._take_own_stages()

    def receiver(self, log: StageSink | None) -> StageSink:
        """Return what receives the stages of the loop's process while a log of a capture does, or none."""
        return self.ring if log is None else Both(log, self.ring)

    def read_soon(self) -> None:
        """Ask the workers at the end of the step, or at the end of the next one, whenever they are due."""
        self._soon = True

    def step_is_over(self) -> None:
        """End the step before, if the loop did not, and take the answers that have come since."""
        self.step_ends()
        self._collect()
        self._publish_whole()

    def step_begins(self, step: int, policy_version: int | None = None) -> None:
        """Follow the begin of a step, after :meth:`step_is_over`."""
        self._step = StepTime(step, clock.now_ns(), policy_version=policy_version, before_ns=self._before_ns)

    def no_step(self) -> None:
        """Forget the step that began last: the loop found that there is none left."""
        self._step = None

    def capture_begins(self, folder: str) -> None:
        """Note that the step is captured; what it took to begin that is no part of the step."""
        if self._step is not None:
            self._step.captured = folder
            self._step.begin_ns = clock.now_ns()

    def step_ends(self) -> None:
        """Follow the end of a step: make its account, and ask the workers if they are due."""
        step, self._step = self._step, None
        if step is None:
            return
        if not self._beside:  # a loop that does not say when generation ends has it to the end of the step
            self.rollout_ends()
        step.end_ns = clock.now_ns()
        self._step_ns = step.end_ns - step.begin_ns
        self._take_own_stages()
        self._before_ns = step.end_ns
        self._ended.append(step)
        if self.early:
            [own] = self._lane.uses([step])
            self._tell(self.early, self._explained(self._account(step, own, [])))
        self._steps_unread += 1
        if self._soon or (self._every and self._steps_unread >= self._every):
            self._ask_if_answered()
        if self._workers.are_read and not self._every and not step.captured:
            self._complete(list(self._ended))
        elif len(self._ended) > self._steps:
            self._complete([self._ended[0]])

    def rollout_begins(self) -> None:
        """Begin the stage ``rollout``."""
        self.rollout_ends()
        self._rollout = self.ring.begin(ROLLOUT)

    def generation(self, runs: bool) -> None:
        """Begin or end it beside the steps: no other stage of this task is inside of it."""
        self._beside = (ROLLOUT,)
        self.rollout_ends()
        if runs:
            self._rollout = copy_context().run(self.ring.begin, ROLLOUT)

    def rollout_ends(self) -> None:
        """End it; it may have begun in another task or thread."""
        stage, self._rollout = self._rollout, None
        if stage is not None:
            self.ring.end_stage(stage)

    def take(self, calls: Sequence[Call]) -> None:
        """Take what came along with the answers to calls that ended a capture, after what was told before."""
        self._workers.collect()
        for call in calls:
            self._workers.take(call)

    def capture_ended(self) -> None:
        """Note that a capture has ended, and its workers have told all until then.

        Of an aimed one these are not all: its account is complete when the others were read, too.
        """
        self._complete(self._ended_until(self._workers.known_until_ns) if self._every else list(self._ended))

    def open_calls(self) -> Sequence[Call]:
        """Ask those that are still to be asked; return the calls to workers that are not answered yet."""
        self._workers.send()
        return self._workers.calls

    def last_calls(self) -> Sequence[Call]:
        """Ask the workers for the last time, after a wait for :meth:`open_calls`; return the calls."""
        asked_ns = self._workers.asked_ns
        self.step_ends()
        self._soon = self._at_once = True
        self._collect()
        if self._workers.asked_ns == asked_ns:  # or the end of a step that was cut short has just asked
            self._ask()
        return self._workers.calls

    def last_step_is_over(self) -> OtherRanks | None:
        """Complete what is known here; return the ranks to be waited for before :meth:`train_ends`."""
        self._workers.collect()
        self._complete(list(self._ended))
        return self._ranks

    def train_ends(self) -> None:
        """Complete what there is; a second end of the same training waits for no rank again."""
        self._publish_whole()
        self._ranks = None

    def _collect(self) -> None:
        """Take the answers that have come; with the last of them, what ended before is complete.

        Of many workers that is much work: the loop's thread does a part of it at each step.
        """
        if self._workers.are_read and not self._left:
            return
        allowed_ns = max(ALLOWANCE_NS, int(SHARE * self._step_ns))
        until_ns = None if self._at_once else time.thread_time_ns() + allowed_ns
        if not self._workers.are_read:
            self._workers.send(until_ns)
            self._workers.collect(until_ns)
            if self._workers.are_read:
                self._begin_to_complete(self._ended_until(self._workers.asked_ns))
        self._go_on(until_ns)

    def _ask_if_answered(self) -> None:
        """Ask the workers, unless answers to an earlier call are on the way, or not all are taken."""
        self._at_once |= self._soon
        self._collect()
        if self._left:
            return
        if self._workers.are_awaited(self._patience_ns):
            return
        self._ask()

    def _ask(self) -> None:
        self._workers.collect()
        self._complete(self._ended_until(self._workers.asked_ns))
        self._steps_unread, self._soon, self._at_once = 0, False, self._soon
        self._workers.ask()
        self._collect()

    def _ended_until(self, time_ns: int) -> list[StepTime]:
        """Return the steps until the last that had ended by then; the clock may have been set back since."""
        steps = list(self._ended)
        while steps and steps[-1].end_ns > time_ns:
            steps.pop()
        return steps

    def _complete(self, steps: Sequence[StepTime]) -> None:
        """Make the whole accounts of steps that have ended, which are the first of all that wait for it."""
        self._begin_to_complete(steps)
        self._go_on(None)

    def _begin_to_complete(self, steps: Sequence[StepTime]) -> None:
        if steps:
            for _ in steps:
                self._ended.popleft()
            self._left.append(self._completing(steps))

    def _go_on(self, until_ns: int | None) -> None:
        """Go on with the accounts that were begun, up to some CPU time of this thread."""
        while self._left:
            for _ in self._left[0]:
                if until_ns is not None and time.thread_time_ns() >= until_ns:
                    return
            self._left.popleft()

    def _completing(self, steps: Sequence[StepTime]) -> Iterator[None]:
        """Make whole accounts bit by bit: what each worker did, then an account after the other."""
        workers: list[list[RankUse]] = [[] for _ in steps]
        for found in self._workers.uses(steps):
            for uses, use in zip(workers, found, strict=True):
                if use is not None:
                    uses.append(use)
            yield
        own = self._lane.uses(steps)
        self._lane.forget(steps[-1].begin_ns)
        accounts = map(self._account, steps, own, workers)
        if self._ranks is not None:
            self._ranks.take(accounts)
            return
        for account in accounts:
            self._publish(account)
            yield

    def _publish(self, account: StepAccount) -> None:
        """Say of an account, which is whole, where the time went, and tell those who listen."""
        account = self._explained(account)
        self.accounts.append(account)
        self._tell(self.listeners, account)

    def _publish_whole(self) -> None:
        for account in self._ranks.whole() if self._ranks is not None else ():
            self._publish(account)

    def _account(self, step: StepTime, own: RankUse | None, workers: list[RankUse]) -> StepAccount:
        return StepAccount(
            step=step.step,
            begin_ns=step.begin_ns,
            end_ns=step.end_ns,
            policy_version=step.policy_version,
            loop=[own] if own is not None else [],
            workers=workers,
            beside=self._beside,
            captured=step.captured,
        )

    def _explained(self, account: StepAccount) -> StepAccount:
        before = self.accounts[-1] if self.accounts else None
        try:
            rows = exposed(account, before, self._workers.has_any)
            return msgspec.structs.replace(account, exposed=rows)
        except Exception as error:  # a mistake of the watch is no matter of the loop either
            self._say_once(id(exposed), account.step, error)
            return account

    def _take_own_stages(self) -> None:
        names, slots = self.ring.read(None)
        now_ns = clock.now_ns()
        self._lane.take(ended_stages(names, slots), 0, now_ns)

    def _tell(self, listeners: Sequence[Listener], account: StepAccount) -> None:
        """Pass an account on. What a listener raises is said once, and is no matter of the loop."""
        for listener in listeners:
            try:
                listener(account)
            except Exception as error:
                self._say_once(id(listener), account.step, error)

    def _say_once(self, what: int, step: int, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            logger.error("watch: step %d: %s: %s", step, type(error).__name__, error, exc_info=error)
