"""What of a trace goes into the timeline."""

from __future__ import annotations

import msgspec

from verl_profiling.timeline.reader import Event

__all__ = ["Keep"]


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events; with nothing set it keeps all of them.

    Attributes:
        min_us: Drops complete events (``ph == "X"``) shorter than this.
        windows_ns: Drops what lies outside all of these spans (unix nanoseconds on the
            controller's clock); empty for no such limit.
    """

    min_us: float = 0.0
    windows_ns: tuple[tuple[int, int], ...] = ()

    def select(self, events: list[Event], base_ns: int) -> list[Event]:
        """Return the events that are kept.

        Args:
            events: Events of one trace.
            base_ns: Unix nanoseconds, on the controller's clock, of their ``ts == 0``.
        """
        if self.min_us:
            events = [e for e in events if e.ph != "X" or (e.dur or 0.0) >= self.min_us]
        if self.windows_ns:
            windows = [((begin - base_ns) / 1000, (end - base_ns) / 1000) for begin, end in self.windows_ns]
            events = [e for e in events if e.ts is None or _overlaps(e.ts, e.dur or 0.0, windows)]
        return events


def _overlaps(ts: float, dur: float, windows: list[tuple[float, float]]) -> bool:
    return any(ts < end and ts + dur >= begin for begin, end in windows)
