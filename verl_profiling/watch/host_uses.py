"""Memory that grows step by step, by holder, and processes that got no CPU.

A holder is a process with one kind of memory, or a machine with one. Page cache is no holder: the
kernel drops it when memory is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import nlargest
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from verl_profiling.files.host_use import KINDS, SHORT_OF_CPU, MachineUse, ProcessUse
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.files.watch_signs import HELD, MEMORY, sign_of
from verl_profiling.settings.config import Anomaly
from verl_profiling.units import byte_size
from verl_profiling.watch.suspicion import Suspicion, healthiest

_STORE, _SHARED = "store", "machine"
_ORDER = (_STORE, KINDS[0], HELD, *KINDS[1:], _SHARED)
"""Kinds of memory: of those that grow together, the first one is the holder.

What a child or another process maps is in several of them.
"""

_NAMES = {
    HELD: "memory of",
    "own": "host memory of",
    "pinned": "pinned memory of",
    "shared": "shared memory of",
    "children": "child processes of",
    _STORE: "Ray's object store on",
    _SHARED: "shared memory and tmpfs of",
}

LEAST_BYTES = 64 << 20
"""Less growth is the work of allocators and caches, however small the holder is."""

_CHUNK = 2  # readings: the least of two is not raised by one that fell into a peak
_MINIMA = 7  # of chunks, so that growth shows after 14 readings
_COARSER = 4  # minima of a level are one of the next, where slow growth shows
_LEVELS = 6  # the last one spans some 14,000 readings

_STEADY = 0.7
"""Least growth in the second half, as a share of the first half's; less is a warm-up."""

_TOGETHER = 0.5  # share of the largest growth from which a holder may be its cause
_MORE_THAN_PEERS = 2.0
_SLOW_CLOCK = 0.95  # of the others' clock; boards of one type differ by less


class _Holder(NamedTuple):
    who: str
    kind: str


class _Reading(NamedTuple):
    size: int
    step: int


_Growth = tuple[_Reading, _Reading]
"""The first and the last floor between which a holder grew."""


class _Floors:
    """The least sizes of a holder in chunks of readings, at several lengths of chunks."""

    def __init__(self) -> None:
        self._levels: list[deque[_Reading]] = [deque(maxlen=_MINIMA) for _ in range(_LEVELS)]
        self._chunks: list[list[_Reading]] = [[] for _ in range(_LEVELS)]

    def add(self, reading: _Reading, share: float, least: int) -> _Growth | None:
        """Add a reading; return the first and last floor if the holder has grown steadily.

        Args:
            reading: The reading.
            share: The least growth, as a share of the first floor.
            least: The least growth (bytes).
        """
        most = _CHUNK
        growth = None
        for level, chunk in zip(self._levels, self._chunks, strict=True):
            chunk.append(reading)
            if len(chunk) < most:
                break
            reading = min(chunk)
            level.append(reading)
            chunk.clear()
            most = _COARSER
            growth = growth or _growth_in(level, share, least)
        return growth


def _growth_in(level: deque[_Reading], share: float, least: int) -> _Growth | None:
    first, half, last = level[0], level[len(level) // 2], level[-1]
    grown = last.size - first.size
    if len(level) < _MINIMA or grown < max(share * first.size, least):
        return None
    sizes = [reading.size for reading in level]
    is_steady = last.size - half.size >= _STEADY * (half.size - first.size)
    return (first, last) if is_steady and sizes == sorted({*sizes}) else None


class MemoryGrowth:
    """Finds holders whose memory grows steadily.

    Args:
        options: Its ``memory`` is the least growth, as a share.
    """

    def __init__(self, options: Anomaly) -> None:
        self._share = options.memory
        self._floors: dict[_Holder, _Floors] = {}
        self._least: dict[_Holder, int] = {}
        self._grown: dict[_Holder, _Growth] = {}
        self._read: dict[str, int] = {}
        self._machines: dict[str, MachineUse] = {}

    def add(self, summary: StepSummary) -> None:
        """Add the readings of a step."""
        if self._share is None:
            return
        for holder, size in self._sizes(summary):
            floors = self._floors.get(holder)
            if floors is None:
                floors = self._floors[holder] = _Floors()
            least = self._least.get(holder, LEAST_BYTES)
            growth = floors.add(_Reading(size, summary.step), self._share, least)
            if growth is not None:
                self._grown[holder] = growth

    def suspicion(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if a holder has grown since the last one.

        Growth in several processes of a role is one suspicion, because they run the same code.
        """
        grown, self._grown = self._grown, {}
        if not grown:
            return None
        bytes_of = {holder: last.size - first.size for holder, (first, last) in grown.items()}
        enough = _TOGETHER * max(bytes_of.values())
        causes = [holder for holder in grown if bytes_of[holder] >= enough]
        cause = min(causes, key=lambda one: (_ORDER.index(one.kind), -bytes_of[one]))
        for holder, size in bytes_of.items():  # growth that goes on is noticed as it doubles
            self._least[holder] = 2 * size
            self._floors.pop(holder)
        return self._suspicion(cause, *grown[cause], summary)

    def _sizes(self, summary: StepSummary) -> Iterator[tuple[_Holder, int]]:
        """Yield the holders that were read in a step, with their bytes."""
        machines = {}
        seen = set()
        # The loop comes last: a worker in its process says more, and has the same reading.
        for use in [*summary.workers, *summary.loop]:
            if use.held_bytes:
                yield _Holder(use.lane, HELD), use.held_bytes
            if use.host_use is None or use.host_use[0].at_ns in seen:
                continue
            seen.add(use.host_use[0].at_ns)
            if not self._is_new(use.lane, use.host_use[0]):
                continue
            process, machine = use.host_use
            for kind in KINDS:
                yield _Holder(use.lane, kind), getattr(process, kind)
            self._machines[use.lane] = machines[machine.host] = machine
        for machine in machines.values():
            self._machines[machine.host] = machine
            yield _Holder(machine.host, _STORE), machine.store_bytes
            yield _Holder(machine.host, _SHARED), machine.shared_bytes - machine.store_bytes

    def _is_new(self, lane: str, process: ProcessUse) -> bool:
        before, self._read[lane] = self._read.get(lane), process.at_ns
        return before != process.at_ns

    def _suspicion(
        self, cause: _Holder, first: _Reading, last: _Reading, summary: StepSummary
    ) -> Suspicion:
        grown = last.size - first.size
        text = (
            f"step {summary.step}: {_NAMES[cause.kind]} {cause.who} has grown by "
            f"{byte_size(grown)} since step {first.step}, to {byte_size(last.size)}"
        )
        machine = self._machines.get(cause.who)
        if machine is not None and cause.kind != HELD and machine.limit_bytes:
            left = machine.limit_bytes - machine.used_bytes
            steps = left * (last.step - first.step) // grown
            text += (
                f"; at this pace {machine.host} is full ({byte_size(machine.limit_bytes)}) "
                f"in {steps:,} steps"
            )
        lanes = {use.lane: use for use in summary.processes}
        suspects = [*lanes.keys() & {cause.who}]
        alike = {}
        if suspects:
            alike = {
                lane: use.held_bytes
                for lane, use in lanes.items()
                if use.role == lanes[cause.who].role and use.held_bytes is not None
            }
        return Suspicion(
            noticed=summary.step,
            sign=MEMORY,
            suspects=suspects,
            peers=healthiest(alike, suspects) if alike else [],
            value=float(last.size),
            median=float(first.size),
            memory=cause.kind,
            history=[float(first.size), float(last.size)],
            reason=text,
            is_over=not suspects,  # a capture of processes would not show a machine's memory
        )


class HostUses:
    """The last reading of each process."""

    def __init__(self) -> None:
        self._last: dict[str, ProcessUse] = {}

    def add(self, summary: StepSummary) -> None:
        """Keep the readings of a step."""
        for use in filter(_was_read, summary.processes):
            self._last[use.lane] = use.host_use[0]  # type: ignore[index]

    def explained(self, suspicion: Suspicion) -> Suspicion:
        """Return the suspicion; its reason also says which suspect lacked CPU, or has a throttled
        device.

        Without a suspect, the process of the stage that lacked most CPU is named; without a stage,
        the one of all processes.
        """
        if sign_of(suspicion).unit.seconds is None:  # it is not slow
            return suspicion
        waits = {lane: use.no_cpu for lane, use in self._last.items() if use.no_cpu is not None}
        lanes = suspicion.suspects
        if not lanes:
            among = [lane for lane in suspicion.everyone or waits if lane in waits]
            lanes = nlargest(1, among, key=waits.__getitem__)
        said = []
        for lane in lanes:
            others = [share for other, share in waits.items() if other not in lanes]
            share = waits.get(lane, 0.0)
            if share < SHORT_OF_CPU:
                continue
            said.append(f"{lane} was ready to run and got no CPU for {share:.0%} of the time")
            if others and share >= _MORE_THAN_PEERS * max(others):
                said[-1] += f" (others: up to {max(others):.0%})"
            said[-1] += f": {self._last[lane].why or 'it is not known why'}"
        said += self._throttled(suspicion)
        return replace(suspicion, reason="; ".join([suspicion.reason, *said]))

    def _throttled(self, suspicion: Suspicion) -> Iterator[str]:
        """Yield a clause on each suspect whose device is throttled, and slower than the others."""
        busy = {}
        for lane, use in self._last.items():
            if use.clock is not None and not use.clock.is_idle:
                busy[lane] = use.clock
        others = [clock.mhz for lane, clock in busy.items() if lane not in suspicion.suspects]
        for lane in suspicion.suspects:
            clock = busy.get(lane)
            if clock is None or not clock.why or not others:
                continue
            usual = median(others)
            if clock.mhz < _SLOW_CLOCK * usual:
                yield (
                    f"the device of {lane} ran at {clock.mhz:,} MHz (others: {usual:,.0f}): it is "
                    f"throttled by {clock.why}"
                )


def _was_read(use: RankUse) -> bool:
    return use.host_use is not None
