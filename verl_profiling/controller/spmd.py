"""SPMD loops: every rank runs the same program, with its own callback and its own result file.

The ranks exchange messages through the default store of ``torch.distributed``, on a separate
connection. Keys are ``run`` (the run's folder), ``requests`` (requested captures),
``watch`` (step summaries) and ``clock`` (handshakes between hosts). A background thread reads the
store. Only the first captured step waits for another rank: rank 0 publishes ``run``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.session import process_session
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.run_claim import RunPlace
from verl_profiling.controller.worker_calls import Target
from verl_profiling.identity import ProcessId, WorkerIdentity, process_rank
from verl_profiling.manifest import CaptureResult, HostClock, StageSpan
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Decision

logger = logging.getLogger(__name__)

PROBLEMS = (OSError, RuntimeError, ValueError, msgspec.MsgspecError)
"""Exceptions of the store of ``torch.distributed``, and of decoding its values."""

HANDSHAKES = 8  # round trips per measurement of a clock; the shortest one counts
_HANDSHAKE_S = 2.0  # longest wait for a message: rank 0 looks once a second
_LOOK_S = 1.0
_FIRST_LOOK_S = 0.02  # the first captured step waits for the run's place

_trainings = count(1)


class Ranks:
    """The connection of one rank to the other ranks of its loop.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.
        store: The default store of ``torch.distributed``.

    Attributes:
        processes: On rank 0, the processes of the other ranks that have connected, by rank.
        clock: The offset of this host's clock to rank 0's; ``None`` unless this rank measured it.
        place: The run's folder as published by rank 0; ``None`` before.
        ended: Set when training ends.
    """

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        from torch.distributed import PrefixStore

        connection = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore(f"verl_profiling/{next(_trainings)}", connection)
        self.rank = rank
        self.world_size = world_size
        self.others = range(1, world_size)
        self.processes: dict[int, ProcessId] = {}
        self.clock: HostClock | None = None
        self.place: RunPlace | None = None
        self._known = threading.Event()
        self._patience = 1
        self.ended = threading.Event()
        self._requests: list[Decision] = []
        self._sent = self._received = self._answered = 0
        self._thread = threading.Thread(
            target=self._listen, name="verl-profiling-ranks", daemon=True
        )
        self._thread.start()
        logger.info(
            "rank %d of %d: the callbacks of all ranks make common captures", rank, world_size
        )

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides on captures, and writes the manifests."""
        return self.rank == 0

    def publish(self, place: RunPlace) -> None:
        """Publish the run's folder to the other ranks; rank 0 does so once."""
        if self.place is None:
            self.place = place
            self._store.set("run", msgspec.msgpack.encode(place))

    def wait_for_run(self, timeout_s: float) -> None:
        """Wait until rank 0 has published the run's folder; only the first call waits."""
        self._known.wait(timeout_s * self._patience)
        self._patience = 0

    def announce(self, capture: Decision) -> None:
        """Announce a capture to the other ranks, some seconds before its step begins."""
        self._store.set(f"requests/{self._sent}", msgspec.msgpack.encode(capture))
        self._sent += 1

    def announced(self) -> list[Decision]:
        """Return the captures that rank 0 has announced since the last call."""
        announced, self._requests = self._requests, []
        return announced

    def joined(
        self, stages: list[StageSpan], results: list[CaptureResult], notes: list[str], why: str
    ) -> tuple[list[StageSpan], list[CaptureResult]]:
        """Add the callback's stages, notes and clock to the result of this process.

        Args:
            stages: The loop's stages.
            results: Results of the workers of this rank.
            notes: The callback's notes.
            why: Why the step ended early.

        Returns:
            The stages of the loop and of the worker in this process, and the amended results.
        """
        here = ProcessId.current()
        noted = []
        if not self.leads:
            noted = [f"rank {self.rank}: {note}" for note in notes]
        for worker in results:
            if worker.process == here:
                stages = _nested(stages, worker.stages)

        def amended(result: CaptureResult) -> CaptureResult:
            return replace(
                result,
                stages=_nested(result.stages, stages),
                notes=[*result.notes, *noted],
                cut_short=why,
                clock=self.clock,
            )

        joined = []
        for worker in results:
            result = None
            if worker.process == here:
                result = process_session().amend(worker.capture_id, amended)
            joined.append(result or worker)
        return stages, joined

    def expected(
        self, model: CaptureResult, selection: CaptureSelection | None
    ) -> list[CaptureResult]:
        """Return placeholder results for the other ranks, until their result files exist.

        Args:
            model: The placeholder result of a worker of this rank.
            selection: The selection of the capture; its ``ranks`` limit the list.
        """
        expected = []
        chosen = None if selection is None else selection.ranks
        for rank in self.others:
            if chosen is not None and rank not in chosen:
                continue
            process = self.processes.get(rank)
            who = process or ProcessId(host="unknown", clock_domain="unknown", pid=0)
            identity = WorkerIdentity(
                role=model.identity.role,
                rank=rank,
                host=who.host,
                clock_domain=who.clock_domain,
                pid=who.pid,
            )
            reason = f"rank {rank} has written no result"
            expected.append(replace(model, identity=identity, process=process, reason=reason))
        return expected

    def end(self) -> None:
        """Stop the background thread."""
        self.ended.set()
        self._thread.join(_LOOK_S)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or ``None`` without waiting."""
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value

    def take(self, key: str) -> bytes | None:
        """Return and delete the value of a key; ``None`` for a missing key."""
        value = self.get(key)
        if value is not None:
            self._store.delete_key(key)
        return value

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        self._store.set(key, value)

    def _listen(self) -> None:
        """Read the store until training ends; a lost store is logged once, and training goes on."""
        pause_s = _FIRST_LOOK_S
        try:
            if not self.leads:
                self._store.set(f"run/{self.rank}", msgspec.msgpack.encode(ProcessId.current()))
            while not self.ended.wait(pause_s):
                self._look()
                waits = self.place is None or len(self.processes) < self.leads * len(self.others)
                pause_s = _FIRST_LOOK_S if waits else _LOOK_S
        except PROBLEMS as error:
            if not self.ended.is_set():
                logger.warning(
                    "rank %d: the other ranks cannot be reached: %s", self.rank, in_a_line(error)
                )

    def _look(self) -> None:
        if self.leads:
            for rank in self.others:
                if rank not in self.processes and (data := self.get(f"run/{rank}")) is not None:
                    self.processes[rank] = msgspec.msgpack.decode(data, type=ProcessId)
            while self._answered < self._store.add("clock/requests", 0):
                self._answer(self._answered + 1)
                self._answered += 1
            return
        if self.place is None and (data := self.get("run")) is not None:
            place = msgspec.msgpack.decode(data, type=RunPlace)
            self._measure(place.clock_domain)
            self.place = place
            self._known.set()
        while (data := self.get(f"requests/{self._received}")) is not None:
            self._received += 1
            self._requests.append(msgspec.msgpack.decode(data, type=Decision))

    def _measure(self, domain: str) -> None:
        """Measure the clock offset between this host and rank 0's; one rank per host calls this."""
        here = ProcessId.current()
        if here.clock_domain == domain or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        number = self._store.add("clock/requests", 1)
        handshakes = []
        for turn in range(HANDSHAKES):
            sent_ns = clock.now_ns()
            self._store.set(f"clock/{number}/ping/{turn}", b"ping")
            data = self._await(f"clock/{number}/pong/{turn}")
            if data is None:
                break
            received_ns, replied_ns = msgspec.msgpack.decode(data, type=tuple[int, int])
            # A handshake has the offset of rank 0's clock; this host's offset is its negative.
            handshakes.append(Handshake(sent_ns, received_ns, replied_ns, clock.now_ns()))
        if handshakes:
            self.clock = measured_clock(here.host, here.clock_domain, handshakes, [], sign=-1)

    def _answer(self, number: int) -> None:
        for turn in range(HANDSHAKES):
            if self._await(f"clock/{number}/ping/{turn}") is None:
                return
            received_ns = clock.now_ns()
            self._store.set(
                f"clock/{number}/pong/{turn}", msgspec.msgpack.encode((received_ns, clock.now_ns()))
            )

    def _await(self, key: str) -> bytes | None:
        deadline = time.monotonic() + _HANDSHAKE_S
        while (value := self.get(key)) is None and time.monotonic() < deadline:
            if self.ended.wait(0.0005):
                return None
        return value


def measured_clock(
    host: str, domain: str, opening: list[Handshake], closing: list[Handshake], sign: int = 1
) -> HostClock:
    """Return the clock offset of a host, from the best handshakes at the begin and the end
    of a capture.
    """
    first, last = best_handshake(opening), best_handshake(closing or opening)
    return HostClock(
        host=host,
        clock_domain=domain,
        offset_ns=sign * first.offset_ns,
        error_ns=first.error_ns,
        closing_offset_ns=sign * last.offset_ns,
        closing_error_ns=last.error_ns,
        samples=len(opening) + len(closing),
    )


def place_of(config: ProfilingConfig, targets: list[Target]) -> tuple[int, int]:
    """Return this process's rank, and the number of ranks whose callbacks make common captures.

    A callback that captures on its own is ``(0, 1)``.
    The ranks of a job make common captures if all workers are local objects. A callback with Ray
    actors or worker groups is on its own, unless ``spmd`` is true.
    """
    together = config.spmd or (config.spmd is None and all(target.is_local for target in targets))
    return (together and process_rank()) or (0, 1)


def knows_place(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether :func:`place_of` is final: unless ``spmd`` is set,
    later workers can change it.
    """
    return bool(targets) or config.spmd is not None or (process_rank() or (0, 1))[1] == 1


def find_ranks(config: ProfilingConfig, targets: list[Target]) -> tuple[Ranks | None, str]:
    """Return the connection to the other ranks, or ``None``; and the reason if connecting failed.

    Args:
        config: The settings.
        targets: The workers of this callback.
    """
    place = place_of(config, targets)
    if config.spmd and process_rank() is None:
        return None, "spmd: no rank: initialise torch.distributed before the first step"
    if place[1] == 1 or not (targets or config.spmd):
        return None, ""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None, (
            f"rank {place[0]} of {place[1]} captures nothing: torch.distributed is not "
            "initialised; call init_process_group() before the first captured step, or set spmd: "
            "false if each process is a loop of its own"
        )
    return Ranks(*place, distributed.distributed_c10d._get_default_store()), ""


def in_a_line(error: BaseException) -> str:
    """Return the type and first line of an error;
    errors of a store have stack frames in further lines.
    """
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _nested(first: list[StageSpan], second: list[StageSpan]) -> list[StageSpan]:
    """Merge the stages of worker and callback; of a name in both lists, keep those of the first."""
    names = {span.name for span in first}
    added = [span for span in second if span.name not in names]
    if not added:
        return first
    spans: list[StageSpan] = []
    ends: list[int] = []
    for span in sorted([*first, *added], key=lambda span: (span.begin_ns, -span.end_ns)):
        while ends and ends[-1] <= span.begin_ns:
            ends.pop()
        spans.append(replace(span, depth=len(ends)))
        ends.append(span.end_ns)
    return spans
