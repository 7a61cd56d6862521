"""The step summaries that the ranks of a loop send to rank 0 through the store.

Each rank's times are from its own clock; a joined summary shifts them so that all ranks begin it together.
Only the watch's threads read and write the store; no loop waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.controller.spmd import PROBLEMS, Ranks, in_a_line
from verl_profiling.step_summary import RankUse, StepSummary
from verl_profiling.watch.collectives import with_lateness

logger = logging.getLogger(__name__)

_MOST_BYTES = 7 << 20
"""Largest message, in bytes: torch's TCPStore closes the connection at 8 MiB."""
_COLLECTIVES = "watch/collectives"


class RankSummaries:
    """Exchanges step summaries between the ranks of a loop: rank 0 receives, the others send.

    Args:
        ranks: The ranks.
        most: The largest number of steps to keep per rank.

    Attributes:
        collectives: Whether rank 0 requests the collectives that the ranks enter.
    """

    def __init__(self, ranks: Ranks, most: int) -> None:
        self._ranks = ranks
        self._most = most
        self._unsent: deque[StepSummary] = deque(maxlen=most)
        self._steps: dict[int, dict[int, StepSummary]] = {rank: {} for rank in ranks.others}
        self._until: dict[int, int] = {}
        self._late: set[int] = set()
        self._ended: set[int] = set()
        self._failed = False
        self.collectives = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which joins the summaries of all ranks."""
        return self._ranks.leads

    def send(self, summaries: Iterable[StepSummary], last: bool = False) -> None:
        """Queue summaries, and send the queue to rank 0 if it has read the previous ones."""
        self._unsent += summaries
        try:
            sent = msgspec.msgpack.encode(list(self._unsent))
            while len(sent) > _MOST_BYTES:  # the older half is dropped
                self._unsent = deque(list(self._unsent)[len(self._unsent) // 2 + 1 :], self._most)
                sent = msgspec.msgpack.encode(list(self._unsent))
            if (self._unsent or last) and self._ranks.tell(sent, last):
                self._unsent.clear()
            self.collectives = self._ranks.get(_COLLECTIVES) == b"1"
        except PROBLEMS as error:
            if not self._failed and not last:
                logger.warning("watch: rank 0 is not sent the steps here: %s", in_a_line(error))
            self._failed = True

    def ask_collectives(self, asked: bool) -> None:
        """Request, as rank 0, the collectives that the ranks enter, or no longer."""
        if asked != self.collectives:
            self.collectives = asked
            try:
                self._ranks.set(_COLLECTIVES, b"1" if asked else b"0")
            except PROBLEMS as error:
                logger.debug("watch: the collectives of the ranks are not requested: %s", in_a_line(error))

    def look(self, steps: Iterable[int], last: bool = False) -> None:
        """Receive the summaries of these steps that other ranks have sent."""
        newest = max(steps, default=0)
        for rank in self._ranks.others:
            if not self._has_sent(rank, newest) or rank in self._late:
                if last:
                    self._take(rank, last)
                self._take(rank)

    def lacking(self, step: int) -> list[int]:
        """Return the ranks whose summary of a step is missing, without late and ended ranks."""
        return [
            rank
            for rank in self._ranks.others
            if rank not in self._late | self._ended and not self._has_sent(rank, step)
        ]

    def give_up(self, step: int, waited_s: float) -> None:
        """Stop waiting for the ranks that have not sent a step; each is logged once until it sends."""
        for rank in self.lacking(step):
            self._late.add(rank)
            logger.warning(
                "watch: rank %d has sent nothing of its steps for %.1f s; until it does, the summaries are "
                "without it. Are the settings of watch the same there?",
                *(rank, waited_s),
            )

    def joined(self, summary: StepSummary) -> StepSummary:
        """Return rank 0's summary of a step with the processes of the other ranks added."""
        parts = [(summary, 0)]
        for rank, steps in self._steps.items():
            if (one := steps.pop(summary.step, None)) is not None:
                process = self._ranks.processes.get(rank)
                if process is None or process.clock_domain != clock.domain():
                    one = replace(one, loop=[replace(use, collectives={}) for use in one.loop])
                parts.append((one, summary.begin_ns - one.begin_ns))
        loop = [use for one, _ in parts for use in one.loop]
        workers = [use for one, _ in parts for use in one.workers]
        # All ranks leave a collective at one time, so these are compared by the clock, before the shift.
        known = with_lateness(replace(summary, loop=loop, workers=workers))
        later = {use.lane: later_ns for one, later_ns in parts for use in (*one.loop, *one.workers)}
        return replace(known, loop=_later(known.loop, later), workers=_later(known.workers, later))

    def counts_anew(self) -> None:
        """Record that the loop restarted with an earlier step number."""
        self._until.clear()

    def _has_sent(self, rank: int, step: int) -> bool:
        return step in self._steps[rank] or self._until.get(rank, step - 1) >= step

    def _take(self, rank: int, last: bool = False) -> None:
        try:
            data = self._ranks.told(rank, last)
            sent = [] if data is None else msgspec.msgpack.decode(data, type=list[StepSummary])
        except PROBLEMS as error:
            if rank not in self._late:
                logger.warning("watch: what rank %d sends cannot be read: %s", rank, in_a_line(error))
            self._late.add(rank)
            return
        if data is not None:
            self._late.discard(rank)
        steps = self._steps[rank]
        for summary in sent[-self._most :]:
            steps[summary.step] = summary
            self._until[rank] = summary.step
        while len(steps) > self._most:  # steps with other numbers than rank 0's are never popped
            del steps[next(iter(steps))]
        process = self._ranks.processes.get(rank)
        if last and (data is not None or (process is not None and process.alive() is False)):
            self._ended.add(rank)


def _later(uses: list[RankUse], by_ns: dict[str, int]) -> list[RankUse]:
    """Return copies of the processes' records with all stage times shifted by a time per lane."""
    return [
        replace(
            use,
            stages=[
                replace(
                    stage,
                    begin_ns=stage.begin_ns + by_ns[use.lane],
                    periods=tuple(
                        (begin + by_ns[use.lane], end + by_ns[use.lane]) for begin, end in stage.periods
                    ),
                )
                for stage in use.stages
            ],
        )
        for use in uses
    ]
