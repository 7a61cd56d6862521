"""What the ranks of a loop tell rank 0 of their steps, so that its accounts have all of them.

Each rank numbers its steps, and measures them by its own clock. When ``watch.every`` of them have ended, it
leaves word in the channel over which the ranks record together. Rank 0 looks for that when later steps begin,
at one rank after another, and goes on with the next step after a thousandth of a step; nobody waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from verl_profiling.controller.spmd import PROBLEMS, Ranks, in_a_line
from verl_profiling.identity import ProcessId
from verl_profiling.step_account import RankUse, StepAccount
from verl_profiling.watch.ring import MAX_NAMES

__all__ = ["Hearing", "Telling", "ToldSteps"]

logger = logging.getLogger(__name__)

_SHARE_OF_A_STEP = 0.001
_LEAST_S = 0.001
_PAUSE_S = 0.005


class ToldStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank did in one of its steps; all times are those since the step began.

    Attributes:
        step: Its number.
        loop: What the process of the rank did.
        workers: What other processes did that it called.
    """

    step: int
    loop: list[RankUse]
    workers: list[RankUse]


class ToldSteps(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The steps of a rank that have ended since it told of them last."""

    process: ProcessId
    steps: list[ToldStep]

    @classmethod
    def of(cls, accounts: Iterable[StepAccount]) -> ToldSteps:
        """Return what a rank tells of its own accounts."""
        steps = [
            ToldStep(
                account.step, *(_later(uses, -account.begin_ns) for uses in (account.loop, account.workers))
            )
            for account in accounts
        ]
        return cls(ProcessId.current(), steps)

    def check(self) -> None:
        """Check what was told by another process.

        Raises:
            ValueError: It is not what a rank tells.
        """
        for step in self.steps:
            if any(len(use.stages) > MAX_NAMES + 1 for use in (*step.loop, *step.workers)):
                raise ValueError("it has more stages than a process has names for")


def _later(uses: Iterable[RankUse], by_ns: int) -> list[RankUse]:
    """Return them with stages that are so much later."""
    replace = msgspec.structs.replace
    return [
        replace(
            use,
            stages=[
                replace(
                    stage,
                    begin_ns=stage.begin_ns + by_ns,
                    periods=[(begin_ns + by_ns, end_ns + by_ns) for begin_ns, end_ns in stage.periods],
                )
                for stage in use.stages
            ],
        )
        for use in uses
    ]


class Telling:
    """The side of a rank that follows: tells rank 0 of its steps, and has their accounts for itself.

    Args:
        peers: Rank 0.
        most: So many steps are kept while there is no room to tell of them.
    """

    def __init__(self, peers: Ranks, most: int) -> None:
        self._peers = peers
        self._untold: deque[StepAccount] = deque(maxlen=most)
        self._own: deque[StepAccount] = deque()
        self._failed = False

    def take(self, accounts: Iterable[StepAccount]) -> None:
        """Take the accounts of this rank's next steps, and tell of them if there is room."""
        new = list(accounts)
        self._own += new
        self._untold += new
        self._tell()

    def whole(self) -> Iterator[StepAccount]:
        """Yield the accounts that are whole: this rank's own, because it hears of no other."""
        while self._own:
            yield self._own.popleft()

    def wait(self, timeout_s: float) -> None:
        """Tell what is left; training ends."""
        self._tell(last=True)

    def _tell(self, last: bool = False) -> None:
        try:
            if self._peers.tell(msgspec.msgpack.encode(ToldSteps.of(self._untold)), last):
                self._untold.clear()
        except PROBLEMS as error:
            if not self._failed:
                logger.warning("watch: rank 0 is not told of the steps here: %s", in_a_line(error))
            self._failed = True


class _Rank:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.process: ProcessId | None = None
        self.steps: dict[int, ToldStep] = {}
        self.until: int | None = None
        self.awaited = True
        self.ended = False

    def forget_until(self, step: int) -> None:
        while (first := next(iter(self.steps))) != step:
            del self.steps[first]
        del self.steps[step]

    def has_told(self, step: int) -> bool:
        return step in self.steps or (self.until is not None and self.until >= step)


class Hearing:
    """The side of rank 0: keeps its own accounts until the other ranks have told of these steps.

    Args:
        peers: The other ranks.
        most: So many steps are kept at most.
        patience_s: How long a rank may be late until the accounts are whole without it.
    """

    def __init__(self, peers: Ranks, most: int, patience_s: float) -> None:
        self._peers = peers
        self._most = most
        self._patience_s = patience_s
        self._waiting: deque[tuple[float, StepAccount]] = deque()
        self._ranks = {rank: _Rank() for rank in peers.others}
        self._to_hear: dict[int, None] = {}
        self._step_s, self._last = 0.0, 0
        self._ended = False

    def take(self, accounts: Iterable[StepAccount]) -> None:
        """Take the accounts of this rank's next steps."""
        now_s = time.monotonic()
        for account in accounts:
            if account.step < self._last:  # the loop counts anew: what was told until now says nothing of it
                for known in self._ranks.values():
                    known.until = None
            self._last = account.step
            self._waiting.append((now_s, account))
        if self._waiting:
            self._step_s = self._waiting[-1][1].duration_ns / 1e9
            self._to_hear |= dict.fromkeys(self._ranks)

    def whole(self) -> Iterator[StepAccount]:
        """Look for what some of the ranks have told; yield accounts that are whole with it, of all ranks."""
        if not (self._waiting or self._to_hear):
            return
        deadline = time.perf_counter() + max(_LEAST_S, _SHARE_OF_A_STEP * self._step_s)
        if not self._ended:
            self._look(deadline)
        while self._waiting and self._is_whole(self._waiting[0][1].step):
            yield self._of_all(self._waiting.popleft()[1])
            if time.perf_counter() >= deadline and not self._ended:
                break

    def wait(self, timeout_s: float) -> None:
        """Wait for what the ranks tell at the end of training, and from then on for none of them."""
        deadline = time.monotonic() + timeout_s
        left = [rank for rank, known in self._ranks.items() if known.awaited]
        while left and time.monotonic() < deadline:
            for rank in left:
                gone = self._is_gone(rank)  # before the look: it may have told and ended in between
                self._hear(rank)
                self._hear(rank, last=True)
                if self._ranks[rank].ended:
                    self._hear(rank)  # both words may have come between the two looks
                self._ranks[rank].ended |= gone
            left = [rank for rank in left if not self._ranks[rank].ended]
            time.sleep(_PAUSE_S if left else 0.0)
        self._ended = True

    def _look(self, deadline: float) -> None:
        """Look at ranks that have not told all, until the time is up, and at one in any case."""
        for rank in list(self._to_hear):
            del self._to_hear[rank]
            self._hear(rank)
            if self._lacks(rank) and self._ranks[rank].awaited:
                self._to_hear[rank] = None  # as the last one
            if time.perf_counter() >= deadline:
                break

    def _is_gone(self, rank: int) -> bool:
        process = self._ranks[rank].process
        return process is not None and process.alive() is False

    def _lacks(self, rank: int) -> bool:
        return bool(self._waiting) and not self._ranks[rank].has_told(self._waiting[-1][1].step)

    def _is_whole(self, step: int) -> bool:
        return (
            self._ended
            or len(self._waiting) > self._most
            or all(known.has_told(step) for known in self._ranks.values() if known.awaited)
        )

    def _hear(self, rank: int, last: bool = False) -> None:
        """Take what a rank has told; one that is late for too long is named, and no more waited for."""
        known, problem = self._ranks[rank], "has told nothing"
        try:
            if (data := self._peers.told(rank, last)) is not None:
                self._keep(rank, msgspec.msgpack.decode(data, type=ToldSteps))
                known.ended |= last
                return
        except PROBLEMS as error:
            problem = f"has told nothing that can be read ({in_a_line(error)})"
        late_s = time.monotonic() - self._waiting[0][0] if self._waiting else 0.0
        if known.awaited and not last and late_s >= self._patience_s and self._lacks(rank):
            known.awaited = False
            logger.warning(
                "watch: rank %d %s of its steps for %.1f s; until it does, the accounts are without it. "
                "Are the settings of watch the same there?",
                rank,
                problem,
                late_s,
            )

    def _keep(self, rank: int, told: ToldSteps) -> None:
        told.check()
        known = self._ranks[rank]
        known.process, known.awaited = told.process, True
        for step in told.steps[-self._most :]:
            known.steps[step.step] = step
            known.until = step.step
        while len(known.steps) > self._most:  # of a rank that counts otherwise, none are ever taken
            del known.steps[next(iter(known.steps))]

    def _of_all(self, account: StepAccount) -> StepAccount:
        loop, workers = list(account.loop), list(account.workers)
        for known in self._ranks.values():
            if (told := known.steps.get(account.step)) is not None:
                loop += _later(told.loop, account.begin_ns)
                workers += _later(told.workers, account.begin_ns)
                known.forget_until(account.step)
        return msgspec.structs.replace(account, loop=loop, workers=workers)
