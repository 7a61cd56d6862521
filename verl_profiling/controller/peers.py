"""What callbacks of several processes are to each other, and what they say, leave and wait for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import Aim, CaptureRequest, Finished
from verl_profiling.controller.calls import Round
from verl_profiling.controller.channel import Channel
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, Manifest
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["HANDSHAKES", "HANDSHAKE_S", "Ahead", "Alone", "Letter", "Order", "Peer", "Pong", "Until"]

HANDSHAKES = 8
HANDSHAKE_S = 5.0


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


class Order(msgspec.Struct, frozen=True):
    """What rank 0 tells the others at a step's begin; without a request, the step is not captured."""

    request: CaptureRequest | None
    clock_domain: str


class Ahead(msgspec.Struct, frozen=True, array_like=True):
    """Steps that rank 0 is going to capture, and the ranks that take part besides; ``None``: all."""

    first: int
    last: int
    ranks: list[int] | None


class Pong(msgspec.Struct, frozen=True):
    received_ns: int
    replied_ns: int


class Until(Round):
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


class Letter(Until):
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


class Peer(Alone):
    """What leader and followers share: names for captures that all ranks come to by themselves."""

    def __init__(self, config: ProfilingConfig, join: Callable[[], Channel | None]) -> None:
        self._timeouts = config.timeouts
        self._join = join
        self._channel: Channel | None = None
        self._seen: Counter[int] = Counter()
        self._name = ""
        self._announced = 0
        self._training = 1

    def _training_ended(self) -> None:
        """Begin all names anew: what nobody took of this training is not of the next one."""
        self._training += 1
        self._announced = 0
        self._seen.clear()

    def _word(self, rank: int, last: bool) -> str:
        return f"watch/{self._training}/{rank}" + ("/last" if last else "")

    def _next(self, step: int) -> None:
        self._seen[step] += 1
        self._name = f"{self._training}.{step}.{self._seen[step]}"

    def _ahead(self) -> str:
        return f"ahead/{self._training}/{self._announced}"

    def _last_word(self, rank: int) -> str:
        return f"end/{self._training}/{rank}"
