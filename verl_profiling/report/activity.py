"""Reduces the traces of one lane to sets of time, in bounded memory.

What counts as busy depends on what the trace holds:

* **Device trace** (it has kernels, copies or sets): busy is the union, over all streams, of
  ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` events. A kernel whose name contains ``nccl``
  communicates, any other computes; copies and sets are memory.
* **CPU trace** (it has none): busy is the union, over all threads, of ``cpu_op`` events and of
  collectives (``gloo:...``). ``gloo:``, ``nccl:``, ``mpi:`` and ``c10d::`` names communicate,
  every other operator computes. Waiting in Python between operators is not busy.

The classes of device events are those of HolisticTraceAnalysis 0.5 (``utils/utils.py``,
``get_kernel_type``), so that the figures can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_profiling.report.intervals import EMPTY, Spans, union
from verl_profiling.timeline.reader import Trace

__all__ = ["Activity", "read_activity"]

_COMPUTE, _COMMUNICATION, _MEMORY, _HOST, _HOST_COMMUNICATION = range(5)
_DEVICE_KINDS = {"kernel": _COMPUTE, "gpu_memcpy": _MEMORY, "gpu_memset": _MEMORY}
_HOST_CATEGORIES = {"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"}
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "c10d::")


class Activity:
    """When one lane did what, on the controller's clock.

    Attributes:
        on_device: Whether the trace holds device events (see the module's text).
        compute: When it computed.
        communication: When it communicated.
        memory: When it copied or set memory.
        host: When operators or runtime calls ran on the host.
        first_ns: Begin of its first event.
        last_ns: End of its last event.
        events: Number of events read.
        problems: What could not be read.
    """

    def __init__(self) -> None:
        self.on_device = False
        self.compute: Spans = EMPTY
        self.communication: Spans = EMPTY
        self.memory: Spans = EMPTY
        self.host: Spans = EMPTY
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
    activity = Activity()
    kinds: dict[int, Spans] = {}
    for path, offset_ns in traces:
        trace = Trace(path)
        for events in trace.chunks():
            found: dict[int, list[float]] = {}
            for event in events:
                if event.ph != "X" or event.ts is None:
                    continue
                kind = _DEVICE_KINDS.get(event.cat)
                if kind == _COMPUTE and "nccl" in event.name.lower():
                    kind = _COMMUNICATION
                elif kind is None:
                    if event.cat not in _HOST_CATEGORIES:
                        continue
                    if event.name.startswith(_COLLECTIVES):
                        kind = _HOST_COMMUNICATION
                    elif event.cat == "user_annotation":
                        continue
                    else:
                        kind = _HOST
                found.setdefault(kind, []).extend((event.ts, event.dur or 0.0))
            base_ns = trace.base_ns - offset_ns
            for kind, flat in found.items():
                spans = _to_spans(flat, base_ns)
                kinds[kind] = union(kinds.get(kind, EMPTY), spans)
                first, last = int(spans[:, 0].min()), int(spans[:, 1].max())
                activity.first_ns = first if activity.first_ns is None else min(first, activity.first_ns)
                activity.last_ns = last if activity.last_ns is None else max(last, activity.last_ns)
        activity.events += trace.events
        activity.problems += [f"{path.name}: {warning}" for warning in trace.warnings]
    _settle(activity, kinds)
    return activity


def _settle(activity: Activity, kinds: dict[int, Spans]) -> None:
    host, collectives = kinds.get(_HOST, EMPTY), kinds.get(_HOST_COMMUNICATION, EMPTY)
    activity.on_device = not kinds.keys().isdisjoint({_COMPUTE, _COMMUNICATION, _MEMORY})
    activity.host = union(host, collectives)
    if activity.on_device:
        activity.compute = kinds.get(_COMPUTE, EMPTY)
        activity.communication = kinds.get(_COMMUNICATION, EMPTY)
        activity.memory = kinds.get(_MEMORY, EMPTY)
    else:
        activity.compute, activity.communication = host, collectives


def _to_spans(flat: list[float], base_ns: int) -> Spans:
    """Return spans from alternating begin and duration in microseconds, exact to 1 ns."""
    pairs = np.array(flat, dtype=np.float64).reshape(-1, 2)
    whole = np.floor(pairs[:, 0])
    begin = whole.astype(np.int64) * 1000 + np.rint((pairs[:, 0] - whole) * 1000).astype(np.int64) + base_ns
    return np.stack((begin, begin + np.rint(pairs[:, 1] * 1000).astype(np.int64)), axis=1)
