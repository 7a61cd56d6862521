"""A lane as the report sees it: its source, its activity, and when it was observed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from verl_profiling.devices import Device
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, CaptureResult, Manifest, StageSpan
from verl_profiling.report.activity import Activity, Window
from verl_profiling.report.intervals import EMPTY, Spans, holding, intersection, length, spans_of, union
from verl_profiling.timeline.step import Source
from verl_profiling.units import duration

__all__ = ["VALIDATE", "Lane", "Step"]

VALIDATE = "validate"
"""The stage in which the loop rolls out to validate, not to train."""


class Lane:
    """One lane of the step, all times on the controller's clock.

    Attributes:
        source: The trace that it was read from.
        activity: What it did.
        stages: Runs of its worker's own stages.
        observed: Spans in which it was observed: the set ``S`` of :mod:`~verl_profiling.report.numbers`.
        recorded: Spans in which its tool recorded.
        device: What it computed on, where that is known.
    """

    def __init__(self, source: Source, activity: Activity, step: Step) -> None:
        self.source = source
        self.activity = activity
        worker = step.worker_of(source)
        self.stages = worker.stages if worker else []
        windows = [
            (a.begin_ns, a.end_ns)
            for a in (worker.artifacts if worker else [])
            if a.lane == source.lane and a.end_ns
        ]
        self.recorded = spans_of(windows)
        self.device = _device_of(self, worker) if worker else None
        self.observed = self._observed(step, worker)

    def _observed(self, step: Step, worker: CaptureResult | None) -> Spans:
        if worker is None:
            busy = self.activity.busy
            return spans_of([(int(busy[0, 0]), int(busy[-1, 1]))]) if len(busy) else EMPTY
        if self.activity.is_unknown:
            return EMPTY
        whole = spans_of([(step.begin_ns, step.end_ns)])
        return intersection(self.recorded, whole) if worker.mode == "discrete" else whole

    def __repr__(self) -> str:
        busy_s, observed_s = (length(spans) / 1e9 for spans in (self.activity.busy, self.observed))
        return f"<lane {self.name}: busy {duration(busy_s)}, observed {duration(observed_s)}>"

    @property
    def name(self) -> str:
        """Name of the lane, with that of its device where the process has several."""
        several = self.activity.is_one_of_several
        return f"{self.source.lane} {self.activity.device}" if several else self.source.lane

    @property
    def is_engine(self) -> bool:
        """Whether it is a rank of a rollout engine."""
        return self.source.replica is not None


def _device_of(lane: Lane, worker: CaptureResult) -> Device | None:
    """Return the device of a lane: by its number in the trace, or by the rank in a replica."""
    devices, several = worker.devices, lane.activity.is_one_of_several
    if len(devices) == 1 and not several:
        return devices[0]
    if worker.identity.is_engine and not several:
        return devices[lane.source.rank] if lane.source.rank < len(devices) else None
    number = re.search(r"\d+$", lane.activity.device)
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
        self,
        manifest: Manifest | None,
        activities: Iterable[tuple[Source, Activity]],
        capture: Manifest | None = None,
    ) -> None:
        read = list(activities)
        self.manifest = manifest
        self.capture = capture or manifest
        self.workers = list(manifest.workers) if manifest else []
        if manifest:
            self.begin_ns, self.end_ns = manifest.begin_ns, manifest.end_ns
        else:
            known = [
                (a.first_ns, a.last_ns) for _, a in read if a.first_ns is not None and a.last_ns is not None
            ]
            self.begin_ns = min((first for first, _ in known), default=0)
            self.end_ns = max((last for _, last in known), default=0)
        self.lanes = [Lane(source, activity, self) for source, activity in read]

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
                iterations = lane.activity.iterations
                inside = holding(served[replica], [one.begin_ns for one in iterations])
                ends = [one.end_ns for one, known in zip(iterations, inside, strict=True) if not known]
                before = spans_of([(self.begin_ns, max(ends, default=self.begin_ns))])
                served[replica] = union(served[replica], before)
        return served

    def share(self, spans: Spans) -> float:
        """Return the length of a set of spans as a share of the step."""
        return length(spans) / max(self.span_ns, 1)
