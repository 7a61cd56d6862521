"""Reduces the traces of one lane to time spans and totals, in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import TraceFormatError
from verl_profiling.report.engine import Iteration, parse_iteration
from verl_profiling.report.intervals import EMPTY, Cover, Spans, union
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
from verl_profiling.report.optimes import OpTimes, Window
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.reader import Trace

__all__ = ["Activity", "read_activity"]

_ITERATIONS = ("execute_", "step[")
_OTHERS = "(other names)"


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
        ops: Calls and self time (ns) of kernels, or of operators in a CPU trace, by stage and name.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last event that counts.
        events: Number of events read.
        traces: Number of traces that could be read.
        limited: Number of these that were not read whole because of a limit.
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
        self.ops: dict[tuple[str, str], tuple[int, int]] = {}
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.events = 0
        self.traces = 0
        self.limited = 0
        self.problems: list[str] = []

    @property
    def busy(self) -> Spans:
        """Spans in which it was busy with anything."""
        return union(self.compute, self.communication, self.memory)


def read_activity(
    traces: Iterable[tuple[Path, int]],
    marks: Collection[str] = (),
    windows: Sequence[Window] = (),
    limits: Limits | None = None,
) -> Activity:
    """Read the traces of one lane.

    Args:
        traces: Path of each, and the clock offset in ns that is subtracted from its times.
        marks: Names of the worker's stages, which torch_npu records as operators.
        windows: The stages to tell apart in ``ops``.
        limits: How much of each trace is read.

    Raises:
        TraceFormatError: None of them can be read.
    """
    limits = limits or Limits()
    reduction = _Reduction(marks, limits.names)
    activity = reduction.activity
    failure: TraceFormatError | None = None
    for path, offset_ns in traces:
        try:
            _read(path, offset_ns, reduction, limits)
        except TraceFormatError as error:
            failure = error
            activity.problems.append(str(error))
    if failure and not activity.traces:
        raise failure
    reduction.finish(windows)
    return activity


def _read(path: Path, offset_ns: int, reduction: _Reduction, limits: Limits) -> None:
    activity = reduction.activity
    trace = Trace(path, limits)
    activity.traces += 1
    npu = NpuEvents(limits.names)
    try:
        for events in trace.chunks():
            reduction.add(events, trace.base_ns - offset_ns, npu)
    finally:
        reduction.add_npu(npu)
        activity.events += trace.events
        activity.problems += [f"{path.name}: {warning}" for warning in trace.warnings]
    if npu.full or reduction.full:
        most = f"more than {limits.names:,} names of operators or threads (--max-names raises it)"
        activity.problems.append(f"{path.name}: there are {most}; the others are counted together")
    activity.limited += trace.limited or npu.full or reduction.full


class _Reduction:
    """Takes events chunk by chunk; its memory does not depend on the length of names or arguments.

    Attributes:
        activity: What the lane did; complete when finished.
        full: Whether there are more names or threads than are told apart.
    """

    def __init__(self, marks: Collection[str], most_names: int) -> None:
        self.activity = Activity()
        self.full = False
        self._marks = frozenset(marks)
        self._most = most_names
        self._ops = OpTimes()
        self._numbers: dict[tuple[str, str], int] = {}  # by category and name
        self._others: dict[int, int] = {}  # by kind, for names beyond the limit
        self._kind_of: list[int] = []  # by number
        self._kinds: defaultdict[int, Cover] = defaultdict(Cover)
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
                number = self._number(kind, event.name)
                if len(known) < self._most:
                    known[key] = number
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
        if len(self._kind_of) >= self._most:
            self.full = True
            if kind in self._others:
                return self._others[kind]
            self._others[kind] = len(self._kind_of)
            name = _OTHERS
        self._kind_of.append(kind)
        return self._ops.number(name)

    def _count(
        self, spans: Spans, numbers: NDArray[np.int64], thread: Callable[[int], tuple[object, object]]
    ) -> None:
        """Add events to the spans of their kind, to the collectives and to the operators."""
        activity = self.activity
        kinds = np.array(self._kind_of)[numbers]
        for kind in np.unique(kinds).tolist():
            self._kinds[kind].add(spans[kinds == kind])
        first, last = int(spans[:, 0].min()), int(spans[:, 1].max())
        activity.first_ns = first if activity.first_ns is None else min(first, activity.first_ns)
        activity.last_ns = last if activity.last_ns is None else max(last, activity.last_ns)
        collective = np.flatnonzero((kinds == COMMUNICATION) | (kinds == HOST_COMMUNICATION))
        for runs in _by_number(collective, numbers):
            key = (int(kinds[runs[0]]), self._ops.names[numbers[runs[0]]])
            self._collectives.setdefault(key, []).append(spans[runs])
        device = kinds <= MEMORY
        if not activity.on_device and device.any():
            activity.on_device = True
            self._ops.clear()  # until the first kernel, operators of the host were counted instead
        ops = np.flatnonzero(device if activity.on_device else kinds >= HOST)
        self._ops.add(spans[ops], numbers[ops], [self._thread(thread(index)) for index in ops.tolist()])

    def _thread(self, thread: tuple[object, object]) -> int:
        number = self._threads.get(thread)
        if number is None:
            number = len(self._threads)
            if number < self._most:
                self._threads[thread] = number
            else:
                self.full = True
        return number

    def finish(self, windows: Sequence[Window]) -> None:
        """Decide whether it is a device trace, and fill in the activity."""
        activity = self.activity
        kinds = {kind: cover.spans() for kind, cover in self._kinds.items()}
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
        activity.ops = self._ops.by_stage(windows)

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


def _by_number(indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of events with the same number together."""
    if len(indices):
        ordered = indices[np.argsort(numbers[indices], kind="stable")]
        yield from np.split(ordered, np.flatnonzero(np.diff(numbers[ordered])) + 1)
