"""Reduces the traces of one lane to sets of time and totals, in bounded memory.

What counts as busy depends on what the trace holds:

* **Device trace** (it has kernels, copies or sets): busy is the union, over all streams, of
  ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` events. A kernel whose name contains ``nccl``
  communicates, any other computes; copies and sets are memory.
* **CPU trace** (it has none): busy is the union, over all threads, of ``cpu_op`` events and of
  collectives. ``gloo:``, ``nccl:``, ``mpi:`` and ``c10d::`` names communicate, every other
  operator computes. Waiting in Python between operators is not busy.

The classes of device events are those of HolisticTraceAnalysis 0.5 (``utils/utils.py``,
``get_kernel_type``), so that the figures can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_profiling.report.engine import Iteration, parse_iteration
from verl_profiling.report.intervals import EMPTY, Spans, union
from verl_profiling.report.optimes import OpTimes
from verl_profiling.timeline.reader import Event, Trace

__all__ = ["Activity", "read_activity"]

_COMPUTE, _COMMUNICATION, _MEMORY, _HOST, _HOST_COMMUNICATION = range(5)
_DEVICE_KINDS = {"kernel": _COMPUTE, "gpu_memcpy": _MEMORY, "gpu_memset": _MEMORY}
_HOST_CATEGORIES = {"cpu_op", "cuda_runtime", "cuda_driver"}
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "c10d::")
_ITERATIONS = ("execute_", "step[")


class Activity:
    """When one lane did what, on the controller's clock.

    Attributes:
        on_device: Whether the trace holds device events (see the module's text).
        compute: When it computed.
        communication: When it communicated.
        memory: When it copied or set memory.
        host: When operators or runtime calls ran on the host.
        collectives: Every run of each collective by name, in order of begin.
        iterations: What a rollout engine did in each of its iterations.
        ops: Calls of kernels, or of operators in a CPU trace.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last one.
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
        """When it was busy with anything."""
        return union(self.compute, self.communication, self.memory)


def read_activity(traces: Iterable[tuple[Path, int]]) -> Activity:
    """Read the traces of one lane.

    Args:
        traces: Path and clock offset (ns, to be subtracted) of each.

    Raises:
        TraceFormatError: A trace cannot be read at all.
    """
    reduction = _Reduction()
    activity = reduction.activity
    for path, offset_ns in traces:
        trace = Trace(path)
        for events in trace.chunks():
            reduction.add(events, trace.base_ns - offset_ns)
        activity.events += trace.events
        activity.problems += [f"{path.name}: {warning}" for warning in trace.warnings]
    reduction.finish()
    return activity


class _Reduction:
    """Takes events chunk by chunk; what it keeps does not grow with the length of names or arguments."""

    def __init__(self) -> None:
        self.activity = Activity()
        self._kinds: dict[int, Spans] = {}
        self._collectives: dict[tuple[int, str], list[Spans]] = {}
        self._threads: dict[object, int] = {}

    def add(self, events: list[Event], base_ns: int) -> None:
        counted: list[Event] = []
        kinds: list[int] = []
        for event in events:
            if event.ph != "X" or event.ts is None:
                continue
            kind = _DEVICE_KINDS.get(event.cat)
            if kind is not None:
                if kind == _COMPUTE and "nccl" in event.name.lower():
                    kind = _COMMUNICATION
            elif event.cat in _HOST_CATEGORIES:
                kind = _HOST_COMMUNICATION if event.name.startswith(_COLLECTIVES) else _HOST
            elif event.cat == "user_annotation":
                if event.name.startswith(_ITERATIONS):
                    self._add_iteration(event, base_ns)
                if not event.name.startswith(_COLLECTIVES):
                    continue
                kind = _HOST_COMMUNICATION
            else:
                continue
            counted.append(event)
            kinds.append(kind)
        if counted:
            self._count(counted, np.array(kinds), base_ns)

    def finish(self) -> None:
        """Decide what the trace was, and fill in the activity."""
        activity, kinds = self.activity, self._kinds
        host, collectives = kinds.get(_HOST, EMPTY), kinds.get(_HOST_COMMUNICATION, EMPTY)
        activity.host = union(host, collectives)
        if activity.on_device:
            activity.compute = kinds.get(_COMPUTE, EMPTY)
            activity.communication = kinds.get(_COMMUNICATION, EMPTY)
            activity.memory = kinds.get(_MEMORY, EMPTY)
        else:
            activity.compute, activity.communication = host, collectives
        wanted = _COMMUNICATION if activity.on_device else _HOST_COMMUNICATION
        for (kind, name), parts in self._collectives.items():
            if kind == wanted:
                runs = np.concatenate(parts)
                activity.collectives[name] = runs[np.argsort(runs[:, 0], kind="stable")]

    def _add_iteration(self, event: Event, base_ns: int) -> None:
        begin, end = _to_spans([event], base_ns)[0].tolist()
        iteration = parse_iteration(event.name, begin, end)
        if iteration:
            self.activity.iterations.append(iteration)

    def _count(
        self, events: list[Event], kinds: np.ndarray[tuple[int], np.dtype[np.int64]], base_ns: int
    ) -> None:
        activity = self.activity
        spans = _to_spans(events, base_ns)
        for kind in np.unique(kinds).tolist():
            self._kinds[kind] = union(self._kinds.get(kind, EMPTY), spans[kinds == kind])
        first, last = int(spans[:, 0].min()), int(spans[:, 1].max())
        activity.first_ns = first if activity.first_ns is None else min(first, activity.first_ns)
        activity.last_ns = last if activity.last_ns is None else max(last, activity.last_ns)
        for index in np.flatnonzero((kinds == _COMMUNICATION) | (kinds == _HOST_COMMUNICATION)).tolist():
            key = (int(kinds[index]), events[index].name)
            self._collectives.setdefault(key, []).append(spans[index : index + 1])
        device = kinds <= _MEMORY
        if not activity.on_device and device.any():
            activity.on_device = True
            activity.ops.clear()  # operators of the host stood in for kernels until one was seen
        counted = np.flatnonzero(device if activity.on_device else kinds >= _HOST)
        named = [events[index] for index in counted.tolist()]
        activity.ops.add(
            spans[counted],
            [activity.ops.number(event.name) for event in named],
            [self._threads.setdefault((event.pid, event.tid), len(self._threads)) for event in named],
        )


def _to_spans(events: list[Event], base_ns: int) -> Spans:
    """Return begin and end of events in unix nanoseconds, exact to 1 ns."""
    times = np.array([(event.ts, event.dur or 0.0) for event in events], dtype=np.float64)
    whole = np.floor(times[:, 0])
    begin = whole.astype(np.int64) * 1000 + np.rint((times[:, 0] - whole) * 1000).astype(np.int64) + base_ns
    return np.stack((begin, begin + np.rint(times[:, 1] * 1000).astype(np.int64)), axis=1)
