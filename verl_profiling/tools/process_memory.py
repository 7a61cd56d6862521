"""Memory readings of Linux: of this process, its peak in each stage, and available on the machine."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from verl_profiling.tools.base import Marks
from verl_profiling.units import byte_size

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USUAL_WORKERS_OF_A_HOST = 8
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SET_BACK = b"5"  # proc_pid_clear_refs(5): resets the peak to the current resident size
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


def memory_overrun(needed: int, share: float, workers: int) -> str:
    """Return why a recording must end because writing it needs too much memory; empty if it may go on.

    Args:
        needed: The additional bytes that writing it needs.
        share: Share of the available memory that the recordings of a host may take.
        workers: Number of captured workers. At most 8 count for this host, unless a launcher sets its number.
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
        f"writing it takes about {byte_size(needed)} more memory, and limits.memory_share={share:g} of "
        f"{byte_size(available)}{divided} is less"
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate: the least of the machine and its cgroups.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
    """
    found = list(_of_cgroups(root))
    with suppress(OSError):
        found.append(_statistic(root / "proc/meminfo", "MemAvailable:") * 1024)
    return min(found, default=None)


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes under each cgroup limit of this process; droppable file caches count as free."""
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
                    most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                    yield max(0, most - used + _statistic(folder / "memory.stat", droppable))


def _statistic(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, value, *_ = line.split()
        if key == name:
            return int(value)
    return 0


class StagePeaks:
    """Determines for each stage the highest value of a high-water mark while it ran.

    The mark is read and reset at the begin and end of every stage, and the value counts for every
    stage that was open, so stages may nest and overlap.

    Attributes:
        marks: The marks of a recording, which measure its stages.

    Args:
        take: Returns the peaks by name since its last call, and resets them. Empty if they cannot
            be reset: no numbers instead of wrong ones.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]]) -> None:
        self.marks = Marks(self.begin, self.end)
        self._take = take
        self._open: list[tuple[str, dict[str, int]]] = []
        self._peaks: dict[str, float] = {}

    def begin(self, name: str) -> tuple[str, dict[str, int]]:
        """Record that a stage begins; return its name and its peaks so far."""
        self._fold()
        self._open.append((name, {}))
        return self._open[-1]

    def end(self, stage: tuple[str, dict[str, int]]) -> None:
        """Record that a stage ends; of several runs of a stage, the highest peaks are kept."""
        self._fold()
        self._open = [other for other in self._open if other is not stage]
        name, peaks = stage
        for what, peak in peaks.items():
            key = f"stage/{name}/{what}"
            self._peaks[key] = max(self._peaks.get(key, 0.0), float(peak))

    def metrics(self) -> Mapping[str, float]:
        """Return the peaks of the stages that have ended, as ``stage/<name>/<what>``."""
        return self._peaks

    def _fold(self) -> None:
        for what, peak in self._take().items():
            for _, peaks in self._open:
                peaks[what] = max(peaks.get(what, 0), peak)


def process_peak_bytes() -> int:
    """Return the highest resident size of this process in bytes, since its start or the last reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES


def take_host_peak() -> Mapping[str, int]:
    """Return the peak resident size of this process since the last call, and reset it.

    The mark is the kernel's, so the value that ``getrusage`` returns elsewhere in the process is
    reset too.
    """
    peak = process_peak_bytes()
    try:
        _CLEAR_REFS.write_bytes(_SET_BACK)
    except OSError:
        return {}
    return {"peak_rss_bytes": peak}
