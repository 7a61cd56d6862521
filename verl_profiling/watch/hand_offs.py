"""Memory of devices in a step: when the least was free, who held it, and what was held twice.

A process is read at the edges of its stages. Between two readings that differ, what it held is
unknown; then nothing is said of what others held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from operator import attrgetter

from verl_profiling.files.device_use import PARTS
from verl_profiling.files.step_summary import (
    BEGIN,
    END,
    DeviceHolder,
    DeviceReading,
    HandOff,
    Overlap,
    StageDevice,
    StepSummary,
)

OTHERS = ""
_SAME = 0.05  # readings that differ by less: torch's caches come and go in such pieces
_MATTERS = 0.01  # of the memory of a device
_Process = list[DeviceReading]
_at_ns = attrgetter("at_ns")


def add_device_memory(summary: StepSummary) -> None:
    """Set ``devices`` and ``hand_off`` of a step from the readings of its processes."""
    devices: dict[str, _Device] = {}
    stages: dict[tuple[str, str], StageDevice] = {}
    for use in [*summary.workers, *summary.loop]:  # a worker in the loop's process goes first
        if use.device is None:
            continue
        readings = [*use.device.each()]
        device = devices.setdefault(use.device.device, _Device(use.device.total_bytes))
        device.add(use.lane, use.device.pid, readings)
        for row in _stages(use.role, readings):
            key = row.role, row.stage
            stages[key] = max(row, stages.get(key, row), key=attrgetter("peak_bytes"))
    summary.devices = [*stages.values()]
    known = [device.hand_off() for device in devices.values() if device.total_bytes]
    summary.hand_off = min(known, key=attrgetter("free_bytes"), default=None)


def _stages(role: str, readings: Sequence[DeviceReading]) -> Iterator[StageDevice]:
    of_stage: dict[str, _Process] = {}
    before: dict[str, int] = {}
    peak = 0
    for reading in readings:
        before.setdefault(reading.stage, peak or reading.peak_bytes)
        peak = reading.peak_bytes
        of_stage.setdefault(reading.stage, []).append(reading)
    for stage, rows in of_stage.items():
        if not stage:
            continue
        sizes = [row.allocated_bytes for row in rows]
        peak = max(sizes)
        if rows[-1].peak_bytes > before[stage]:
            peak = rows[-1].peak_bytes
        yield StageDevice(
            role=role,
            stage=stage,
            begin_bytes=sizes[0] if rows[0].edge == BEGIN else None,
            end_bytes=sizes[-1] if rows[-1].edge == END else None,
            peak_bytes=peak,
        )


class _Device:
    """The readings of a device by all processes on it."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._processes: dict[str, _Process] = {}
        self._lanes: dict[int, str] = {}

    def add(self, lane: str, pid: int, readings: _Process) -> None:
        """Add the readings of a process; the loop and a worker may share it."""
        lane = self._lanes.setdefault(pid, lane)
        process = self._processes.setdefault(lane, [])
        process += readings
        process.sort(key=_at_ns)

    def hand_off(self) -> HandOff:
        """Return when the least memory was free."""
        free, lane, at = min(
            (reading.free_bytes, lane, at)
            for lane, process in self._processes.items()
            for at, reading in enumerate(process)
        )
        process = self._processes[lane]
        reading = process[at]
        held = self._held_at(reading)
        before = after = reading.stage
        if reading.edge == BEGIN:
            before = process[at - 1].stage if at else ""
        elif reading.edge == END:
            after = process[at + 1].stage if at + 1 < len(process) else ""
        holders = [self._holder(name, size, reading) for name, size in held.items() if size]
        return HandOff(
            lane=lane,
            before=before,
            after=after,
            free_bytes=free,
            total_bytes=self.total_bytes,
            holders=sorted(holders, key=attrgetter("held_bytes"), reverse=True),
            unread=[name for name in self._processes if name not in held],
            overlap=self._overlap(),
        )

    def _held_at(self, reading: DeviceReading) -> dict[str, int]:
        """Return what each holder had at a reading, as far as known; others if all are known."""
        held = {}
        for lane, process in self._processes.items():
            size = _size_at(process, reading.at_ns)
            if size is not None:
                held[lane] = size
        others = self.total_bytes - reading.free_bytes - sum(held.values())
        if len(held) == len(self._processes) and others >= 0:
            held[OTHERS] = others
        return held

    def _holder(self, lane: str, size: int, reading: DeviceReading) -> DeviceHolder:
        """Return a holder at a reading; of another process, its last reading has the rest."""
        process = self._processes.get(lane, ())
        index = bisect_right(process, reading.at_ns, key=_at_ns)
        if not index:
            return DeviceHolder(lane, size)
        own = process[index - 1]
        parts = {name: part for name, part in zip(PARTS, own.parts, strict=True) if part}
        return DeviceHolder(lane, size, own.reserved_bytes - own.allocated_bytes, parts)

    def _overlap(self) -> Overlap | None:
        """Return the largest overlap of two holders."""
        readings = sorted((row for rows in self._processes.values() for row in rows), key=_at_ns)
        held = [self._held_at(reading) for reading in readings]
        largest = None
        for first, second in combinations([*self._processes, OTHERS], 2):
            both = _held_by_both(held, first, second)
            size = max(both)
            if size <= max(_MATTERS * self.total_bytes, largest.size_bytes if largest else 0):
                continue
            at = both.index(size)
            begin = end = at
            while begin and 2 * both[begin - 1] >= size:
                begin -= 1
            while end + 1 < len(both) and 2 * both[end + 1] >= size:
                end += 1
            around = readings[max(0, begin - 1)], readings[min(end + 1, len(readings) - 1)]
            largest = Overlap(
                holder=self._holder(first, held[at][first], readings[at]),
                other=second,
                size_bytes=size,
                least_ns=readings[end].at_ns - readings[begin].at_ns,
                most_ns=around[1].at_ns - around[0].at_ns,
            )
        return largest


def _size_at(process: _Process, at_ns: int) -> int | None:
    """Return the memory of a process at a time (bytes); ``None`` if the memory changed around the
    time.
    """
    index = bisect_right(process, at_ns, key=_at_ns)
    if index and process[index - 1].at_ns == at_ns:
        return process[index - 1].reserved_bytes
    if not 0 < index < len(process):
        return None
    sizes = [reading.reserved_bytes for reading in process[index - 1 : index + 1]]
    return min(sizes) if max(sizes) - min(sizes) <= _SAME * max(sizes) else None


def _held_by_both(held: Sequence[Mapping[str, int]], first: str, second: str) -> list[int]:
    """Return what both holders had at each reading, above the least of each; 0 if unknown."""
    both = []
    least = {}
    for name in (first, second):
        least[name] = min((sizes[name] for sizes in held if name in sizes), default=0)
    for sizes in held:
        if first in sizes and second in sizes:
            both.append(min(sizes[name] - least[name] for name in (first, second)))
        else:
            both.append(0)
    return both
