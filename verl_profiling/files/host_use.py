"""Memory by kind of a process and of its machine, from ``/proc`` and cgroups.

psutil reads the same files, but not shared memory apart from files, and it finds child processes by
reading all processes of the machine. A file that is missing costs its own
numbers only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_profiling.files.cpu_waits import WAITS, CpuWaits, throttled_ns
from verl_profiling.files.device_clocks import DeviceClock
from verl_profiling.files.machine import (
    available_bytes,
    memory_cgroups,
    memory_limit,
    statistic,
)
from verl_profiling.manifest import Count

KINDS = ("own", "pinned", "shared", "children")
"""The kinds of memory of a process, in order of how much they say about its cause."""

_MOST_CHILDREN = 64
_RAY = ("raylet", "gcs_server")
"""Below these are Ray's processes: workers, which read themselves, and the object store."""

_OWN_LINE, _SHARED_LINE = "RssAnon:", "RssShmem:"
_PRESSURE = Path("/proc/pressure/cpu")
SHORT_OF_CPU = 0.2
"""Share of the time in which a process was ready to run and got no CPU, from which it is said."""


class ProcessUse(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The memory of a process, in bytes, and its waits for a CPU.

    Attributes:
        at_ns: Time of the reading, on the monotonic clock of the machine.
        own: Resident memory of its own: no files, and nothing shared.
        pinned: Host memory that torch has pinned for copies to a device.
        shared: Resident shared memory that it has touched, in tmpfs too.
        children: Own memory of its child processes, such as those of a ``DataLoader``.
        no_cpu: Share of the time since the last reading in which a thread of Python was ready to
            run, and got no CPU; ``None`` if unknown.
        why: Why it got none, as a clause; empty if unknown.
        clock: The clock of its device; ``None`` if unknown.
    """

    at_ns: int = 0
    own: Count = 0
    pinned: Count = 0
    shared: Count = 0
    children: Count = 0
    no_cpu: float | None = None
    why: str = ""
    clock: DeviceClock | None = None


class MachineUse(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The memory of a machine, or of the container on it, in bytes.

    Attributes:
        host: Name of the machine.
        shared_bytes: Shared memory and files in tmpfs, mapped or not.
        store_bytes: The part of it that Ray's object store has touched so far.
        cache_bytes: Page cache of files on disks; the kernel drops it when memory is short.
        used_bytes: Memory that cannot be dropped.
        limit_bytes: The least of the machine's memory and the limits of the container.
    """

    host: str
    shared_bytes: Count = 0
    store_bytes: Count = 0
    cache_bytes: Count = 0
    used_bytes: Count = 0
    limit_bytes: Count = 0


class HostReader:
    """Reads a process and its machine again and again; each call costs some 0.3 ms.

    Args:
        folder: Folder with a file ``<lane>.<pid>.json`` of each watched process, which is no child
            of another one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waits = CpuWaits()

    def process(self) -> ProcessUse:
        """Return the use of this process."""
        own, shared = _resident("self")
        no_cpu, why = self._waits.since_last()
        return ProcessUse(
            at_ns=self._waits.read_ns,
            own=own,
            pinned=_pinned_bytes(),
            shared=shared,
            children=self._of_children(),
            no_cpu=no_cpu,
            why=why,
        )

    def _of_children(self) -> int:
        children = [*_children("self")]
        if not children:
            return 0
        watched = set()
        with suppress(OSError):
            watched = {name.split(".")[-2] for name in os.listdir(self._folder) if "." in name}  # noqa: PTH208
        return sum(_own_below(pid, watched) for pid in children)


def machine_use() -> MachineUse:
    """Return the use of this machine."""
    limit, available = memory_limit(), available_bytes()
    shared = cache = 0
    for folder, files in memory_cgroups():
        with suppress(OSError, ValueError):
            shared = statistic(folder / "memory.stat", files.shared)
            cache = statistic(folder / "memory.stat", files.cache) - shared
            break
    else:
        with suppress(OSError):
            shared = statistic(Path("/proc/meminfo"), "Shmem:") * 1024
            cache = statistic(Path("/proc/meminfo"), "Cached:") * 1024 - shared
    return MachineUse(
        host=socket.gethostname(),
        shared_bytes=shared,
        store_bytes=_store_bytes(),
        cache_bytes=max(0, cache),
        used_bytes=0 if available is None else max(0, limit - available),
        limit_bytes=limit,
    )


def oom_kills() -> int:
    """Return how many processes of this container the kernel has killed for memory."""
    for folder, files in memory_cgroups():
        with suppress(OSError, ValueError):
            return statistic(folder / files.events, "oom_kill")
    with suppress(OSError, ValueError):
        return statistic(Path("/proc/vmstat"), "oom_kill")
    return 0


def unread() -> list[str]:
    """Return a sentence on each file of the kernel that is missing here, and what it would tell."""
    missing = []
    if not WAITS.exists():
        missing.append(f"no {WAITS}: a process that got no CPU is not told from one that computes")
    if not _PRESSURE.exists():
        missing.append(f"no {_PRESSURE}: the pressure on CPUs is unknown")
    if not any((folder / files.limit).exists() for folder, files in memory_cgroups()):
        missing.append("no memory cgroup: the limit is the machine's memory")
    if throttled_ns() is None:
        missing.append("no cpu.stat of a cgroup: throttling is unknown")
    return missing


def cpu_pressure() -> str:
    """Return the kernel's share of 10 s in which a process waited for a CPU, e.g. ``47.16``."""
    with suppress(OSError, IndexError):
        return _PRESSURE.read_text().split("avg10=")[1].split()[0]
    return ""


def _resident(pid: str) -> tuple[int, int]:
    """Return own and shared resident memory of a process (bytes); zeros if it has ended."""
    own = shared = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(_OWN_LINE):
                own = int(line.split()[1]) * 1024
            elif line.startswith(_SHARED_LINE):
                shared = int(line.split()[1]) * 1024
                break
    return own, shared


def _children(pid: str) -> Iterator[str]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError):
                yield from Path(f"/proc/{pid}/task/{task}/children").read_text().split()


def _own_below(pid: str, watched: Collection[str]) -> int:
    """Return the own memory of a process and its descendants (bytes), without watched processes."""
    total = 0
    waiting = [pid]
    for _ in range(_MOST_CHILDREN):
        if not waiting:
            break
        below = waiting.pop()
        name = ""
        with suppress(OSError):
            name = Path(f"/proc/{below}/comm").read_text().strip()
        if below not in watched and name not in _RAY:
            total += _resident(below)[0]
            waiting += _children(below)
    return total


def _pinned_bytes() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    with suppress(Exception):  # another torch, or a failed device; training reports it
        if cuda is not None and cuda.is_initialized():
            return int(cuda.host_memory_stats()["allocated_bytes.current"])
    return 0


def _store_bytes() -> int:
    """Return what Ray's object store of this machine has touched of its memory (bytes).

    Its files in tmpfs have no name any more, but the raylet, which started this worker or was
    started by this driver, keeps them open.
    """
    total = 0
    for pid in (str(os.getppid()), *_children("self")):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != _RAY[0]:
                continue
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if "/plasma" in str(descriptor.readlink()):
                        total += descriptor.stat().st_blocks * 512
    return total
