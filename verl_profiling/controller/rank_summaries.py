"""The step summaries that the ranks of a loop send to rank 0 through the store of
``torch.distributed``.

Times of ranks with another clock are shifted as if they began the step together with rank 0. Only
threads of the watch use the store, so no training loop waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.controller.spmd import PROBLEMS, Ranks, in_a_line
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.watch.collectives import with_lateness

logger = logging.getLogger(__name__)

MOST_UNREAD = 64
"""Maximum number of a rank's messages that rank 0 has not read; further messages are dropped."""

_COLLECTIVES = "watch/collectives"
# Between polls of the store, which serves all ranks: each pause is a quarter longer.
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class RankSummaries:
    """Exchanges step summaries between the ranks of a loop: rank 0 receives, the others send.

    The messages of a rank are numbered. A message without summaries reports the end of training.

    Args:
        ranks: The connection to the other ranks.
        most: The largest number of steps to keep per rank.

    Attributes:
        leads: Whether this is rank 0, which joins the summaries of all ranks.
        collectives: Whether rank 0 requests when each rank entered its collectives, such as
            all-reduces; the last rank to enter is the late one.
    """

    def __init__(self, ranks: Ranks, most: int) -> None:
        self._ranks = ranks
        self.leads = ranks.leads
        self._sent = {rank: deque[StepSummary](maxlen=most) for rank in ranks.others}
        self._messages: Counter[int] = Counter()
        self._late: set[int] = set()
        self._ended: set[int] = set()
        self.collectives = False

    def exchanged(self, steps: list[StepSummary], left_s: Callable[[], float]) -> list[StepSummary]:
        """Return the joined summaries on rank 0; the other ranks send their summaries, and keep
        them.

        Args:
            steps: The summaries of this rank.
            left_s: Returns the remaining seconds to wait.
        """
        if not self.leads:
            self.send(steps)
            return steps
        self.receive(steps, left_s)
        return [self.joined(step) for step in steps]

    def send(self, summaries: Sequence[StepSummary]) -> None:
        """Send summaries to rank 0; an empty list at the end of training."""
        rank = self._ranks.rank
        number = self._messages[rank]
        try:
            earlier = None
            if number >= MOST_UNREAD:
                earlier = self._ranks.get(_key(rank, number - MOST_UNREAD))
            if earlier is None or not summaries:  # rank 0 has read that, or must know of the end
                self._ranks.set(_key(rank, number), msgspec.msgpack.encode(summaries))
                self._messages[rank] += 1
            self.collectives = self._ranks.get(_COLLECTIVES) == b"1"
        except PROBLEMS as error:
            if rank not in self._late and summaries:
                logger.warning(
                    "watch: step summaries cannot be sent to rank 0: %s", in_a_line(error)
                )
            self._late.add(rank)

    def request_collectives(self, wanted: bool) -> None:
        """Request or stop requesting, as rank 0, the collectives that the ranks enter."""
        if wanted != self.collectives:
            self.collectives = wanted
            try:
                self._ranks.set(_COLLECTIVES, b"1" if wanted else b"0")
            except PROBLEMS as error:
                logger.debug("watch: the ranks are not asked for collectives: %s", in_a_line(error))

    def receive(self, steps: Sequence[StepSummary], left_s: Callable[[], float]) -> None:
        """Wait for the summaries of all ranks; log each missing rank once until its summary
        arrives.

        Args:
            steps: This rank's summaries of the same steps.
            left_s: Returns the remaining seconds to wait.
        """
        begun_s = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        waited = [rank for rank in self._sent if rank not in self._ended]
        while True:
            for rank in waited:
                self._take(rank)
            waited = self._lacking(steps)
            lacking = [rank for rank in waited if rank not in self._late]
            if not lacking or left_s() <= 0:
                break
            time.sleep(pause_s)
            pause_s = min(1.25 * pause_s, _LONGEST_PAUSE_S)
        for rank in lacking:
            self._late.add(rank)
            logger.warning(
                "watch: rank %d has sent no step summaries for %.1f s, and is missing in the "
                "summaries until then. Are the settings of watch the same there?",
                rank,
                time.monotonic() - begun_s,
            )

    def joined(self, summary: StepSummary) -> StepSummary:
        """Return rank 0's summary of a step with the processes of the other ranks added."""
        loop = [*summary.loop]
        workers = [*summary.workers]
        for rank, sent in self._sent.items():
            part = _part_of(summary.step, sent)
            if part is None:
                continue
            process = self._ranks.processes.get(rank)
            if process is None or process.clock_domain != clock.domain():
                part = _begun_at(part, summary.begin_ns)
            loop += part.loop
            workers += part.workers
        return with_lateness(replace(summary, loop=loop, workers=workers))

    def _lacking(self, steps: Sequence[StepSummary]) -> list[int]:
        """Return the running ranks that have sent neither all of these steps nor a later step."""
        return [
            rank
            for rank, sent in self._sent.items()
            if steps and rank not in self._ended and (not sent or sent[-1].step < steps[-1].step)
        ]

    def _take(self, rank: int) -> None:
        """Receive the new messages of a rank."""
        try:
            while (data := self._ranks.take(_key(rank, self._messages[rank]))) is not None:
                self._messages[rank] += 1
                sent = msgspec.msgpack.decode(data, type=list[StepSummary])
                self._late.discard(rank)
                self._sent[rank] += sent
                if not sent:
                    self._ended.add(rank)
        except PROBLEMS as error:
            if rank not in self._late:
                logger.warning(
                    "watch: the messages of rank %d cannot be read: %s", rank, in_a_line(error)
                )
            self._late.add(rank)


def _part_of(step: int, sent: deque[StepSummary]) -> StepSummary | None:
    """Take the summary of a step from the summaries that a rank has sent."""
    if all(summary.step != step for summary in sent):
        return None
    while (summary := sent.popleft()).step != step:
        pass  # rank 0 had no such step: a loop may restart its step numbers
    return summary


def _key(rank: int, number: int) -> str:
    return f"watch/{rank}/{number}"


def _begun_at(summary: StepSummary, begin_ns: int) -> StepSummary:
    """Return the summary of a rank on another machine, with times of this machine's clock.

    Args:
        summary: The summary, with times of its rank's clock.
        begin_ns: Begin of the step on this machine's clock; all times move with the begin.
    """
    later_ns = begin_ns - summary.begin_ns
    # All ranks leave a collective at one time, so only times of one clock show who was late.
    loop = [replace(use, collectives=None) for use in summary.loop]
    return replace(
        summary,
        loop=[_later(use, later_ns) for use in loop],
        workers=[_later(use, later_ns) for use in summary.workers],
    )


def _later(use: RankUse, ns: int) -> RankUse:
    """Return a copy of a process's stage times, shifted by ``ns``."""
    runs = np.frombuffer(use.runs, np.int64).reshape(-1, 4)
    return replace(use, runs=(runs + np.array([0, ns, ns, 0])).tobytes())
