"""Clocks: reading them, and measuring how far a host's clock is from the controller's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from verl_profiling.manifest import ClockAnchor

__all__ = ["Handshake", "best_handshake", "now_ns", "read_anchor"]

now_ns = time.time_ns


def read_anchor() -> ClockAnchor:
    """Read the wall clock and the monotonic clock of this process at one instant."""
    return ClockAnchor(now_ns(), time.monotonic_ns())


@dataclass(frozen=True)
class Handshake:
    """One call to a worker, with the four timestamps of NTP (RFC 5905, section 8).

    Attributes:
        sent_ns: When the controller called, on its clock.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When the worker answered, on its clock.
        returned_ns: When the answer arrived, on the controller's clock.
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
        """How far the worker's clock is ahead: ``((t2 - t1) + (t3 - t4)) / 2``."""
        return ((self.received_ns - self.sent_ns) + (self.replied_ns - self.returned_ns)) // 2

    @property
    def error_ns(self) -> int:
        """Bound of the offset's error: half the round trip, rounded up."""
        return max(0, (self.round_trip_ns + 1) // 2)


def best_handshake(handshakes: Iterable[Handshake]) -> Handshake:
    """Return the handshake with the shortest round trip, which bounds the offset most tightly.

    Raises:
        ValueError: There is none.
    """
    return min(handshakes, key=lambda handshake: handshake.round_trip_ns)
