"""The watch's question to a process, and its answer."""

from __future__ import annotations

import msgspec

from verl_profiling import clock
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.step_summary import Period, RankUse
from verl_profiling.watch.sums import StageSums


class WatchQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of which a process is asked.

    Attributes:
        steps: Begin and end of each, on the clock of the loop's process.
        offsets_ns: How far clocks are ahead of that, by clock domain, as far as they were measured.
    """

    steps: list[Period] = []
    offsets_ns: dict[str, int] = {}


class WatchReading(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a process in the steps of a question.

    Attributes:
        identity: The worker.
        process: The process; another one than before if the worker was restarted.
        steps: What it did in each, or ``null``, as msgpack; ``None`` if its clock is still to be measured.
        dropped: Number of stages that had ended, and were not kept until they were asked for.
        received_ns: When the call arrived, on the clock of the process.
        replied_ns: When it returned.
    """

    identity: WorkerIdentity
    process: ProcessId
    steps: bytes | None = None
    dropped: int = 0
    received_ns: int
    replied_ns: int

    def uses(self, number: int) -> list[RankUse | None]:
        """Return what the process did in each of so many steps.

        Raises:
            ValueError: It is not what a process answers.
        """
        found = msgspec.msgpack.decode(self.steps or b"", type=list[RankUse | None])
        if len(found) != number:
            raise ValueError(f"it has {len(found)} steps instead of {number}")
        return found


def read_sums(sums: StageSums, identity: WorkerIdentity, question: WatchQuestion) -> WatchReading:
    """Return what a process did in the steps of a question."""
    clock.follow()
    received_ns = clock.now_ns()
    who = RankUse(lane=identity.lane(), role=identity.role, rank=identity.rank, replica=identity.replica)
    ahead_ns = question.offsets_ns.get(identity.clock_domain)
    steps = None
    if ahead_ns is not None:
        steps = msgspec.msgpack.encode(sums.of_steps(who, question.steps, ahead_ns))
    return WatchReading(
        identity=identity,
        process=ProcessId.current(),
        steps=steps,
        dropped=sums.take_dropped() if steps is not None else 0,
        received_ns=received_ns,
        replied_ns=clock.now_ns(),
    )
