"""Reads clocks, and measures the offset between a host's clock and the controller's.

During a recording, the time of a process is monotonic, even if the wall clock is set. Measured
offsets are in the manifest, and :meth:`verl_profiling.manifest.Manifest.offset_ns` applies them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

_wall_ns = now_ns = time.time_ns
_held = 0  # recordings that use monotonic time now


def hold() -> None:
    """Let ``now_ns`` follow the monotonic clock, so that setting the wall clock moves no event of
    a recording.
    """
    global now_ns, _held
    if not _held:
        monotonic_ns = time.monotonic_ns
        ahead_ns = _wall_ns() - monotonic_ns()
        now_ns = lambda: ahead_ns + monotonic_ns()  # noqa: E731
    _held += 1


def release() -> None:
    """End a recording that called :func:`hold`; only :func:`follow` returns to the wall clock."""
    global _held
    _held -= 1


def follow() -> None:
    """Let ``now_ns`` read the wall clock again, unless a recording still uses :func:`hold`."""
    global now_ns
    if not _held:
        now_ns = _wall_ns


@cache
def _kernel_domain() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


_domain = _kernel_domain


def domain() -> str:
    """Return a name shared by exactly the processes that read the same system clock.

    Containers on one machine have different host names but one kernel, hence one clock. So the name
    is the kernel's boot id, or without one the host name.
    """
    return _domain()


@contextmanager
def replaced(clock: Callable[[], int], named: str) -> Iterator[None]:
    """Replace the wall clock during the block, for tests.

    Args:
        clock: Function that returns unix nanoseconds.
        named: Name of the clock, which :func:`domain` returns meanwhile.
    """
    global now_ns, _wall_ns, _domain
    before = now_ns, _wall_ns, _domain
    now_ns, _wall_ns, _domain = clock, clock, lambda: named  # type: ignore[assignment]
    try:
        yield
    finally:
        now_ns, _wall_ns, _domain = before


class ClockAnchor(msgspec.Struct, frozen=True):
    """One instant read on two clocks of one process, in nanoseconds."""

    unix_ns: int
    monotonic_ns: int


def read_anchor() -> ClockAnchor:
    """Read the wall clock and the monotonic clock of this process at one instant."""
    return ClockAnchor(_wall_ns(), time.monotonic_ns())


@dataclass(frozen=True)
class Handshake:
    """One call to a worker, with the four timestamps of NTP (RFC 5905, section 8).

    Attributes:
        sent_ns: Time of the call, on the controller's clock.
        received_ns: Arrival of the call, on the worker's clock.
        replied_ns: Sending of the reply, on the worker's clock.
        returned_ns: Arrival of the reply, on the controller's clock.
    """

    sent_ns: int
    received_ns: int
    replied_ns: int
    returned_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Time in transit, without the worker's own work: ``(t4 - t1) - (t3 - t2)``."""
        return (self.returned_ns - self.sent_ns) - (self.replied_ns - self.received_ns)

    @property
    def offset_ns(self) -> int:
        """Worker's clock minus controller's clock: ``((t2 - t1) + (t3 - t4)) / 2``."""
        return ((self.received_ns - self.sent_ns) + (self.replied_ns - self.returned_ns)) // 2

    @property
    def error_ns(self) -> int:
        """Bound of the offset's error: half the round trip, rounded up."""
        return max(0, (self.round_trip_ns + 1) // 2)


def best_handshake(handshakes: Iterable[Handshake]) -> Handshake:
    """Return the handshake with the shortest round trip, which bounds the offset most tightly.

    Raises:
        ValueError: There is no handshake.
    """
    return min(handshakes, key=lambda handshake: handshake.round_trip_ns)
