"""The side of rank 0: it says where a step is recorded, and makes one manifest of what all ranks recorded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import Aim, CaptureRequest, Finished
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.calls import Round
from verl_profiling.controller.channel import Channel
from verl_profiling.controller.gathering import Gathering, Part, joined_with, nested, with_stages
from verl_profiling.controller.peers import HANDSHAKE_S, HANDSHAKES, Ahead, Letter, Order, Peer, Pong, Until
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId, WorkerIdentity
from verl_profiling.manifest import CaptureResult, HostClock, Manifest
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Leader"]

_LEFT_EARLY_S = 10.0  # for ranks that may hang in a collective because another raised


class Leader(Peer):
    """Rank 0.

    Args:
        config: The settings.
        world_size: How many ranks there are.
        join: Opens the channel to the others.
        folders: The step folders.
    """

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
        made: CaptureRequest | None = None
        try:
            made = request()
        finally:  # where that failed, the others wait for an order, too
            self._asked = self._aimed_at(made.aim if made is not None else None)
            self._channel = self._channel or self._join()
            if self._channel is not None:
                order = Order(made, ProcessId.current().clock_domain)
                self._channel.put(f"{self._name}/order", msgspec.msgpack.encode(order))
        return made
        yield  # nobody is waited for, and yet it is a generator

    def announce(self, first: int, last: int, aim: Aim | None) -> None:
        """See :meth:`Alone.announce`."""
        channel = self._channel = self._channel or self._join()
        if channel is not None:
            asked = self._aimed_at(aim)
            ahead = Ahead(first, last, None if asked is self.others else list(asked))
            channel.put(self._ahead(), msgspec.msgpack.encode(ahead))
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
        stop_s = timeouts.stop_s if manifest.complete else min(_LEFT_EARLY_S, timeouts.stop_s)
        yield Until(lambda: gathering.look(self._silent, min(timeouts.start_s, stop_s)), stop_s)
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
        channel, self._channel = self._channel, None
        try:
            if channel is not None:
                yield from self._last_words(channel)
        finally:
            self._training_ended()

    def _last_words(self, channel: Channel) -> Iterator[Round]:
        waiting = set(self._heard)

        def ended() -> bool:
            for rank in sorted(waiting):
                gone = self._heard[rank].alive() is False
                data = channel.take(self._last_word(rank))
                if data is not None or gone:
                    waiting.discard(rank)
                for item in msgspec.msgpack.decode(data, type=list[Finished]) if data else ():
                    self._folders.note(item)
            return not waiting

        yield Until(ended, self._timeouts.finish_s)
        self._take_late()
        channel.close()

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
        for number in range(HANDSHAKES):
            sent_ns = clock.now_ns()
            self._channel.put(key.format("ping", number), b"ping")
            yield (letter := Letter(self._channel, key.format("pong", number), HANDSHAKE_S))
            if letter.value is None:
                break
            pong = msgspec.msgpack.decode(letter.value, type=Pong)
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
