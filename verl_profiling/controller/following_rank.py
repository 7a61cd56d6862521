"""The side of a rank that follows rank 0: it hears where a step is recorded, and hands over what was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest, Finished
from verl_profiling.controller.calls import Round
from verl_profiling.controller.channel import Channel
from verl_profiling.controller.gathering import Begun, Part, with_stages
from verl_profiling.controller.peers import HANDSHAKE_S, HANDSHAKES, Ahead, Letter, Order, Peer, Pong, Until
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Follower"]

logger = logging.getLogger(__name__)


class Follower(Peer):
    """Any other rank.

    Args:
        config: The settings.
        rank: Which one.
        join: Finds the channel of rank 0, or nothing while there is none.
    """

    writes = False

    def __init__(self, config: ProfilingConfig, rank: int, join: Callable[[], Channel | None]) -> None:
        super().__init__(config, join)
        self._rank = rank
        self._order: Order | None = None
        self._patience_s = self._timeouts.start_s

    def agree(
        self, step: int, request: Callable[[], CaptureRequest | None]
    ) -> Generator[Round, None, CaptureRequest | None]:
        """Wait for rank 0 to say where the step is recorded."""
        self._next(step)
        self._order = None
        yield Until(self._has_order, self._patience_s)
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
        while channel is not None and (data := channel.get(self._ahead())) is not None:
            self._announced += 1
            ahead = msgspec.msgpack.decode(data, type=Ahead)
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
        """Hand over what was finished since. Rank 0 may have ended: it waits for those that recorded."""
        word = self._last_word(self._rank)
        self._training_ended()
        if self._channel is not None:
            try:
                self._channel.put(word, msgspec.msgpack.encode(finished))
            except (OSError, RuntimeError) as error:
                if finished:
                    logger.warning("rank %d: rank 0 is not told what was finished: %s", self._rank, error)
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
            self._order = msgspec.msgpack.decode(data, type=Order)
        return data is not None

    def _answer_pings(self) -> Generator[Round, None, None]:
        for number in range(HANDSHAKES):
            yield (ping := Letter(self._channel, f"{self._name}/ping/{self._rank}/{number}", HANDSHAKE_S))
            if ping.value is None or ping.value == b"enough":
                return
            self._put(f"pong/{number}", Pong(ping.received_ns, clock.now_ns()))

    def _put(self, what: str, value: msgspec.Struct) -> None:
        if self._channel is not None:
            kind, _, number = what.partition("/")
            key = f"{self._name}/{kind}/{self._rank}" + (f"/{number}" if number else "")
            self._channel.put(key, msgspec.msgpack.encode(value))
