"""The watch's request for the stages of a process, and the reply."""

from __future__ import annotations

import msgspec

from verl_profiling import clock
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.step_summary import Period, RankUse
from verl_profiling.watch.collectives import with_collectives
from verl_profiling.watch.sums import StageSums


class WatchQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the stages of a process in some steps.

    Attributes:
        steps: Begin and end of each step, on the clock of the loop's process.
        offsets_ns: Measured clock offsets by clock domain: its clock minus the loop's.
        collectives: Whether the collectives that it entered are requested, too.
    """

    steps: list[Period] = []
    offsets_ns: dict[str, int] = {}
    collectives: bool = False


class WatchReading(msgspec.Struct, frozen=True, kw_only=True):
    """The reply: the stages of a process in the requested steps.

    Attributes:
        identity: The worker.
        process: The process; it changes if the worker is restarted.
        steps: A ``RankUse`` or ``null`` for each step, as msgpack; ``None`` until its clock offset is
            measured.
        dropped: Number of ended stages that were dropped before this request, because the queue was full.
        received_ns: When the call arrived, on the clock of the process.
        replied_ns: When the reply was sent, on the same clock.
    """

    identity: WorkerIdentity
    process: ProcessId
    steps: bytes | None = None
    dropped: int = 0
    received_ns: int
    replied_ns: int

    def uses(self, number: int) -> list[RankUse | None]:
        """Decode ``steps``, which must have ``number`` entries.

        Raises:
            ValueError: The reply is invalid.
        """
        found = msgspec.msgpack.decode(self.steps or b"", type=list[RankUse | None])
        if len(found) != number:
            raise ValueError(f"it has {len(found)} steps instead of {number}")
        return found


def read_sums(sums: StageSums, identity: WorkerIdentity, question: WatchQuestion) -> WatchReading:
    """Return a process's reply to a request of the watch."""
    clock.follow()
    received_ns = clock.now_ns()
    who = RankUse(lane=identity.lane(), role=identity.role, rank=identity.rank, replica=identity.replica)
    ahead_ns = question.offsets_ns.get(identity.clock_domain)
    steps = None
    if ahead_ns is not None:
        uses = sums.of_steps(who, question.steps, ahead_ns)
        if question.collectives:
            uses = with_collectives(uses, question.steps, ahead_ns)
        steps = msgspec.msgpack.encode(uses)
    return WatchReading(
        identity=identity,
        process=ProcessId.current(),
        steps=steps,
        dropped=sums.take_dropped() if steps is not None else 0,
        received_ns=received_ns,
        replied_ns=clock.now_ns(),
    )
