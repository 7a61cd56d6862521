"""Reduces the events of one lane to time spans and totals, for its host and for each of its devices."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.communication_kernels import Group, group_of
from verl_profiling.report.engine import Iteration, parse_iteration
from verl_profiling.report.host_calls import blocks_from_ns, launches_graph
from verl_profiling.report.intervals import Cover, Spans
from verl_profiling.report.kinds import (
    COMMUNICATION,
    HOST,
    HOST_COMMUNICATION,
    NOTHING,
    UNKNOWN,
    is_launch,
    kind_of,
)
from verl_profiling.report.npu import NpuEvents
from verl_profiling.report.optimes import OpTimes
from verl_profiling.report.process_names import ProcessNames, of_a_stream
from verl_profiling.timeline.event import Event

__all__ = ["MOST_DEVICES", "Part", "Reduction"]

MOST_DEVICES = 64
"""Number of processes of devices that are told apart in a lane."""

_ITERATIONS = ("execute_", "step[")
_OTHERS = "(other names)"
_OTHER_DEVICES = "other devices"
_NEVER = 1 << 62
_MOST_CATEGORIES = 12  # of an unknown kind, that are named
_LONGEST = 60  # characters of their names


class Part:
    """What the host, or one device, did.

    Attributes:
        covers: Time by kind.
        collectives: Runs by kind, name and process group.
        ops: Calls of kernels or operators.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last event that counts.
    """

    def __init__(self, names: list[str], groups: list[Group | None]) -> None:
        self.covers: defaultdict[int, Cover] = defaultdict(Cover)
        self.collectives: dict[tuple[int, str, Group | None], list[Spans]] = {}
        self._groups = groups
        self.ops = OpTimes(names)
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def add(self, spans: Spans, kinds: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Add events to the spans of their kind and to the collectives."""
        present = np.flatnonzero(np.bincount(kinds)).tolist()
        for kind in present:
            self.covers[kind].add(spans[kinds == kind] if len(present) > 1 else spans)
        first, last = int(spans[:, 0].min()), int(spans[:, 1].max())
        self.first_ns = first if self.first_ns is None else min(first, self.first_ns)
        self.last_ns = last if self.last_ns is None else max(last, self.last_ns)
        collective = np.flatnonzero((kinds == COMMUNICATION) | (kinds == HOST_COMMUNICATION))
        for runs in _by_number(collective, numbers):
            number = numbers[runs[0]]
            key = (int(kinds[runs[0]]), self.ops.names[number], self._groups[number])
            self.collectives.setdefault(key, []).append(spans[runs])


class Reduction:
    """Takes events chunk by chunk; its memory does not depend on the length of names or arguments.

    Attributes:
        host: What ran on the host.
        devices: What ran on each device, by its process.
        unknown: Events of unknown categories, by their process, which may be a device.
        iterations: The iterations of a rollout engine.
        launches: Whether the host gave a device something to do.
        graphs: Whether it launched graphs of kernels.
        blocked: Time in which the host was in a call that copies, allocates or waits for the device.
        on_streams: Processes with events of unknown categories that carry the number of a device or a stream.
        unknown_categories: Their categories.
        full: Whether there are more names or threads than are told apart.
        crowded: Whether there are more devices than are told apart.
        host_works: Whether the host did anything that counts, at any time.

    Args:
        marks: Names that are no work.
        most_names: How many names and threads are told apart.
        communicates: Whether a kernel of that name communicates.
        between: Begin and end (unix ns) of what is taken of the events; ``None`` for all.
    """

    def __init__(
        self,
        marks: Collection[str],
        most_names: int,
        communicates: Callable[[str], bool],
        between: tuple[int, int] | None = None,
    ) -> None:
        self._names: list[str] = []  # by number
        self._groups: list[Group | None] = []  # by number
        self.host = Part(self._names, self._groups)
        self.devices: dict[object, Part] = {}
        self.unknown: dict[object, Part] = {}
        self.iterations: list[Iteration] = []
        self.launches = False
        self.graphs = False
        self.blocked = Cover()
        self.on_streams: set[object] = set()
        self.unknown_categories: dict[str, None] = {}
        self.full = False
        self.crowded = False
        self.host_works = False
        self._between = between
        self._marks = frozenset(marks)
        self._most = most_names
        self._communicates = communicates
        self._numbers: dict[tuple[str, str], int] = {}  # by category and name
        self._in_groups: dict[tuple[int, str, Group | None], int] = {}
        self._others: dict[int, int] = {}  # by kind, for names beyond the limit
        self._kind_of: list[int] = []  # by number
        self._blocks_from: list[int] = []  # ns, by number
        self._threads: dict[tuple[object, object], int] = {}
        self._device_of = array("i")  # by number of the thread
        self._devices: list[object] = []  # by number
        self._device_numbers: dict[object, int] = {}

    def add(self, events: list[Event], base_ns: int, npu: NpuEvents, processes: ProcessNames) -> None:
        """Add the events of one trace."""
        counted: list[Event] = []
        numbers: list[int] = []
        nameless: list[Event] = []
        known = self._numbers
        for event in events:
            if event.ph != "X" or event.ts is None:
                if event.ph == "M":
                    processes.add(event)
                continue
            if not event.cat:
                nameless.append(event)
                continue
            key = (event.cat, event.name)
            number = known.get(key)
            if number is None:
                number = self._new(event)
                if len(known) < self._most:
                    known[key] = number
            if number >= 0:
                counted.append(event)
                numbers.append(number)
            elif number < -1:
                counted.append(event)
                numbers.append(self._in_group(-1 - number, event))
            elif event.cat == "user_annotation" and event.name.startswith(_ITERATIONS):
                self._add_iteration(event, base_ns)
        if nameless:
            npu.add(nameless, _to_spans(nameless, base_ns))
        if counted:
            self._count(
                _to_spans(counted, base_ns),
                np.array(numbers),
                lambda places: [(counted[place].pid, counted[place].tid) for place in places],
                lambda pid: pid,
            )

    def add_npu(self, npu: NpuEvents) -> None:
        """Add the events of one trace that have no category."""
        for spans, numbers, threads in npu.sorted_out(self._number):
            if len(spans):
                self._count(spans, numbers, partial(_picked, threads), npu.device)

    def _new(self, event: Event) -> int:
        """Return the number of an event's category and name, which are seen for the first time.

        One that communicates has a number for each process group: for its kind, ``-1 - kind`` is returned.
        """
        kind = NOTHING if event.name in self._marks else kind_of(event.cat, event.name, self._communicates)
        if kind == UNKNOWN:
            if len(self.unknown_categories) < _MOST_CATEGORIES:
                self.unknown_categories[event.cat[:_LONGEST]] = None
            if len(self.on_streams) < MOST_DEVICES and of_a_stream(event):
                self.on_streams.add(event.pid)
        self.launches = self.launches or is_launch(event.cat, event.name)
        if kind in (COMMUNICATION, HOST_COMMUNICATION):
            return -1 - kind
        return self._number(kind, event.name)

    def _in_group(self, kind: int, event: Event) -> int:
        """Return the number of an event that communicates."""
        key = (kind, event.name, group_of(event.name, event.args))
        number = self._in_groups.get(key)
        if number is None:
            number = self._number(*key)
            if len(self._in_groups) < self._most:
                self._in_groups[key] = number
        return number

    def _number(self, kind: int, name: str, group: Group | None = None) -> int:
        """Return the number of an event's kind, name and group; below 0 for events that do not count."""
        if kind == NOTHING:
            return -1
        if len(self._kind_of) >= self._most:
            self.full = True
            if kind in self._others:
                return self._others[kind]
            self._others[kind] = len(self._kind_of)
            name, group = _OTHERS, Group()
        self._kind_of.append(kind)
        self._groups.append(group)
        blocks_from = blocks_from_ns(name) if kind == HOST else None
        self._blocks_from.append(_NEVER if blocks_from is None else blocks_from)
        self.graphs = self.graphs or (kind == HOST and launches_graph(name))
        return self.host.ops.number(name)

    def _count(
        self,
        spans: Spans,
        numbers: NDArray[np.int64],
        threads_of: Callable[[list[int]], list[tuple[object, object]]],
        device: Callable[[object], object],
    ) -> None:
        """Add events to what their device or the host did."""
        kinds = np.array(self._kind_of)[numbers]
        inside = np.ones(len(spans), dtype=bool)
        if self._between is not None:
            begin_ns, end_ns = self._between
            inside = (spans[:, 0] < end_ns) & (spans[:, 1] > begin_ns)
            spans = np.clip(spans, begin_ns, end_ns)

        def add_by_device(parts: dict[object, Part], at: NDArray[np.int64]) -> None:
            threads = np.array(self._thread_numbers(threads_of(at.tolist()), device))
            owners = np.array(self._device_of)[threads]
            present = np.flatnonzero(np.bincount(owners)).tolist()
            for owner in present:
                part = parts.setdefault(self._devices[owner], Part(self._names, self._groups))
                mine = np.flatnonzero((owners == owner) & inside[at])
                if len(mine):
                    part.add(spans[at[mine]], kinds[at[mine]], numbers[at[mine]])
                    part.ops.add(spans[at[mine]], numbers[at[mine]], threads[mine])

        if len(known := np.flatnonzero(kinds < UNKNOWN)):
            self.host.ops.clear()  # operators are shown where there are no kernels
            add_by_device(self.devices, known)
        if len(unknown := np.flatnonzero(kinds == UNKNOWN)):
            add_by_device(self.unknown, unknown)
        self.host_works = self.host_works or bool((kinds > UNKNOWN).any())
        if len(rest := np.flatnonzero((kinds > UNKNOWN) & inside)):
            self.host.add(spans[rest], kinds[rest], numbers[rest])
            took = spans[rest, 1] - spans[rest, 0]
            self.blocked.add(spans[rest][took >= np.array(self._blocks_from)[numbers[rest]]])
            if not self.devices:
                threads = self._thread_numbers(threads_of(rest.tolist()), device)
                self.host.ops.add(spans[rest], numbers[rest], threads)

    def _thread_numbers(
        self, threads: list[tuple[object, object]], device: Callable[[object], object]
    ) -> list[int]:
        known = list(map(self._threads.get, threads))
        if None in known:
            return [self._thread(thread, device) for thread in threads]
        return cast("list[int]", known)

    def _thread(self, thread: tuple[object, object], device: Callable[[object], object]) -> int:
        number = self._threads.get(thread)
        if number is None:
            number = len(self._threads)
            if number < self._most:
                self._threads[thread] = number
            else:
                self.full = True
            if number == len(self._device_of):
                self._device_of.append(self._device(device(thread[0])))
        return number

    def _device(self, name: object) -> int:
        """Return the number of a device; those beyond the limit have one together."""
        number = self._device_numbers.get(name)
        if number is None:
            self.crowded = self.crowded or len(self._devices) >= MOST_DEVICES
            name = _OTHER_DEVICES if self.crowded else name
            number = self._device_numbers.setdefault(name, len(self._devices))
            if number == len(self._devices):
                self._devices.append(name)
        return number

    def _add_iteration(self, event: Event, base_ns: int) -> None:
        begin, end = _to_spans([event], base_ns)[0].tolist()
        iteration = parse_iteration(event.name, begin, end)
        first_ns, last_ns = self._between or (begin, begin + 1)
        if iteration and first_ns <= begin < last_ns:
            self.iterations.append(iteration)


def _to_spans(events: Sequence[Event], base_ns: int) -> Spans:
    """Return the begin and end of events in unix nanoseconds, exact to 1 ns."""
    begin_us = np.array([event.ts for event in events], dtype=np.float64)
    took_us = np.array([event.dur or 0.0 for event in events], dtype=np.float64)
    whole_us = np.floor(begin_us)
    begin = whole_us.astype(np.int64) * 1000 + np.rint((begin_us - whole_us) * 1000).astype(np.int64)
    begin += base_ns
    return np.stack((begin, begin + np.rint(took_us * 1000).astype(np.int64)), axis=1)


def _picked(threads: list[tuple[object, object]], places: list[int]) -> list[tuple[object, object]]:
    return [threads[place] for place in places]


def _by_number(indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of events with the same number together."""
    if len(indices):
        ordered = indices[np.argsort(numbers[indices], kind="stable")]
        yield from np.split(ordered, np.flatnonzero(np.diff(numbers[ordered])) + 1)
