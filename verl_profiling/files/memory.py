"""Memory readings: of this process, and (Linux) available on the machine."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def own_bytes() -> int | None:
    """Return the resident memory of this process in bytes, without files and shared memory."""
    try:
        # Takes a quarter of the time of Path.read_bytes; the watch calls this often.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, resident, shared, *_ = os.read(descriptor, 256).split()
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * _PAGE_BYTES


def process_peak_bytes() -> int:
    """Return the highest resident size of this process in bytes,
    since its start or the last reset.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate: the least of the machine and its
    cgroups.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
    """
    found = list(_of_cgroups(root))
    with suppress(OSError):
        found.append(_statistic(root / "proc/meminfo", "MemAvailable:") * 1024)
    return min(found, default=None)


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes under each cgroup limit of this process;
    droppable file caches count as free.
    """
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, droppable = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            droppable = "total_inactive_file"
        else:
            continue
        base = root / "sys/fs/cgroup" / top
        lowest = base / path.lstrip("/")
        for folder in (lowest, *lowest.parents):
            if folder.is_relative_to(base):
                with suppress(OSError, ValueError):  # the root has none, and "max" is no limit
                    most, used = (
                        int((folder / limit).read_text()),
                        int((folder / usage).read_text()),
                    )
                    yield max(0, most - used + _statistic(folder / "memory.stat", droppable))


def _statistic(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0
