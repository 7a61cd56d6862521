"""Waits of a process for a CPU, and their reasons, from ``/proc`` and cgroups; psutil has none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from verl_profiling.files.machine import cgroups, statistic

WAITS = Path("/proc/self/schedstat")
"""The kernel counts waits for a CPU if this exists."""

_STATISTICS = Path("/proc/stat")
_MATTERS = 0.5  # share of the waits from which throttling or a hypervisor is their cause
_WORKED = 0.01
"""Least CPU time of a thread whose wait counts, as a share of the wait.

Kernels (6.18) add the sleep of some threads to their waits as they wake. With eight busy processes
of higher priority on two CPUs, a thread that computes gets 2.7% of its wait.
"""


class CpuWaits:
    """The waits of this process for a CPU, reading by reading.

    Attributes:
        read_ns: Time of the last reading, on the monotonic clock of the machine.
    """

    def __init__(self) -> None:
        self._times: dict[int, tuple[int, int]] = {}
        self._outside_ns = (0, 0)
        self.read_ns = time.monotonic_ns()
        self.since_last()

    def since_last(self) -> tuple[float | None, str]:
        """Return the longest wait for a CPU of a thread that worked, as a share of the time since
        the last call, and the reason; ``None`` if unknown.
        """
        now_ns = time.monotonic_ns()
        since_ns, self.read_ns = max(1, now_ns - self.read_ns), now_ns
        before, self._times = self._times, _times_ns()
        throttled, stolen = outside = _outside_ns()
        throttled -= self._outside_ns[0]
        stolen -= self._outside_ns[1]
        self._outside_ns = outside
        most_ns = _longest_wait(before, self._times)
        if most_ns is None:
            return None, ""
        return min(1.0, most_ns / since_ns), _reason(most_ns, throttled, stolen)


def _longest_wait(
    before: Mapping[int, tuple[int, int]], now: Mapping[int, tuple[int, int]]
) -> int | None:
    """Return the longest wait of a thread that worked between two readings (ns); ``None`` if no
    thread is in both.
    """
    waits = []
    for thread in before.keys() & now.keys():
        ran_ns, waited_ns = (
            after - past for past, after in zip(before[thread], now[thread], strict=True)
        )
        waits.append(waited_ns if ran_ns >= _WORKED * waited_ns else 0)
    return max(waits, default=None)


def _reason(most_ns: int, throttled: int, stolen: int) -> str:
    """Return why a thread waited; empty if unknown.

    Args:
        most_ns: Its wait (ns).
        throttled: Throttled time of the container, added up over all CPUs (ns).
        stolen: Time that the hypervisor took, in the mean of all CPUs (ns).
    """
    # Of all CPUs, this thread waited on one.
    if throttled >= _MATTERS * most_ns * (os.cpu_count() or 1) > 0:
        return "its container had used up its limit of CPU time"
    if stolen >= _MATTERS * most_ns > 0:
        return "the hypervisor gave the CPUs to other machines"
    if throttled >= _MATTERS * most_ns > 0:
        return ""  # this thread was throttled, or others were, on other CPUs
    return "other processes used the CPUs"


def times_ns(thread: int) -> tuple[int, int]:
    """Return how long a thread of this process has had a CPU, and how long it has been ready to
    run and got none (ns).

    Raises:
        OSError: The thread has ended, or the kernel does not count.
    """
    ran_ns, waited_ns, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(ran_ns), int(waited_ns)


def _times_ns() -> dict[int, tuple[int, int]]:
    """Return :func:`times_ns` of the threads that Python knows, but for the package's own, by
    number.
    """
    times = {}
    for thread in threading.enumerate():
        if thread.native_id is not None and not thread.name.startswith("verl-profiling"):
            with suppress(OSError, ValueError):
                times[thread.native_id] = times_ns(thread.native_id)
    return times


def _outside_ns() -> tuple[int, int]:
    """Return for how long the container was throttled, and a CPU was taken from the machine, in
    the mean of all CPUs.
    """
    stolen = 0
    with suppress(OSError, ValueError, IndexError), _STATISTICS.open() as file:
        stolen = int(file.readline().split()[8]) * (10**9 // os.sysconf("SC_CLK_TCK"))
        stolen //= os.cpu_count() or 1
    return throttled_ns() or 0, stolen


def throttled_ns() -> int | None:
    """Return for how long the container was throttled, added up over all CPUs (ns)."""
    for folder, is_version_2 in cgroups("cpu"):
        with suppress(OSError, ValueError):
            if is_version_2:
                return statistic(folder / "cpu.stat", "throttled_usec") * 1000
            return statistic(folder / "cpu.stat", "throttled_time")
    return None
