"""What people ask of a running job: accepted or refused at a step's begin, and answered when it is done."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import msgspec

from verl_profiling import clock
from verl_profiling.aim import Aim
from verl_profiling.controller.decision import Decision
from verl_profiling.controller.inbox import Inbox
from verl_profiling.demand import (
    MOST_PENDING,
    Answer,
    AnsweredWorker,
    Demand,
    LoopState,
    new_request_id,
)
from verl_profiling.errors import ConfigError
from verl_profiling.identity import step_folder_name
from verl_profiling.manifest import Manifest
from verl_profiling.settings.schedule import Action, Schedule, StepRange
from verl_profiling.trigger import Trigger
from verl_profiling.visible import visible

__all__ = ["Demands"]

logger = logging.getLogger(__name__)

_FAR = 1000
_BEAT_NS = 1_000_000_000
_STEP_TIMES = 16
_SEPARATOR = ", "


@dataclass
class _Order:
    """A request that was accepted.

    Attributes:
        demand: The request.
        aim: What its captures do differently; ``None``: nothing.
        at: The step before which none of it is due.
        left: How many steps are still to be decided.
        flying: How many captures were decided, of which nothing is known yet.
        answer: What was answered last.
    """

    demand: Demand
    aim: Aim | None
    at: int | None
    left: int
    flying: int = 0
    answer: Answer = field(init=False)

    def __post_init__(self) -> None:
        self.answer = Answer(demand=self.demand, state="accepted")


class Demands:
    """Takes requests at a step's begin, and says which are due.

    Args:
        schedule: The settings' schedule.
        check: Raises ``ConfigError`` for an aim that cannot be had in this job.
    """

    def __init__(self, schedule: Schedule, check: Callable[[Aim], None]) -> None:
        self._inboxes: list[Inbox] = []
        self._schedule = schedule
        self._check = check
        self._orders: list[_Order] = []
        self._signals: deque[str] = deque(maxlen=1)
        self._state: LoopState | None = None
        self._beat_ns = 0
        self._begun_ns = 0
        self._folder = ""
        self._step: int | None = None
        self._step_times: deque[int] = deque(maxlen=_STEP_TIMES)

    def open(self, inbox: Inbox, state: LoopState) -> None:
        """Begin to take requests from an inbox; those asked of an earlier start of the run are refused."""
        for answer in inbox.answers():
            if answer.state == "accepted":
                why = "the job ended before it was done"
                inbox.answer(msgspec.structs.replace(answer, state="refused", reason=why))
        for demand in inbox.take()[0]:
            why = "it was asked before this start of the run began"
            inbox.answer(Answer(demand=demand, state="refused", reason=why, answered_ns=clock.now_ns()))
        self._inboxes.append(inbox)
        self._state = msgspec.structs.replace(state, begun_ns=clock.now_ns())
        inbox.beat(self._state, wait=True)

    def signal(self, name: str) -> None:
        """Ask for the next step; a signal handler may call this."""
        self._signals.append(name)

    def step_begins(self, step: int) -> None:
        """Note that a step begins; once a second at most, leave a sign of it."""
        now_ns = time.monotonic_ns()
        if self._begun_ns:
            self._step_times.append(now_ns - self._begun_ns)
        self._begun_ns, self._step = now_ns, step
        if now_ns - self._beat_ns >= _BEAT_NS and self._state is not None:
            self._beat_ns = now_ns
            self._state = msgspec.structs.replace(self._seen(self._state), begun_ns=clock.now_ns())
            for inbox in self._inboxes:
                inbox.beat(self._state)

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""
        if self._signals:
            asked_ns = clock.now_ns()
            by = self._signals.popleft()
            self._accept(Demand(id=new_request_id(), by=by, asked_ns=asked_ns), step)
        for inbox in self._inboxes:
            if inbox.has_changed():
                demands, cancelled = inbox.take()
                for demand in demands:
                    self._accept(demand, step)
                for request in cancelled:
                    self._cancel(request)
        return self._due(step, scheduled) if self._orders else None

    def begun(self, trigger: Trigger, folder: str) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""
        self._folder = folder
        for order in self._of(trigger):
            self._name(order)

    def refused(self, trigger: Trigger, why: str) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""
        for order in self._of(trigger):
            self._refuse(order, why)

    def concluded(self, manifest: Manifest) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`."""
        decided = self._of(manifest.trigger)
        for order in decided:
            order.flying -= 1
        last = manifest.steps[-1]
        for order in self._orders:
            if order.demand.at is not None and order.at in manifest.steps and order not in decided:
                self._take(order, last, last - order.at + 1)
                self._name(order)
                decided.append(order)
        workers = [AnsweredWorker(one.name, one.status, one.reason) for one in manifest.workers]
        for order in decided:
            answer = order.answer
            done = not (order.left or order.flying) or not manifest.complete
            self._answer(
                order,
                state="done" if done else "accepted",
                made=answer.made + 1,
                complete=(answer.complete is not False) and manifest.complete,
                policy_versions=[*answer.policy_versions, manifest.policy_version],
                workers=workers,
            )
            if done:
                self._orders.remove(order)

    def train_ends(self) -> None:
        """See :class:`~verl_profiling.controller.decision.Asker`; leave the last sign of life."""
        for inbox in self._inboxes:
            for demand in inbox.take()[0]:
                self._accept(demand, (self._step or 0) + 1)
        last = f" after step {self._step}" if self._step is not None else ""
        for order in list(self._orders):
            self._refuse(order, f"training ended{last}")
        if self._state is not None:
            ended = msgspec.structs.replace(self._seen(self._state), ended_ns=clock.now_ns())
            for inbox in self._inboxes:
                inbox.beat(ended, wait=True)

    def _seen(self, state: LoopState) -> LoopState:
        step_s = median(self._step_times) / 1e9 if self._step_times else 0.0
        return msgspec.structs.replace(state, step=self._step, step_s=step_s)

    def _accept(self, demand: Demand, step: int) -> None:
        order = _Order(demand, None if demand.aim == Aim() else demand.aim, demand.at, demand.steps)
        if why := self._problem(demand, step):
            self._refuse(order, why)
            return
        if order.aim is not None and order.at is None:
            order.at = self._free_step(step)
        first = step if order.at is None else order.at
        self._orders.append(order)
        logger.info("request %s of %s is accepted from step %d on", demand.id, _whose(demand), first)
        folders = 1 if self._schedule.continuous else demand.steps
        self._answer(order, folders=[step_folder_name(first + number) for number in range(folders)])

    def _problem(self, demand: Demand, step: int) -> str:
        """Return why a request cannot be met; empty if it can."""
        if any(demand.id == order.demand.id for order in self._orders):
            return "another request has the same id"
        if len(self._orders) >= MOST_PENDING:
            return f"{MOST_PENDING} requests are waiting already; cancel one"
        if demand.at is not None and demand.at < step:
            return f"step {demand.at} is too early: step {step} is the next that can be captured"
        try:
            self._check(demand.aim)
        except ConfigError as error:
            return str(error)
        return ""

    def _free_step(self, step: int) -> int:
        """Return the next step that the schedule does not record, or this one if it records all."""
        free = (one for one in range(step, step + _FAR) if self._schedule.action(one) is not Action.RECORD)
        return next(free, step)

    def _due(self, step: int, scheduled: bool) -> Decision | None:
        """Return what is captured of the orders that are due; the first one says how."""
        due = []
        for order in [order for order in self._orders if order.left]:
            if order.demand.at is not None and order.at is not None and order.at < step:
                self._refuse(order, f"step {order.at} never came; the loop went on with step {step}")
            elif order.at is None or order.at <= step:
                due.append(order)
        if scheduled:
            now = [o for o in due if o.aim is None or o.demand.at is not None or o.at == step]
        else:
            now = [order for order in due if order.aim == due[0].aim]
        if not now:
            return None
        first = now[0]
        for order in due:
            if order not in now and order.demand.at == step:
                self._refuse(order, f"step {step} is captured for request {first.demand.id}, otherwise")
        last = step
        if self._schedule.continuous:
            last += first.left - 1
            now = [order for order in now if order.left == first.left]
        for order in now:
            order.flying += 1
            self._take(order, last, last - step + 1)
        stages = (first.aim.stages if first.aim else None) or ()
        trigger = Trigger(
            kind="demand",
            reason="; ".join(dict.fromkeys(_in_words(order) for order in now)),
            by=", ".join(dict.fromkeys(order.demand.by for order in now if order.demand.by)),
            request=_SEPARATOR.join(order.demand.id for order in now),
            stage=stages[0] if len(stages) == 1 else "",
        )
        return Decision(StepRange(step, last), trigger, first.aim)

    def _cancel(self, request: str) -> None:
        for order in self._orders:
            if order.demand.id == request and order.flying:
                order.left = 0
                self._answer(order, reason="cancelled, but for what was decided already")
            elif order.demand.id == request:
                self._orders.remove(order)
                self._answer(order, state="cancelled", folders=order.answer.folders[: order.answer.made])
            else:
                continue
            return

    def _take(self, order: _Order, last: int, steps: int) -> None:
        """Count steps of an order as decided, up to a last one."""
        order.left = max(0, order.left - steps)
        order.at = None
        if order.aim is not None and order.demand.at is None:
            order.at = self._free_step(last + 1)

    def _name(self, order: _Order) -> None:
        """Answer with the folder of the capture that is open."""
        answer = order.answer
        self._answer(
            order, folders=[*answer.folders[: answer.made], self._folder, *answer.folders[answer.made + 1 :]]
        )

    def _of(self, trigger: Trigger) -> list[_Order]:
        """Return the orders that a capture is made for."""
        ids = trigger.request.split(_SEPARATOR)
        return [order for order in self._orders if order.demand.id in ids]

    def _refuse(self, order: _Order, why: str) -> None:
        logger.warning("request %s of %s is refused: %s", order.demand.id, _whose(order.demand), visible(why))
        if order in self._orders:
            self._orders.remove(order)
        self._answer(order, state="refused", reason=why, folders=order.answer.folders[: order.answer.made])

    def _answer(self, order: _Order, **changes: object) -> None:
        order.answer = msgspec.structs.replace(order.answer, answered_ns=clock.now_ns(), **changes)
        for inbox in self._inboxes:
            inbox.answer(order.answer)


def _whose(demand: Demand) -> str:
    return visible(demand.by) or "somebody"


def _in_words(order: _Order) -> str:
    return "as the settings say" if order.aim is None else order.aim.in_words()
