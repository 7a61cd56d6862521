"""The memory of this process and of its machine, as Linux tells them; elsewhere nothing is known."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Growth", "available_bytes", "give_back", "own_bytes"]

logger = logging.getLogger(__name__)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def own_bytes(root: str | Path = "") -> int | None:
    """Return the resident memory that belongs to this process alone: no files, nothing shared."""
    try:
        # A quarter of what Path.read_bytes takes; the watch reads it again and again.
        descriptor = os.open(f"{root}/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, resident, shared, *_ = os.read(descriptor, 256).split()
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * _PAGE_BYTES


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Growth:
    """How much more memory this process uses than when the object was made.

    What the allocator had in reserve may be used up without the process growing, so glibc is asked for what
    is in use, too. It walks over all that is free, which may take milliseconds: at most a thirtieth of the
    time goes into that.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._in_use = 0
        self._own_first = own_bytes()
        self._in_use_first = self._heap_bytes()

    def bytes(self) -> int | None:
        """Return it; ``None`` where the system does not tell."""
        own = own_bytes()
        if own is None or self._own_first is None:
            return None
        return max(0, own - self._own_first, self._heap_bytes() - self._in_use_first)

    def _heap_bytes(self) -> int:
        """Return what glibc has handed out; 0 with another allocator, or before glibc 2.33."""
        if time.monotonic() >= self._next_s:
            begin_s = time.thread_time()
            try:
                mallinfo2 = ctypes.CDLL(None).mallinfo2
            except (AttributeError, OSError):
                self._next_s = float("inf")
                return 0
            mallinfo2.restype = _Mallinfo2
            found = mallinfo2()
            self._in_use = found.uordblks + found.hblkhd
            self._next_s = time.monotonic() + 30 * (time.thread_time() - begin_s)
        return self._in_use


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still get: of the machine, and of each cgroup around it.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    found = [*_of_machine(root), *_of_cgroups(root)]
    return min(found) if found else None


def _of_machine(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith(b"MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield what each limit above this process leaves; files that can be dropped are not counted as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, droppable = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            droppable = "total_inactive_file"
        else:
            continue
        base = root / "sys/fs/cgroup" / top
        own = base / path.lstrip("/")
        for folder in dict.fromkeys((own, *own.parents)):
            if folder.is_relative_to(base):
                try:
                    most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                    yield max(0, most - used + _statistic(folder / "memory.stat", droppable))
                except (OSError, ValueError):  # the root has none, and "max" is no limit
                    continue


def _statistic(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def give_back() -> int:
    """Return freed memory to the system, which glibc would keep; return how many bytes that was.

    It takes a fifth of a second for a gigabyte, so call it in the background, and only after much was freed.
    """
    before = own_bytes()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return 0
    trim(0)
    after = own_bytes()
    given = max(0, before - after) if before is not None and after is not None else 0
    logger.info("%d MB of memory were given back to the system", given // 1_000_000)
    return given
