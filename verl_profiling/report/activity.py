"""Reduces the traces of one lane to time spans and totals, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.engine import Iteration, parse_iteration
from verl_profiling.report.intervals import EMPTY, Spans, union
from verl_profiling.report.kinds import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    HOST_COMMUNICATION,
    MEMORY,
    NOTHING,
    kind_of,
)
from verl_profiling.report.npu import NpuEvents
from verl_profiling.report.optimes import OpTimes
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.reader import Trace

__all__ = ["Activity", "read_activity"]

_ITERATIONS = ("execute_", "step[")


class Activity:
    """What one lane did at which times, on the controller's clock.

    Attributes:
        on_device: Whether the trace has device events (see :mod:`~verl_profiling.report.kinds`).
        compute: Spans of computation.
        communication: Spans of communication.
        memory: Spans in which memory was copied or set.
        host: Spans in which operators or runtime calls ran on the host.
        collectives: All runs of each collective by name, in order of their begin.
        iterations: The iterations of a rollout engine.
        ops: Calls of kernels, or of operators in a CPU trace.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last event that counts.
        events: Number of events read.
        problems: What could not be read.
    """

    def __init__(self) -> None:
        self.on_device = False
        self.compute: Spans = EMPTY
        self.communication: Spans = EMPTY
        self.memory: Spans = EMPTY
        self.host: Spans = EMPTY
        self.collectives: dict[str, Spans] = {}
        self.iterations: list[Iteration] = []
        self.ops = OpTimes()
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.events = 0
        self.problems: list[str] = []

    @property
    def busy(self) -> Spans:
        """Spans in which it was busy with anything."""
        return union(self.compute, self.communication, self.memory)


def read_activity(traces: Iterable[tuple[Path, int]], marks: Collection[str] = ()) -> Activity:
    """Read the traces of one lane.

    Args:
        traces: Path of each, and the clock offset in ns that is subtracted from its times.
        marks: Names of the worker's stages, which torch_npu records as operators.

    Raises:
        TraceFormatError: A trace cannot be read at all.
    """
    reduction = _Reduction(marks)
    activity = reduction.activity
    for path, offset_ns in traces:
        trace = Trace(path)
        npu = NpuEvents()
        for events in trace.chunks():
            reduction.add(events, trace.base_ns - offset_ns, npu)
        reduction.add_npu(npu)
        activity.events += trace.events
        activity.problems += [f"{path.name}: {warning}" for warning in trace.warnings]
    reduction.finish()
    return activity


class _Reduction:
    """Takes events chunk by chunk; its memory does not depend on the length of names or arguments."""

    def __init__(self, marks: Collection[str]) -> None:
        self.activity = Activity()
        self._marks = frozenset(marks)
        self._numbers: dict[tuple[str, str], int] = {}  # by category and name
        self._kind_of: list[int] = []  # by number
        self._kinds: dict[int, Spans] = {}
        self._collectives: dict[tuple[int, str], list[Spans]] = {}
        self._threads: dict[object, int] = {}

    def add(self, events: list[Event], base_ns: int, npu: NpuEvents) -> None:
        counted: list[Event] = []
        numbers: list[int] = []
        nameless: list[Event] = []
        known = self._numbers
        for event in events:
            if event.ph != "X" or event.ts is None:
                if event.ph == "M":
                    npu.name(event)
                continue
            if not event.cat:
                nameless.append(event)
                continue
            key = (event.cat, event.name)
            number = known.get(key)
            if number is None:
                kind = NOTHING if event.name in self._marks else kind_of(*key)
                number = known[key] = self._number(kind, event.name)
            if number >= 0:
                counted.append(event)
                numbers.append(number)
            elif event.cat == "user_annotation" and event.name.startswith(_ITERATIONS):
                self._add_iteration(event, base_ns)
        if nameless:
            npu.add(nameless, _to_spans(nameless, base_ns))
        if counted:
            self._count(
                _to_spans(counted, base_ns),
                np.array(numbers),
                lambda index: (counted[index].pid, counted[index].tid),
            )

    def add_npu(self, npu: NpuEvents) -> None:
        for spans, numbers, threads in npu.sorted_out(self._number):
            if len(spans):
                self._count(spans, numbers, threads.__getitem__)

    def _number(self, kind: int, name: str) -> int:
        """Return the number of an event's kind and name; below 0 for events that do not count."""
        if kind == NOTHING:
            return -1
        self._kind_of.append(kind)
        return self.activity.ops.number(name)

    def _count(
        self, spans: Spans, numbers: NDArray[np.int64], thread: Callable[[int], tuple[object, object]]
    ) -> None:
        """Add events to the spans of their kind, to the collectives and to the operators."""
        activity = self.activity
        kinds = np.array(self._kind_of)[numbers]
        for kind in np.unique(kinds).tolist():
            self._kinds[kind] = union(self._kinds.get(kind, EMPTY), spans[kinds == kind])
        first, last = int(spans[:, 0].min()), int(spans[:, 1].max())
        activity.first_ns = first if activity.first_ns is None else min(first, activity.first_ns)
        activity.last_ns = last if activity.last_ns is None else max(last, activity.last_ns)
        for index in np.flatnonzero((kinds == COMMUNICATION) | (kinds == HOST_COMMUNICATION)).tolist():
            key = (int(kinds[index]), activity.ops.names[numbers[index]])
            self._collectives.setdefault(key, []).append(spans[index : index + 1])
        device = kinds <= MEMORY
        if not activity.on_device and device.any():
            activity.on_device = True
            activity.ops.clear()  # until the first kernel, operators of the host were counted instead
        ops = np.flatnonzero(device if activity.on_device else kinds >= HOST)
        threads = [self._threads.setdefault(thread(index), len(self._threads)) for index in ops.tolist()]
        activity.ops.add(spans[ops], numbers[ops], threads)

    def finish(self) -> None:
        """Decide whether it is a device trace, and fill in the activity."""
        activity, kinds = self.activity, self._kinds
        host, collectives = kinds.get(HOST, EMPTY), kinds.get(HOST_COMMUNICATION, EMPTY)
        activity.host = union(host, collectives)
        if activity.on_device:
            activity.compute = kinds.get(COMPUTE, EMPTY)
            activity.communication = kinds.get(COMMUNICATION, EMPTY)
            activity.memory = kinds.get(MEMORY, EMPTY)
        else:
            activity.compute, activity.communication = host, collectives
        wanted = COMMUNICATION if activity.on_device else HOST_COMMUNICATION
        for (kind, name), parts in self._collectives.items():
            if kind == wanted:
                runs = np.concatenate(parts)
                activity.collectives[name] = runs[np.argsort(runs[:, 0], kind="stable")]

    def _add_iteration(self, event: Event, base_ns: int) -> None:
        begin, end = _to_spans([event], base_ns)[0].tolist()
        iteration = parse_iteration(event.name, begin, end)
        if iteration:
            self.activity.iterations.append(iteration)


def _to_spans(events: list[Event], base_ns: int) -> Spans:
    """Return the begin and end of events in unix nanoseconds, exact to 1 ns."""
    begin_us = np.array([event.ts for event in events], dtype=np.float64)
    took_us = np.array([event.dur or 0.0 for event in events], dtype=np.float64)
    whole_us = np.floor(begin_us)
    begin = whole_us.astype(np.int64) * 1000 + np.rint((begin_us - whole_us) * 1000).astype(np.int64)
    begin += base_ns
    return np.stack((begin, begin + np.rint(took_us * 1000).astype(np.int64)), axis=1)
