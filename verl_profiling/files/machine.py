"""Readings of the machine of this process: memory, free disk, and devices.

No function initializes a device; a process that has used no device has none.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec

from verl_profiling.manifest import Device
from verl_profiling.units import byte_size

logger = logging.getLogger(__name__)

VARIABLE = "NVTX_INJECTION64_PATH"
"""Environment variable with the library that NVTX loads at the first range of a process."""

NO_INJECTION = "/nonexistent/verl-profiling-no-nvtx-injection.so"
"""A path that NVTX cannot load. While the variable has it, start-up hooks of an image do not set
the variable either.
"""

_VARIABLES = {
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
_UUID = re.compile(r"(?:gpu-)?((?:mig-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
_USUAL_WORKERS_OF_A_HOST = 8


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
    free = [*_of_cgroups(root)]
    with suppress(OSError):
        free.append(statistic(root / "proc/meminfo", "MemAvailable:") * 1024)
    return min(free, default=None)


class MemoryFiles(NamedTuple):
    """The names of a cgroup's files, and of the lines in them, of one version of cgroups."""

    limit: str
    usage: str
    droppable: str
    shared: str
    cache: str
    events: str


_VERSION_2 = MemoryFiles(
    "memory.max", "memory.current", "inactive_file", "shmem", "file", "memory.events"
)
_VERSION_1 = MemoryFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_shmem",
    "total_cache",
    "memory.oom_control",
)


def cgroups(controller: str, root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Return the folders of this process's cgroups, the lowest first, and whether they are of
    version 2.

    Args:
        controller: The controller of version 1, e.g. ``memory``; version 2 has one tree for all.
        root: The folder that contains ``proc`` and ``sys``.
    """
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    return _folders_of(text, controller, root)


@cache  # the watch reads them every two seconds, and they hardly ever change
def _folders_of(text: str, controller: str, root: Path) -> list[tuple[Path, bool]]:
    """Return the folders of the cgroups in a text of ``proc/self/cgroup``, see :func:`cgroups`."""
    folders = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            base /= controller
            if controller not in controllers.split(","):
                continue
        lowest = base / path.lstrip("/")
        for folder in (lowest, *lowest.parents):
            if folder.is_relative_to(base):
                folders.append((folder, not controllers))
    return folders


def memory_cgroups(root: Path = Path("/")) -> Iterator[tuple[Path, MemoryFiles]]:
    """Yield the folders of this process's cgroups, the lowest first, and the names of the files."""
    for folder, is_version_2 in cgroups("memory", root):
        yield folder, _VERSION_2 if is_version_2 else _VERSION_1


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes that all processes of this container may use; 0 if unknown."""
    limits = []
    with suppress(OSError):
        limits.append(statistic(root / "proc/meminfo", "MemTotal:") * 1024)
    for folder, files in memory_cgroups(root):
        with suppress(OSError, ValueError):  # the root has none, and "max" is no limit
            limits.append(int((folder / files.limit).read_text()))
    return min(limits, default=0)


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes under each cgroup limit of this process;
    droppable file caches count as free.
    """
    for folder, files in memory_cgroups(root):
        with suppress(OSError, ValueError):  # the root has none, and "max" is no limit
            most = int((folder / files.limit).read_text())
            used = int((folder / files.usage).read_text())
            yield max(0, most - used + statistic(folder / "memory.stat", files.droppable))


def statistic(path: Path, name: str) -> int:
    """Return the number of a line ``name number`` in a file of the kernel; 0 without the line.

    Raises:
        OSError: There is no such file.
    """
    _, _, rest = f"\n{path.read_text()}".partition(f"\n{name} ")
    return int(rest.split(maxsplit=1)[0]) if rest else 0


def no_room(folder: Path, least_bytes: int) -> str:
    """Return why an existing or planned folder has too little free space;
    empty if there is enough.

    Args:
        folder: The folder.
        least_bytes: The setting ``limits.min_free_bytes``.
    """
    try:
        free = _free_bytes(folder)
    except OSError as error:
        return f"the free space of {folder} cannot be read: {error.strerror}"
    if free >= least_bytes:
        return ""
    return (
        f"{folder} has {byte_size(free)} of free space, less than "
        f"limits.min_free_bytes={byte_size(least_bytes)}"
    )


def _free_bytes(folder: Path) -> int:
    """Return the free space for a folder, which may not exist yet;
    a folder that exists costs one call.
    """
    try:
        return shutil.disk_usage(folder).free
    except (FileNotFoundError, NotADirectoryError):
        return _free_bytes(folder.parent)


def no_memory(needed: int, share: float, workers: int) -> str:
    """Return why a recording must end, as writing it would need too much memory; empty if it
    need not.

    Args:
        needed: The additional bytes that writing the recording needs.
        share: The setting ``limits.memory_share``.
        workers: Number of captured workers. This host has the number that its launcher sets,
            else at most 8 of them.
    """
    available = available_bytes()
    if available is None:
        return ""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE") or ""
    here = int(local) if local.isdecimal() else min(workers, _USUAL_WORKERS_OF_A_HOST)
    if needed <= share * available / max(1, here):
        return ""
    divided = f", divided by {here} workers," if here > 1 else ""
    return (
        f"writing it takes about {byte_size(needed)} more memory, and "
        f"limits.memory_share={share:g} of the free "
        f"{byte_size(available)}{divided} is less"
    )


def used_devices() -> list[Device]:
    """Return the accelerators that this process has used, as far as known."""
    torch: Any = sys.modules.get("torch")
    found: list[Device] = []
    try:
        for kind in ("npu", "cuda", "xpu"):
            module = getattr(torch, kind, None)
            if module is None or not module.is_initialized():
                continue
            visible = _visible(kind)
            for index in range(module.device_count()):
                if index == module.current_device() or module.memory_reserved(index):
                    id = visible[index] if index < len(visible) else str(index)
                    uuid = str(getattr(module.get_device_properties(index), "uuid", ""))
                    device = _device(kind, index, id)
                    found.append(msgspec.structs.replace(device, uuid=_uuid(uuid) or device.uuid))
            break
    except Exception as error:  # drivers and devices fail in ways that are not ours to report
        logger.debug("the devices of this process are unknown: %s: %s", type(error).__name__, error)
        return []
    return found


def engine_devices(
    kind: str, ranks: int, numbers: Sequence[int], ids: Sequence[str] | None
) -> list[Device]:
    """Return the devices of an engine that computes in processes of its own, in order of rank.

    Args:
        kind: Device type of the engine.
        ranks: Number of ranks of the engine.
        numbers: By rank, the position of the rank's device in ``ids``; the devices of further ranks
            are unknown.
        ids: Numbers (on this host) or UUIDs of the engine's devices; ``None`` for the visible
            devices of this process. Then an engine on CPUs has none.
    """
    visible = _visible(kind) if ids is None else ids
    every = ids is None and not visible and kind != "cpu"
    known = [Device(kind=kind)] * ranks
    for rank, number in enumerate(numbers[:ranks]):
        if every or number < len(visible):
            known[rank] = _device(kind, number, str(number) if every else visible[number])
    return known


def _visible(kind: str) -> tuple[str, ...]:
    value = next(filter(None, map(os.environ.get, _VARIABLES.get(kind, ()))), "")
    return tuple(id.strip() for id in value.split(",") if id.strip())


def _device(kind: str, index: int, id: str) -> Device:
    place = f"{socket.gethostname()}/{id}" if id.isdecimal() else ""
    return Device(kind=kind, index=index, uuid=_uuid(id), place=place)


def _uuid(text: str) -> str:
    found = _UUID.fullmatch(text.strip().lower())
    return found[1] if found else ""


def injected_cupti() -> str:
    """Return a sentence with the remedy if the environment makes NVTX load CUPTI; else ``""``.

    CUPTI serves one subscriber per process. In some images, NVTX loads libcupti, which subscribes
    at the first NVTX range. Then torch's profiler is refused later, and records only the host.
    """
    path = os.environ.get(VARIABLE, "")
    if "cupti" not in PurePath(path).name.lower():
        return ""
    return (
        f"{VARIABLE}={path} makes NVTX the only subscriber of CUPTI, so torch records no kernels; "
        f"set {VARIABLE}={NO_INJECTION} where workers are started"
    )


def lost_kernels() -> str:
    """Return the possible reason why torch recorded no event of a device."""
    return injected_cupti() or (
        "another profiler may hold CUPTI (Nsight Systems, a monitor of the node, an NVTX library "
        f"named by {VARIABLE}), or nothing ran there"
    )


def process_status(path: Path) -> tuple[str, str, str]:
    """Return name, state and parent of a process from its ``/proc/<pid>/stat``.

    Raises:
        OSError: There is no such process.
    """
    before, _, fields = path.read_text(errors="replace").rpartition(")")
    status, parent = fields.split()[:2]
    return before.partition("(")[2], status, parent
