"""Lanes, one per process and device, and the step of the lanes; times are on the controller's clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import CaptureResult, Device, Manifest, StageSpan
from verl_profiling.report.intervals import (
    EMPTY,
    Ints,
    Spans,
    holding,
    intersection,
    length,
    nested_times,
    spans_of,
    time_of,
    union,
)
from verl_profiling.report.kinds import Group
from verl_profiling.timeline.step import Source
from verl_profiling.units import duration

VALIDATE = "validate"
"""Name of the validation stage."""

NEVER = 1 << 62
"""A duration (ns) longer than any other."""

Window = tuple[str, int, int]
"""Name, begin and end (ns) of a stage."""


@dataclass(kw_only=True, eq=False)
class Lane:
    """The work of one device of a process, or of its host if it has no device.

    Attributes:
        source: The first trace of the lane.
        paths: All traces of the lane.
        host: Spans in which operators or runtime calls ran on the host.
        blocked: Spans in which the host was in a call that copies, allocates or waits for the device.
        graphs: Whether the host launched graphs of kernels.
        iterations: Begin, end, prompt tokens and new tokens of each iteration of a rollout engine.
        accelerator: Name of the device in the traces; ``""`` for a CPU trace.
        on_device: Whether the work is a device's (see :mod:`~verl_profiling.report.kinds`).
        is_one_of_several: Whether the process has other devices.
        is_unknown: Whether the device's work is unknown: the trace was cut off before its first event, or
            the device was in use and not recorded.
        compute: Spans of computation.
        communication: Spans of communication.
        memory: Spans in which memory was copied or set.
        unrecognised: Spans in which only work of unknown kind ran on the device.
        collectives: All runs of each collective by name and process group, sorted by begin.
        ops: Calls and self time (ns) of kernels, or of operators in a CPU trace, by stage and name.
        first_ns: Begin of the first event of work.
        last_ns: End of the last event of work.
        stages: Runs of the worker's own stages.
        recorded: Spans in which the worker's tool recorded.
        observed: Observed time: the set ``S`` of :mod:`~verl_profiling.report.numbers`.
        device: The device, if known.
        waiting: Spans in which a collective only waited for other ranks, once the report computed them.
        idle: Idle time by cause, once the report computed it.
    """

    source: Source
    paths: list[Path]
    host: Spans
    blocked: Spans
    graphs: bool
    iterations: Ints
    accelerator: str = ""
    on_device: bool = False
    is_one_of_several: bool = False
    is_unknown: bool = False
    compute: Spans = field(default_factory=lambda: EMPTY)
    communication: Spans = field(default_factory=lambda: EMPTY)
    memory: Spans = field(default_factory=lambda: EMPTY)
    unrecognised: Spans = field(default_factory=lambda: EMPTY)
    collectives: Mapping[tuple[str, Group], Spans] = field(default_factory=dict)
    ops: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    first_ns: int | None = None
    last_ns: int | None = None
    stages: Sequence[StageSpan] = ()
    recorded: Spans = field(default_factory=lambda: EMPTY)
    observed: Spans = field(default_factory=lambda: EMPTY)
    device: Device | None = None
    waiting: Spans = field(default_factory=lambda: EMPTY)
    idle: Mapping[str, Spans] = field(default_factory=dict)

    def __repr__(self) -> str:
        busy_s, observed_s = (length(spans) / 1e9 for spans in (self.busy, self.observed))
        return f"<lane {self.name}: busy {duration(busy_s)}, observed {duration(observed_s)}>"

    @cached_property
    def busy(self) -> Spans:
        """Spans in which any work ran."""
        return union(self.compute, self.communication, self.memory, self.unrecognised)

    @property
    def name(self) -> str:
        """Name of the lane, with the device's name if the process has several devices."""
        return f"{self.source.lane} {self.accelerator}" if self.is_one_of_several else self.source.lane

    @property
    def is_engine(self) -> bool:
        """Whether the lane is a rank of a rollout engine."""
        return self.source.replica is not None


class Key(NamedTuple):
    """Kind, name and process group of events; events of at least ``blocks_from`` ns block the host."""

    kind: int
    name: str = ""
    group: Group | None = None
    blocks_from: int = NEVER


class Rows(NamedTuple):
    """Events of a lane as columns: spans, numbers of the keys, numbers of the threads."""

    spans: Spans
    keys: NDArray[np.int32]
    threads: NDArray[np.int32]

    def of(self, wanted: NDArray[Any]) -> Rows:
        """Return the selected rows."""
        return Rows(*(column[wanted] for column in self))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the concatenation of rows."""
    none = np.empty(0, np.int32)
    return Rows(*(np.concatenate(column) for column in zip(Rows(EMPTY, none, none), *parts, strict=True)))


def reduced(
    rows: Rows,
    keys: Sequence[Key],
    wanted: Sequence[int],
    windows: Sequence[Window],
    only: Group | None,
    about: Mapping[str, Any],
) -> Lane:
    """Reduce rows to a lane.

    Args:
        rows: The rows.
        keys: Keys of the rows.
        wanted: The kinds of computation, communication, copies and unrecognised work.
        windows: The stages by which ``ops`` is divided.
        only: The process group of collectives that name no group.
        about: Further fields of the lane.
    """
    kinds = np.array([key.kind for key in keys], np.int8)[rows.keys]
    names = ("compute", "communication", "memory", "unrecognised")
    covers = {name: union(rows.spans[kinds == kind]) for name, kind in zip(names, wanted, strict=False)}
    collective = np.flatnonzero(kinds == wanted[1])
    order = collective[np.lexsort((rows.spans[collective, 0], rows.keys[collective]))]
    runs: dict[tuple[str, Group], Spans] = {}
    for one in np.split(order, np.flatnonzero(np.diff(rows.keys[order])) + 1):
        if len(one):
            key = keys[rows.keys[one[0]]]
            call = (key.name, key.group or only or Group())
            runs[call] = np.concatenate((runs.get(call, EMPTY), rows.spans[one]))
    return Lane(
        **{**about, **covers},
        collectives={call: spans[np.argsort(spans[:, 0], kind="stable")] for call, spans in runs.items()},
        ops=_by_stage(rows, keys, windows),
        first_ns=int(rows.spans[:, 0].min()) if len(rows.spans) else None,
        last_ns=int(rows.spans[:, 1].max()) if len(rows.spans) else None,
    )


def _by_stage(
    rows: Rows, keys: Sequence[Key], windows: Sequence[Window]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return calls and self time (ns) by stage and name; a call belongs to the stage in which it begins."""
    own = nested_times(rows.spans, rows.threads)
    ordered = sorted(windows, key=lambda window: window[1])
    edges = np.array([window[1:] for window in ordered], np.int64).reshape(-1, 2)
    at = np.searchsorted(edges[:, 0], rows.spans[:, 0], side="right") - 1
    inside = (at >= 0) & (rows.spans[:, 0] < np.append(edges[:, 1], 0)[at])
    stages = np.where(inside, at, len(ordered))
    places, inverse = np.unique(stages * len(keys) + rows.keys, return_inverse=True)
    calls = np.bincount(inverse, minlength=len(places))
    took = np.bincount(inverse, weights=own, minlength=len(places))
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for place, times, total in zip(places.tolist(), calls.tolist(), took.tolist(), strict=True):
        stage, number = divmod(place, len(keys))
        name = (ordered[stage][0] if stage < len(ordered) else "", keys[number].name)
        before = found.get(name, (0, 0))  # a stage that ran twice has two windows
        found[name] = (before[0] + times, before[1] + int(total))
    return found


def _device_of(lane: Lane, worker: CaptureResult) -> Device | None:
    """Return the device of a lane: by its number in the trace, or by the rank in a replica."""
    devices, several = worker.devices, lane.is_one_of_several
    if len(devices) == 1 and not several:
        return devices[0]
    if worker.identity.is_engine and not several:
        return devices[lane.source.rank] if lane.source.rank < len(devices) else None
    number = re.search(r"\d+$", lane.accelerator)
    return next((device for device in devices if number and device.index == int(number[0])), None)


class Step:
    """A step with its lanes, the input of all numbers of the report.

    Attributes:
        manifest: The manifest, if there is one.
        capture: Manifest of the whole capture, which may have further steps.
        begin_ns: Begin of the step.
        end_ns: End of the step.
        workers: The results of all workers.
        lanes: The lanes that could be read.
    """

    def __init__(
        self, manifest: Manifest | None, lanes: Iterable[Lane] = (), capture: Manifest | None = None
    ) -> None:
        read = list(lanes)
        self.manifest = manifest
        self.capture = capture or manifest
        self.workers = list(manifest.workers) if manifest else []
        self.begin_ns = min((lane.first_ns for lane in read if lane.first_ns is not None), default=0)
        self.end_ns = max((lane.last_ns for lane in read if lane.last_ns is not None), default=0)
        if manifest:
            self.begin_ns, self.end_ns = manifest.begin_ns, manifest.end_ns
        self.lanes = [self._observed(lane) for lane in read]

    def _observed(self, lane: Lane) -> Lane:
        """Return a lane with its stages, its device and its observed time, from the manifest."""
        worker = self.worker_of(lane.source)
        if worker is None:
            whole = lane.busy.reshape(-1)[[0, -1]].reshape(1, 2) if len(lane.busy) else EMPTY
            return replace(lane, observed=whole)
        recorded = spans_of(
            (a.begin_ns, a.end_ns) for a in worker.artifacts if a.lane == lane.source.lane and a.end_ns
        )
        whole = EMPTY if lane.is_unknown else self.whole
        return replace(
            lane,
            stages=worker.stages,
            recorded=recorded,
            device=_device_of(lane, worker),
            observed=intersection(recorded, whole) if worker.mode == "discrete" else whole,
        )

    def worker_of(self, source: Source) -> CaptureResult | None:
        """Return the worker that recorded a trace; a replica on several nodes has several workers."""
        named = [worker for worker in self.workers if worker.name == source.worker]
        recorded = (w for w in named if any(a.lane == source.lane for a in w.artifacts))
        return next(recorded, named[0] if named else None)

    def cut_off(self, span: StageSpan) -> bool:
        """Return whether the capture ended before the stage, so that the stage's duration is unknown."""
        return span.failed and span.end_ns >= self.end_ns

    def windows_of(self, source: Source) -> list[Window]:
        """Return the outermost stages that divide a trace: the worker's, else the controller's."""
        worker = self.worker_of(source)
        own = [s for s in worker.stages if s.depth == 0] if worker else []
        outer = own or [s for s in self.stages if s.depth == 0]
        return [(s.name, s.begin_ns, s.end_ns) for s in outer]

    @property
    def whole(self) -> Spans:
        """The time of the step."""
        return spans_of([(self.begin_ns, self.end_ns)])

    @property
    def span_ns(self) -> int:
        """Duration of the step."""
        return self.end_ns - self.begin_ns

    @cached_property
    def stages(self) -> list[StageSpan]:
        """The controller's stages, in order of begin."""
        return sorted(self.manifest.stages if self.manifest else [], key=lambda span: span.begin_ns)

    def during(self, *names: str) -> Spans:
        """Return the time in which the controller was in one of these stages, or in any without names."""
        return time_of(self.stages, *names)

    @cached_property
    def served(self) -> dict[int, Spans]:
        """Time in which each replica had an unfinished request, if requests were logged.

        Requests sent before the log began are not logged. Engine iterations outside all logged requests
        belong to such a request, which is unfinished until the last of these iterations.
        """
        runs: dict[int, list[tuple[int, int]]] = {}
        for worker in self.capture.workers if self.capture else []:
            if worker.requests_logged and worker.identity.replica is not None:
                runs.setdefault(worker.identity.replica, [])
            for one in worker.requests:
                runs.setdefault(one.replica, []).append((one.begin_ns, one.end_ns))
            if worker.pending_since_ns and worker.identity.replica is not None:
                runs[worker.identity.replica].append((worker.pending_since_ns[0], self.end_ns))
        served = {replica: spans_of(found) for replica, found in runs.items()}
        for lane in self.lanes:
            if (replica := lane.source.replica) in served:
                outside = ~holding(served[replica], lane.iterations[:, 0])
                last_ns = int(lane.iterations[outside, 1].max(initial=self.begin_ns))
                before = spans_of([(self.begin_ns, last_ns)])
                served[replica] = union(served[replica], before)
        return served

    def share(self, spans: Spans) -> float:
        """Return the length of a set of spans as a share of the step."""
        return length(spans) / max(self.span_ns, 1)
