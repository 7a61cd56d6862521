"""What reading a trace may take, all in one place: a small file can unpack to any number of events.

Where a limit is reached, reading ends there, what was read is kept, and a sentence says so.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import msgspec

from verl_profiling.units import byte_size

__all__ = ["LONGEST_US", "MAX_US", "Limits", "memory_available", "resident_bytes"]

MAX_US = 4e15
"""Largest time of an event, before and after its base: years from 1970 to 2096, should the base be 0."""

LONGEST_US = 1e15
"""Longest duration of an event."""

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUPS = (  # folder, limit, usage; version 2 and version 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_LEAST_BYTES = 1 << 30


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one trace is read. The commands have an option for each of the first four.

    Attributes:
        events: Events. Traces of eight ranks with 20 million events each are read whole.
        content_bytes: Bytes of the content, uncompressed.
        names: Different names of operators, of processes and of threads; the rest are counted together.
        memory_bytes: Memory of the reading process; by default three quarters of what it could get when
            it began.
        head_bytes: Bytes before the events, and behind them.
        event_bytes: Bytes of one event.
    """

    events: int = 30_000_000
    content_bytes: int = 64 << 30
    names: int = 1_000_000
    memory_bytes: int | None = None
    head_bytes: int = 16 << 20
    event_bytes: int = 16 << 20

    def reached(self, events: int) -> str:
        """Return which limit a process has reached that read so many events of a trace, or ``""``."""
        if events >= self.events:
            return f"stopped at the limit of {self.events:,} events (--max-events raises it)"
        allowed = _allowed_bytes() if self.memory_bytes is None else self.memory_bytes
        if (used := resident_bytes()) > allowed:
            return (
                f"stopped after {events:,} events: the process takes {byte_size(used)} of memory, "
                f"and the limit is {byte_size(allowed)} (--max-memory raises it)"
            )
        return ""


@cache
def _allowed_bytes() -> int:
    return max(memory_available() * 3 // 4, _LEAST_BYTES)


def memory_available() -> int:
    """Return how many bytes of memory this process can have, those that it has included."""
    free = [_counted(_MEMINFO).get("MemAvailable:", sys.maxsize >> 10) << 10]
    for folder, limit, usage in _CGROUPS:
        bound, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if bound.isdecimal() and used.isdecimal():
            cached = _counted(folder / "memory.stat")
            kept = int(used) - cached.get("inactive_file", 0) - cached.get("active_file", 0)
            free.append(max(int(bound) - kept, 0))
    return min(free) + resident_bytes()


def resident_bytes() -> int:
    """Return the memory of this process; 0 where the system has no /proc, so there is no limit either."""
    try:
        with _STATM.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _counted(path: Path) -> dict[str, int]:
    """Return the first number of each line by its first word."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
