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
    free = list(_of_cgroups(root))
    with suppress(OSError):
        free.append(_statistic(root / "proc/meminfo", "MemAvailable:") * 1024)
    return min(free, default=None)


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes under each cgroup limit of this process;
    droppable file caches count as free.
    """
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
            names = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        lowest = base / path.lstrip("/")
        for folder in (lowest, *lowest.parents):
            if folder.is_relative_to(base):
                with suppress(OSError, ValueError):  # the root has none, and "max" is no limit
                    yield _free_in(folder, *names)


def _free_in(folder: Path, limit: str, usage: str, droppable: str) -> int:
    """Return the free bytes of a cgroup, from its files for the limit and the usage."""
    most = int((folder / limit).read_text())
    used = int((folder / usage).read_text())
    return max(0, most - used + _statistic(folder / "memory.stat", droppable))


def _statistic(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0
