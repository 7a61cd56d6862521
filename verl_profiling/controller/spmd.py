"""One program on every rank: each process has a callback of its own, and all of them make one manifest.

Rank 0 leads: it decides where a step is recorded and writes the manifest. The others follow: they begin and
end the same steps, because the schedule decides from the step's number alone, drive their own workers,
and hand over what these recorded. Nobody waits for a rank longer than the timeouts say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import Aim, CaptureRequest, Finished
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.calls import Round, Target
from verl_profiling.controller.channel import (
    Channel,
    StoreChannel,
    default_store,
    find_leader_files,
    lead_files,
)
from verl_profiling.controller.gathering import Begun, Gathering, Part, joined_with, nested, with_stages
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId, WorkerIdentity
from verl_profiling.manifest import CaptureResult, HostClock, Manifest
from verl_profiling.ranks import process_rank
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Alone", "find_peers", "has_peers", "knows_peers", "leads"]

logger = logging.getLogger(__name__)

LEFT_EARLY_S = 10.0  # for ranks that may hang in a collective because another raised
_HANDSHAKES = 8
_HANDSHAKE_S = 5.0
_joined: Counter[str] = Counter()


class _Order(msgspec.Struct, frozen=True):
    """What rank 0 tells the others at a step's begin; without a request, the step is not captured."""

    request: CaptureRequest | None
    clock_domain: str


class _Ahead(msgspec.Struct, frozen=True, array_like=True):
    """Steps that rank 0 is going to capture, and the ranks that take part besides; ``None``: all."""

    first: int
    last: int
    ranks: list[int] | None


class _Pong(msgspec.Struct, frozen=True):
    received_ns: int
    replied_ns: int


class _Until(Round):
    """Waits until something holds, or until the time is up."""

    def __init__(self, holds: Callable[[], bool], timeout_s: float) -> None:
        super().__init__((), timeout_s)
        self._holds = holds

    def wait(self) -> None:
        """See :class:`Round`."""
        deadline = time.monotonic() + self.timeout_s
        pause_s = 0.0002
        while not self._holds() and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    async def wait_async(self) -> None:
        """See :class:`Round`."""
        await asyncio.to_thread(self.wait)


class Alone:
    """A callback that has no peers: it decides, and writes what its workers recorded.

    Attributes:
        writes: Whether this process writes the manifests.
        processes: How many processes take part.
        others: The ranks that follow this one.
    """

    writes = True
    processes = 1
    others: Sequence[int] = ()

    @property
    def unfinished(self) -> set[Path]:
        """The step folders of which other processes may still send what they recorded."""
        return set()

    def agree(
        self, step: int, request: Callable[[], CaptureRequest | None]
    ) -> Generator[Round, None, CaptureRequest | None]:
        """Return the request of a step that begins; ``None``: it is not captured."""
        yield from ()
        return request()

    def expected(self, workers: list[CaptureResult]) -> list[CaptureResult]:
        """Return what stands for the workers of all processes until their results are there."""
        return workers

    def begun(self, workers: Iterable[WorkerIdentity]) -> None:
        """Note that this process's workers have begun the step."""

    def begin_telling(self) -> None:
        """Begin a training: what was told of the steps of an earlier one is not of this one."""

    def tell(self, steps: bytes, last: bool = False) -> bool:
        """Leave word of this rank's steps for rank 0; return whether there was room for it.

        Args:
            steps: What there is to tell.
            last: Training ends; for this there is always room.
        """
        return False

    def told(self, rank: int, last: bool = False) -> bytes | None:
        """Return what a rank has told of its steps since; nobody is waited for."""
        return None

    def announce(self, first: int, last: int, aim: Aim | None) -> None:
        """Tell the ranks that it is aimed at of a capture that the schedule does not know."""

    def told_who(self, rank: int, role: str, number: int) -> None:
        """Note a rank's role, and its rank in that role."""

    def announced(self) -> tuple[int, int] | None:
        """Return the steps of the next capture that rank 0 has announced, if there is one."""
        return None

    def conclude(
        self, manifest: Manifest, folder: Path, finished: list[Finished]
    ) -> Generator[Round, None, Manifest | None]:
        """Return the whole manifest; ``None``: another process writes it.

        Args:
            manifest: What this process knows.
            folder: The step folder.
            finished: Artifacts that were finished since; those of other processes are added.
        """
        yield from ()
        return manifest

    def end(self, finished: list[Finished]) -> Generator[Round, None, None]:
        """Hand over, or take in, what was finished since."""
        yield from ()


def find_peers(config: ProfilingConfig, targets: list[Target], folders: StepFolders) -> Alone:
    """Return how this callback works together with those of other processes.

    It has peers where the process is a rank of several, and drives nothing but objects of its own:
    one that drives Ray actors or worker groups is the only one, whatever its environment says.

    Raises:
        ConfigError: ``spmd: true``, and nothing says which rank this is.
    """
    if config.spmd and process_rank() is None:
        raise ConfigError(
            "spmd", "no rank: initialise torch.distributed, or set RANK and WORLD_SIZE as torchrun does"
        )
    place = _place(config, targets)
    if place is None:
        return Alone()
    rank, world_size = place
    store = default_store()
    if store is not None:
        _joined["store"] += 1
        channel: Channel = StoreChannel(store, f"verl_profiling/{_joined['store']}")
        join: Callable[[], Channel | None] = lambda: channel  # noqa: E731
    else:
        path, since_ns = config.local_folder, clock.now_ns()
        join = lambda: lead_files(path) if rank == 0 else find_leader_files(path, since_ns)  # noqa: E731
    logger.info("rank %d of %d: the ranks' callbacks record together", rank, world_size)
    return _Leader(config, world_size, join, folders) if rank == 0 else _Follower(config, rank, join)


def leads(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether this callback writes what a run has one of: it is alone, or rank 0.

    Before it has workers, only rank 0 of several does.
    """
    place = _place(config, targets) if knows_peers(config, targets) else process_rank()
    return place is None or place[0] == 0


def knows_peers(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether it is known yet if several callbacks record together: its workers may have to tell."""
    place = process_rank()
    return bool(targets) or config.spmd is not None or place is None or place[1] == 1


def has_peers(config: ProfilingConfig, targets: list[Target]) -> bool:
    """Return whether several callbacks record together."""
    return _place(config, targets) is not None


def _place(config: ProfilingConfig, targets: list[Target]) -> tuple[int, int] | None:
    """Return rank and world size where several callbacks record together, else ``None``."""
    place = process_rank()
    local = bool(targets) and all(target.is_local for target in targets)
    if config.spmd is False or place is None or place[1] == 1 or not (local or config.spmd):
        return None
    return place


class _Peer(Alone):
    """What leader and followers share: names for captures that all ranks come to by themselves."""

    def __init__(self, config: ProfilingConfig, join: Callable[[], Channel | None]) -> None:
        self._timeouts = config.timeouts
        self._join = join
        self._channel: Channel | None = None
        self._seen: Counter[int] = Counter()
        self._name = ""
        self._announced = 0
        self._training = 0

    def begin_telling(self) -> None:
        """See :meth:`Alone.begin_telling`."""
        self._training += 1

    def _word(self, rank: int, last: bool) -> str:
        return f"watch/{self._training}/{rank}" + ("/last" if last else "")

    def _next(self, step: int) -> None:
        self._seen[step] += 1
        self._name = f"{step}.{self._seen[step]}"


class _Follower(_Peer):
    writes = False

    def __init__(self, config: ProfilingConfig, rank: int, join: Callable[[], Channel | None]) -> None:
        super().__init__(config, join)
        self._rank = rank
        self._order: _Order | None = None
        self._patience_s = self._timeouts.start_s

    def agree(
        self, step: int, request: Callable[[], CaptureRequest | None]
    ) -> Generator[Round, None, CaptureRequest | None]:
        """Wait for rank 0 to say where the step is recorded."""
        self._next(step)
        self._order = None
        yield _Until(self._has_order, self._patience_s)
        if self._order is None:
            logger.error(
                "step %d: rank %d is not captured: rank 0 has not begun this step within %g s; has it a "
                "callback with workers and the same settings? Where it has none, set spmd: false",
                step,
                self._rank,
                self._patience_s,
            )
            self._patience_s = 0.0
            return None
        self._patience_s = self._timeouts.start_s
        return self._order.request

    def announced(self) -> tuple[int, int] | None:
        """See :meth:`Alone.announced`; nobody is waited for."""
        channel = self._reached()
        while channel is not None and (data := channel.get(f"ahead/{self._announced}")) is not None:
            self._announced += 1
            ahead = msgspec.msgpack.decode(data, type=_Ahead)
            if ahead.ranks is None or self._rank in ahead.ranks:
                return ahead.first, ahead.last
        return None

    def tell(self, steps: bytes, last: bool = False) -> bool:
        """See :meth:`Alone.tell`; there is room once rank 0 has taken what was told before."""
        channel = self._reached()
        word = self._word(self._rank, last)
        if channel is None or (not last and channel.has(word)):
            return False
        channel.put(word, steps)
        return True

    def begun(self, workers: Iterable[WorkerIdentity]) -> None:
        """Tell rank 0 who will answer."""
        self._put("begun", Begun(ProcessId.current(), list(workers)))

    def conclude(
        self, manifest: Manifest, folder: Path, finished: list[Finished]
    ) -> Generator[Round, None, Manifest | None]:
        """Hand over what the workers recorded, and measure this clock where it is not rank 0's."""
        order = self._order
        assert order is not None
        workers = [with_stages(worker, manifest.stages) for worker in manifest.workers]
        notes = [f"rank {self._rank}: {note}" for note in manifest.notes]
        self._put("part", Part(ProcessId.current(), workers, notes, finished))
        if order.clock_domain != ProcessId.current().clock_domain:
            yield from self._answer_pings()
        return None

    def end(self, finished: list[Finished]) -> Generator[Round, None, None]:
        """Hand over what was finished since."""
        if self._channel is not None:
            self._channel.put(f"end/{self._rank}", msgspec.msgpack.encode(finished))
        yield from ()

    def _reached(self) -> Channel | None:
        """Return the channel of rank 0, which has another in its next training."""
        if self._channel is None or self._channel.closed:
            self._channel = self._join()
        return self._channel

    def _has_order(self) -> bool:
        channel = self._reached()
        data = channel.get(f"{self._name}/order") if channel is not None else None
        if data is not None:
            self._order = msgspec.msgpack.decode(data, type=_Order)
        return data is not None

    def _answer_pings(self) -> Generator[Round, None, None]:
        for number in range(_HANDSHAKES):
            yield (ping := _Letter(self._channel, f"{self._name}/ping/{self._rank}/{number}", _HANDSHAKE_S))
            if ping.value is None or ping.value == b"enough":
                return
            self._put(f"pong/{number}", _Pong(ping.received_ns, clock.now_ns()))

    def _put(self, what: str, value: msgspec.Struct) -> None:
        if self._channel is not None:
            kind, _, number = what.partition("/")
            key = f"{self._name}/{kind}/{self._rank}" + (f"/{number}" if number else "")
            self._channel.put(key, msgspec.msgpack.encode(value))


class _Letter(_Until):
    """Waits for one value."""

    def __init__(self, channel: Channel | None, key: str, timeout_s: float) -> None:
        super().__init__(self._arrived, timeout_s)
        self._channel = channel
        self._key = key
        self.value: bytes | None = None
        self.received_ns = 0

    def _arrived(self) -> bool:
        self.value = self._channel.take(self._key) if self._channel is not None else None
        self.received_ns = clock.now_ns()
        return self.value is not None


class _Leader(_Peer):
    def __init__(
        self,
        config: ProfilingConfig,
        world_size: int,
        join: Callable[[], Channel | None],
        folders: StepFolders,
    ) -> None:
        super().__init__(config, join)
        self.others = range(1, world_size)
        self.processes = world_size
        self._who: dict[int, tuple[str, int]] = {}
        self._asked: Sequence[int] = self.others
        self._folders = folders
        self._heard: dict[int, ProcessId] = {}
        self._missing: list[Gathering] = []
        self._silent: set[int] = set()

    def told(self, rank: int, last: bool = False) -> bytes | None:
        """See :meth:`Alone.told`."""
        channel = self._channel = self._channel or self._join()
        return channel.take(self._word(rank, last)) if channel is not None else None

    @property
    def unfinished(self) -> set[Path]:
        return {gathering.folder for gathering in self._missing}

    def agree(
        self, step: int, request: Callable[[], CaptureRequest | None]
    ) -> Generator[Round, None, CaptureRequest | None]:
        """Tell the others where the step is recorded; nobody is waited for."""
        self._next(step)
        self._take_late()
        made = request()
        self._asked = self._aimed_at(made.aim if made is not None else None)
        self._channel = self._channel or self._join()
        if self._channel is not None:
            order = _Order(made, ProcessId.current().clock_domain)
            self._channel.put(f"{self._name}/order", msgspec.msgpack.encode(order))
        return made
        yield  # nobody is waited for, and yet it is a generator

    def announce(self, first: int, last: int, aim: Aim | None) -> None:
        """See :meth:`Alone.announce`."""
        channel = self._channel = self._channel or self._join()
        if channel is not None:
            asked = self._aimed_at(aim)
            ahead = _Ahead(first, last, None if asked is self.others else list(asked))
            channel.put(f"ahead/{self._announced}", msgspec.msgpack.encode(ahead))
            self._announced += 1

    def told_who(self, rank: int, role: str, number: int) -> None:
        """See :meth:`Alone.told_who`."""
        self._who[rank] = role, number

    def _aimed_at(self, aim: Aim | None) -> Sequence[int]:
        """Return the other ranks, but for those of which it is known that they are not meant."""
        if aim is None or aim.ranks is None or aim.roles is None or ROLLOUT_ROLE in aim.roles:
            return self.others
        meant = {(role, number) for role in aim.roles for number in aim.ranks}
        return [rank for rank in self.others if self._who.get(rank) in (None, *meant)]

    def expected(self, workers: list[CaptureResult]) -> list[CaptureResult]:
        """See :meth:`Alone.expected`; the other ranks are expected to have the workers that this one has."""
        others = [
            msgspec.structs.replace(
                worker,
                identity=WorkerIdentity(
                    role=worker.identity.role, rank=rank, host="unknown", clock_domain="unknown", pid=0
                ),
                artifacts=[],
            )
            for rank in self._asked
            for worker in workers[:1]
        ]
        return [*workers, *others]

    def conclude(
        self, manifest: Manifest, folder: Path, finished: list[Finished]
    ) -> Generator[Round, None, Manifest | None]:
        """Gather what the others recorded."""
        assert self._channel is not None
        gathering = Gathering(self._channel, self._name, folder, self._asked, self._heard)
        timeouts = self._timeouts
        stop_s = timeouts.stop_s if manifest.complete else min(LEFT_EARLY_S, timeouts.stop_s)
        yield _Until(lambda: gathering.look(self._silent, min(timeouts.start_s, stop_s)), stop_s)
        self._silent = {rank for rank in gathering.open if rank not in self._heard}
        clocks = list(manifest.clocks)
        for rank, part in sorted(gathering.parts.items()):
            yield from self._measure(rank, part, clocks)
        workers = [with_stages(worker, manifest.stages) for worker in manifest.workers]
        stages = manifest.stages  # the loop is the workers' own: what they mark are stages of the step
        for worker in manifest.workers:
            stages = nested(stages, worker.stages)
        manifest = msgspec.structs.replace(manifest, workers=workers, clocks=clocks, stages=stages)
        for part in gathering.parts.values():
            manifest = joined_with(manifest, part)
        manifest = gathering.with_missing(manifest)
        if gathering.open:
            self._missing.append(gathering)
        finished += [item for part in gathering.parts.values() for item in part.finished]
        return manifest

    def end(self, finished: list[Finished]) -> Generator[Round, None, None]:
        """Wait for those that took part to finish their artifacts, and take in what was late."""
        channel = self._channel
        if channel is None:
            return
        waiting = {rank for rank, process in self._heard.items()}

        def ended() -> bool:
            for rank in sorted(waiting):
                gone = self._heard[rank].alive() is False
                data = channel.take(f"end/{rank}")
                if data is not None or gone:
                    waiting.discard(rank)
                for item in msgspec.msgpack.decode(data, type=list[Finished]) if data else ():
                    self._folders.note(item)
            return not waiting

        yield _Until(ended, self._timeouts.finish_s)
        self._take_late()
        channel.close()
        self._channel = None

    def _take_late(self) -> None:
        for gathering in list(self._missing):
            for part in gathering.late():
                self._folders.update(gathering.folder, partial(joined_with, part=part))
            if not gathering.open:
                self._missing.remove(gathering)

    def _measure(self, rank: int, part: Part, clocks: list[HostClock]) -> Generator[Round, None, None]:
        """Measure a rank's clock, unless it is known as that of another rank."""
        assert self._channel is not None
        domain = part.process.clock_domain
        if domain == ProcessId.current().clock_domain:
            return
        key = f"{self._name}/{{}}/{rank}/{{}}"
        if any(clock.clock_domain == domain for clock in clocks):
            self._channel.put(key.format("ping", 0), b"enough")
            return
        handshakes = []
        for number in range(_HANDSHAKES):
            sent_ns = clock.now_ns()
            self._channel.put(key.format("ping", number), b"ping")
            yield (letter := _Letter(self._channel, key.format("pong", number), _HANDSHAKE_S))
            if letter.value is None:
                break
            pong = msgspec.msgpack.decode(letter.value, type=_Pong)
            handshakes.append(Handshake(sent_ns, pong.received_ns, pong.replied_ns, letter.received_ns))
        if handshakes:
            best = best_handshake(handshakes)
            clocks.append(
                HostClock(
                    host=part.process.host,
                    clock_domain=domain,
                    offset_ns=best.offset_ns,
                    error_ns=best.error_ns,
                    closing_offset_ns=best.offset_ns,
                    closing_error_ns=best.error_ns,
                    samples=len(handshakes),
                )
            )
