"""The parts that the ranks of one capture hand over, and how they become one manifest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from verl_profiling.capture.messages import Finished
from verl_profiling.controller.channel import Channel
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import CaptureResult, Manifest, StageSpan

__all__ = ["Begun", "Gathering", "Part", "joined_with", "nested", "with_stages"]

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.5


class Begun(msgspec.Struct, frozen=True):
    """What a rank says when it has begun a step."""

    process: ProcessId
    workers: list[WorkerIdentity]


class Part(msgspec.Struct, frozen=True):
    """What a rank hands over at a step's end."""

    process: ProcessId
    workers: list[CaptureResult]
    notes: list[str]
    finished: list[Finished]


class Gathering:
    """The parts of one capture: which have come, and what is known of those that have not."""

    def __init__(
        self, channel: Channel, name: str, folder: Path, ranks: Iterable[int], heard: dict[int, ProcessId]
    ) -> None:
        self.folder = folder
        self.parts: dict[int, Part] = {}
        self.open = set(ranks)
        self.begun: dict[int, Begun] = {}
        self._channel = channel
        self._name = name
        self._heard = heard
        self._began_s = time.monotonic()
        self._looked_s = 0.0
        self._problem = ""

    def look(self, silent: set[int], silent_s: float) -> bool:
        """Take what has come; return whether nobody is left to wait for.

        Args:
            silent: Ranks that have never been heard of, and were waited for already.
            silent_s: How long to wait for others that have not been heard of.
        """
        waited_s = time.monotonic() - self._began_s
        patient = waited_s - self._looked_s < _LOOK_AGAIN_S
        if not patient:
            self._looked_s = waited_s
            patient = any(
                self._heard[rank].alive() is not False
                if rank in self._heard
                else rank not in silent and waited_s < silent_s
                for rank in self.open
            )
        try:
            self._take()  # after the look: a process may have answered and ended in between
        except (OSError, RuntimeError) as error:
            self._problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return True
        return not (patient and self.open)

    def late(self) -> list[Part]:
        """Return the parts that have come since."""
        before = set(self.parts)
        try:
            self._take()
        except (OSError, RuntimeError):
            return []
        return [part for rank, part in self.parts.items() if rank not in before]

    def with_missing(self, manifest: Manifest) -> Manifest:
        """Return the manifest with an entry for each worker whose rank has not answered."""
        missing = [result for rank in sorted(self.open) for result in self._stand_ins(rank, manifest)]
        for result in missing:
            logger.error("step %d: %s was not captured: %s", manifest.step, result.name, result.reason)
        return msgspec.structs.replace(manifest, workers=[*manifest.workers, *missing])

    def _take(self) -> None:
        for rank in sorted(self.open):
            if rank not in self.begun and (data := self._channel.get(f"{self._name}/begun/{rank}")):
                self.begun[rank] = msgspec.msgpack.decode(data, type=Begun)
                self._heard[rank] = self.begun[rank].process
            if (data := self._channel.take(f"{self._name}/part/{rank}")) is not None:
                part = self.parts[rank] = msgspec.msgpack.decode(data, type=Part)
                self._heard[rank] = part.process
                self.open.discard(rank)

    def _stand_ins(self, rank: int, manifest: Manifest) -> list[CaptureResult]:
        process, begun = self._heard.get(rank), self.begun.get(rank)
        waited_s = time.monotonic() - self._began_s
        if self._problem:
            reason = f"rank {rank} cannot be reached: {self._problem}"
        elif process is None:
            reason = (
                f"rank {rank} took no part: its callback has not begun this step {waited_s:.0f} s after rank "
                "0 ended it; build the callback in every process, or set spmd: false where it is one for all"
            )
        elif process.alive() is False:
            reason = f"rank {rank} ({process}) ended during the step"
        else:
            what = "ended" if begun else "begun"
            reason = f"rank {rank} ({process}) had not {what} the step {waited_s:.0f} s after rank 0 ended it"
        models = manifest.workers or [CaptureResult(identity=WorkerIdentity(role="worker"))]
        host, domain, pid = ("unknown", "unknown", 0)
        if process is not None:
            host, domain, pid = process.host, process.clock_domain, process.pid
        guess = WorkerIdentity(
            role=models[0].identity.role, rank=rank, host=host, clock_domain=domain, pid=pid
        )
        identities = begun.workers if begun else [guess]
        return [
            CaptureResult(
                identity=identity,
                roles=[identity.role],
                capture_id=manifest.capture_id,
                step=manifest.step,
                mode=models[0].mode,
                tools=models[0].tools,
                status="failed",
                reason=reason,
            )
            for identity in identities
        ]


def joined_with(manifest: Manifest, part: Part) -> Manifest:
    """Return the manifest with a rank's part, in the place of what stood for it."""
    names = {worker.name for worker in part.workers}
    own = {(worker.identity.host, worker.identity.pid) for worker in part.workers}
    kept = []
    notes = [*manifest.notes, *part.notes]
    for worker in manifest.workers:
        is_stand_in = worker.status == "failed" and not worker.artifacts and not worker.stages
        if worker.name in names and is_stand_in:
            notes.append(f"{worker.name} answered late: {worker.reason}")
            continue
        if worker.name in names and (worker.identity.host, worker.identity.pid) not in own:
            notes.append(
                f"two workers are called {worker.name} and overwrite each other: pass rank= to init_capture"
            )
        kept.append(worker)
    workers = sorted(
        [*kept, *part.workers],
        key=lambda worker: (worker.identity.role, worker.identity.replica or 0, worker.identity.rank),
    )
    return msgspec.structs.replace(manifest, workers=workers, notes=list(dict.fromkeys(notes)))


def with_stages(worker: CaptureResult, stages: list[StageSpan]) -> CaptureResult:
    """Return a worker with the stages that its process's callback noted, which are this rank's own.

    Those that the worker marked itself under the same name are kept as they are.
    """
    stages = nested(worker.stages, stages)
    return worker if stages == worker.stages else msgspec.structs.replace(worker, stages=stages)


def nested(own: list[StageSpan], others: list[StageSpan]) -> list[StageSpan]:
    """Return one process's stages of two accounts, of which the first has the say about what both name."""
    names = {span.name for span in own}
    added = [span for span in others if span.name not in names]
    if not added:
        return own
    spans: list[StageSpan] = []
    ends: list[int] = []
    for span in sorted([*own, *added], key=lambda span: (span.begin_ns, -span.end_ns)):
        while ends and ends[-1] <= span.begin_ns:
            ends.pop()
        spans.append(msgspec.structs.replace(span, depth=len(ends)))
        ends.append(span.end_ns)
    return spans
