"""What a process answers when its ring is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from verl_profiling import clock
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.watch.ring import SLOT, StageRing
from verl_profiling.watch.span_tally import PIECE, SpanTally

__all__ = ["EndedSpans", "EndedStage", "WatchReading", "ended_stages", "read_ring"]


class EndedStage(msgspec.Struct, frozen=True, gc=False):
    """An outermost stage that has ended; there can be a great many, so the garbage collector knows of none.

    Attributes:
        number: The process's how many-th it is.
        name: Its name.
        begin_ns: When it began, on the clock of the process.
        duration_ns: How long it took.
        peak_bytes: The mark of the most memory at its end; 0 if that was not read.
        held_bytes: The memory at its end, likewise.
    """

    number: int
    name: str
    begin_ns: int
    duration_ns: int
    peak_bytes: int
    held_bytes: int


class EndedSpans(NamedTuple):
    """What the spans of one name add up to, from the begin of their process to the end of a piece of time.

    Attributes:
        name: Their name.
        begin_ns: When the first of those ended that ended in the piece, on the clock of the process.
        end_ns: When the last of them did; 0 for what was told already.
        runs: How many have ended.
        duration_ns: How long they took.
        failed: How many of them an exception ended.
    """

    name: str
    begin_ns: int
    end_ns: int
    runs: int
    duration_ns: int
    failed: int


class WatchReading(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a process that have ended since it was read last.

    Attributes:
        identity: The worker.
        process: The process; another one than before if the worker was restarted.
        names: Names of stages.
        stages: The stages in the order of their ends, as :data:`~verl_profiling.watch.ring.SLOT`.
        received_ns: When the call arrived, on the clock of the process.
        replied_ns: When it returned.
        span_names: Names of spans.
        spans: What the spans of each name add up to, piece by piece, as
            :data:`~verl_profiling.watch.span_tally.PIECE`.
    """

    identity: WorkerIdentity
    process: ProcessId
    names: list[str]
    stages: bytes
    received_ns: int
    replied_ns: int
    span_names: list[str] = []
    spans: bytes = b""

    def ended(self, offset_ns: int = 0) -> Iterator[EndedStage]:
        """Yield the stages; see :func:`ended_stages`."""
        return ended_stages(self.names, self.stages, offset_ns)

    def ended_spans(self, offset_ns: int = 0) -> Iterator[EndedSpans]:
        """Yield what spans add up to.

        Args:
            offset_ns: How far the clock of the process is ahead; it is taken off.

        Raises:
            struct.error: These are no pieces.
            IndexError: A span has a name that is not there.
        """
        for name, begin_ns, end_ns, runs, duration_ns, failed in PIECE.iter_unpack(self.spans):
            off_ns = offset_ns if end_ns else 0
            yield EndedSpans(
                self.span_names[name], begin_ns - off_ns, end_ns - off_ns, runs, duration_ns, failed
            )


def ended_stages(names: Sequence[str], slots: bytes, offset_ns: int = 0) -> Iterator[EndedStage]:
    """Yield the stages that :meth:`StageRing.read` returned.

    Args:
        names: The names.
        slots: The stages.
        offset_ns: How far the clock of their process is ahead; it is taken off.

    Raises:
        struct.error: These are no stages.
        IndexError: A stage has a name that is not there.
    """
    for number, name, begin_ns, duration_ns, peak, held in SLOT.iter_unpack(slots):
        yield EndedStage(number, names[name], begin_ns - offset_ns, duration_ns, peak, held)


def read_ring(
    ring: StageRing, identity: WorkerIdentity, since_ns: int | None, tally: SpanTally | None = None
) -> WatchReading:
    """Return what a ring of this process has kept since then, and what its spans add up to.

    See :meth:`StageRing.read` and :meth:`SpanTally.read`.
    """
    received_ns = clock.now_ns()
    names, stages = ring.read(since_ns)
    span_names, spans = tally.read() if tally is not None else ([], b"")
    return WatchReading(
        identity=identity,
        process=ProcessId.current(),
        names=names,
        stages=stages,
        received_ns=received_ns,
        replied_ns=clock.now_ns(),
        span_names=span_names,
        spans=spans,
    )
