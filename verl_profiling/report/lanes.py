"""Lanes, one for each device, and the step of them; times are on the controller's clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from verl_profiling.devices import Device
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, CaptureResult, Manifest, StageSpan
from verl_profiling.report.communication_kernels import Group
from verl_profiling.report.intervals import EMPTY, Spans, holding, intersection, length, spans_of, union
from verl_profiling.report.kinds import Iteration
from verl_profiling.timeline.step import Source
from verl_profiling.units import duration

VALIDATE = "validate"
"""The stage in which the loop rolls out to validate, not to train."""

Window = tuple[str, int, int]
"""Name, begin and end (ns) of a stage."""


@dataclass(kw_only=True, eq=False)
class Lane:
    """The work of one device of a lane, or of its host where it has none.

    Attributes:
        source: The first trace that it was read from.
        paths: All of them.
        host: Spans in which operators or runtime calls ran on the host.
        blocked: Spans in which the host was in a call that copies, allocates or waits for the device.
        graphs: Whether the host launched graphs of kernels.
        iterations: The iterations of a rollout engine.
        accelerator: Name of the device in the traces; ``""`` for a CPU trace.
        on_device: Whether it is that of a device (see :mod:`~verl_profiling.report.kinds`).
        is_one_of_several: Whether the lane has other devices.
        is_unknown: Whether nothing is known of its device: the trace ends before its first event, or none was
            recorded although the device was in use.
        compute: Spans of computation.
        communication: Spans of communication.
        memory: Spans in which memory was copied or set.
        unrecognised: Spans of work of a device that is of no known kind, with nothing else beside it.
        collectives: All runs of each collective by name and process group, in order of their begin.
        ops: Calls and self time (ns) of kernels, or of operators in a CPU trace, by stage and name.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last event that counts.
        stages: Runs of its worker's own stages.
        recorded: Spans in which its tool recorded.
        observed: Spans in which it was observed: the set ``S`` of :mod:`~verl_profiling.report.numbers`.
        device: What it computed on, where that is known.
    """

    source: Source
    paths: list[Path]
    host: Spans
    blocked: Spans
    graphs: bool
    iterations: list[Iteration]
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

    def __repr__(self) -> str:
        busy_s, observed_s = (length(spans) / 1e9 for spans in (self.busy, self.observed))
        return f"<lane {self.name}: busy {duration(busy_s)}, observed {duration(observed_s)}>"

    @cached_property
    def busy(self) -> Spans:
        """Spans in which it was busy with anything."""
        return union(self.compute, self.communication, self.memory, self.unrecognised)

    @property
    def name(self) -> str:
        """Name of the lane, with that of its device where the process has several."""
        return f"{self.source.lane} {self.accelerator}" if self.is_one_of_several else self.source.lane

    @property
    def is_engine(self) -> bool:
        """Whether it is a rank of a rollout engine."""
        return self.source.replica is not None


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
    """The step as the report sees it.

    Attributes:
        manifest: The manifest, if there is one.
        capture: That of the whole capture, of which the step may be a part.
        begin_ns: Begin of the step.
        end_ns: Its end.
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
        """Return a lane with what the step says of it: its stages, its device, when it was observed."""
        worker = self.worker_of(lane.source)
        if worker is None:
            whole = lane.busy.reshape(-1)[[0, -1]].reshape(1, 2) if len(lane.busy) else EMPTY
            return replace(lane, observed=whole)
        recorded = spans_of(
            (a.begin_ns, a.end_ns) for a in worker.artifacts if a.lane == lane.source.lane and a.end_ns
        )
        whole = EMPTY if lane.is_unknown else spans_of([(self.begin_ns, self.end_ns)])
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
        """Return whether the capture ended before a stage did, so that its length says nothing."""
        return span.failed and span.end_ns >= self.end_ns

    def windows_of(self, source: Source) -> list[Window]:
        """Return the outermost stages that a trace is told apart by: its worker's, else the controller's."""
        worker = self.worker_of(source)
        own = [s for s in worker.stages if s.depth == 0] if worker else []
        outer = own or [s for s in self.stages if s.depth == 0]
        return [(s.name, s.begin_ns, s.end_ns) for s in outer]

    @property
    def span_ns(self) -> int:
        """Duration of the step."""
        return self.end_ns - self.begin_ns

    @cached_property
    def stages(self) -> list[StageSpan]:
        """The controller's stages, in order of begin."""
        return sorted(self.manifest.stages if self.manifest else [], key=lambda span: span.begin_ns)

    @property
    def calls(self) -> Spans:
        """Spans of the controller's calls that start and stop recordings."""
        rpcs = self.manifest.rpcs if self.manifest else []
        return spans_of((rpc.begin_ns, rpc.end_ns) for rpc in rpcs)

    @property
    def pauses(self) -> Spans:
        """Spans before and after the step in which the loop waited for the capture to start and to stop."""
        outside = self.manifest.outside if self.manifest else []
        return spans_of((s.begin_ns, s.end_ns) for s in outside if s.name in (CAPTURE_START, CAPTURE_STOP))

    def during(self, *names: str) -> Spans:
        """Return the spans in which the controller was in one of these stages, or in any if none is given."""
        return spans_of((s.begin_ns, s.end_ns) for s in self.stages if not names or s.name in names)

    @cached_property
    def served(self) -> dict[int, Spans]:
        """When requests of each replica were on their way, where they were logged.

        A request from before the log began is not in it. Iterations of an engine outside of all requests are
        its work on such a one, which was on its way until the last of them.
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
                iterations = lane.iterations
                inside = holding(served[replica], [one.begin_ns for one in iterations])
                ends = [one.end_ns for one, known in zip(iterations, inside, strict=True) if not known]
                before = spans_of([(self.begin_ns, max(ends, default=self.begin_ns))])
                served[replica] = union(served[replica], before)
        return served

    def share(self, spans: Spans) -> float:
        """Return the length of a set of spans as a share of the step."""
        return length(spans) / max(self.span_ns, 1)
