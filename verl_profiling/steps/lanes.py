"""The lanes of a step, one per process and device; times are on the controller's clock."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import msgspec

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, Device, Manifest, StageSpan
from verl_profiling.slices.intervals import (
    EMPTY,
    Ints,
    Spans,
    holding,
    intersection,
    length,
    spans_of,
    subtract,
    time_of,
    union,
)
from verl_profiling.steps.kinds import Group
from verl_profiling.steps.messages import Link
from verl_profiling.steps.requests import VALIDATE, RequestRow, requests, validations
from verl_profiling.steps.step import Source


class Lane(msgspec.Struct, kw_only=True, eq=False, dict=True):
    """The work of one device of a process, or of the host in a process without a device.

    Attributes:
        source: The first trace of the lane.
        paths: All traces of the lane.
        host: Spans in which operators or runtime calls ran on the host.
        blocked: Spans of host calls that copy, allocate or wait for the device.
        iterations: Begin, end, tokens (see ``Iteration``) and ``Attention`` of each iteration of a
            rollout engine.
        accelerator: Name of the device in the traces, e.g. ``GPU 0``; ``""`` for a CPU trace.
        model: Model name of the host's devices, e.g. ``NVIDIA H200``; empty if unknown, or if there
            are several models.
        on_device: Whether the work ran on a device (see :mod:`~verl_profiling.steps.kinds`).
        is_one_of_several: Whether the process has more than one device, and so more than one lane.
        is_unknown: Whether the device's work is unknown: the trace is cut off before its first
            event, the device was in use but not recorded, or work of the device was lost.
        compute: Spans of computation.
        communication: Spans of communication.
        memory: Spans in which memory was copied or set.
        unrecognised: Spans of device events of unknown categories, if a device has no others.
        collectives: All runs of each collective by name and process group, sorted by begin, each
            with begin, end (ns) and bytes (0 if unknown).
        links: What a vendor's tool recorded of the links of an NPU.
        ops: Calls and self time (ns) of kernels, or of operators in a CPU trace, by stage and name.
        stages: Runs of the worker's own stages.
        pauses: Spans in which Python's garbage collector stopped the process.
        observed: Time in which the lane is observed (see :mod:`~verl_profiling.slices.observed`).
        unseen: Time in the lane's stages that was not observed, so the lane may have worked. For an
            engine, it is such time in rollouts and validations.
        device: The device as in the manifest, with kind, number and UUID, if known.
        waiting: Spans in which a collective only waited for other ranks; set when the report is
            computed.
        idle: Idle time by cause; set when the report is computed.
    """

    source: Source
    paths: list[Path]
    host: Spans
    blocked: Spans
    iterations: Ints
    accelerator: str = ""
    model: str = ""
    on_device: bool = False
    is_one_of_several: bool = False
    is_unknown: bool = False
    compute: Spans = EMPTY
    communication: Spans = EMPTY
    memory: Spans = EMPTY
    unrecognised: Spans = EMPTY
    collectives: Mapping[tuple[str, Group], Ints] = {}
    links: list[Link] = []
    ops: Mapping[tuple[str, str], tuple[int, int]] = {}
    stages: Sequence[StageSpan] = ()
    pauses: Spans = EMPTY
    observed: Spans = EMPTY
    unseen: Spans = EMPTY
    device: Device | None = None
    waiting: Spans = EMPTY
    idle: Mapping[str, Spans] = {}

    @cached_property
    def busy(self) -> Spans:
        """Spans in which the lane ran computation, communication, copies or unrecognised work."""
        return union(self.compute, self.communication, self.memory, self.unrecognised)

    @property
    def name(self) -> str:
        """Name of the lane, with the device's name if the process has several devices."""
        if self.is_one_of_several:
            return f"{self.source.lane} {self.accelerator}"
        return self.source.lane

    @property
    def is_engine(self) -> bool:
        """Whether the lane is a rank of a rollout engine."""
        return self.source.replica is not None


def _device_of(lane: Lane, worker: CaptureResult) -> Device | None:
    """Return the device of a lane, by the device number in the trace or the rank in the replica."""
    if not lane.is_one_of_several:
        if len(worker.devices) == 1:
            return worker.devices[0]
        if lane.is_engine:
            return dict(enumerate(worker.devices)).get(lane.source.rank)
    if number := re.search(r"\d+$", lane.accelerator):
        for device in worker.devices:
            if device.index == int(number[0]):
                return device
    return None


class Step:
    """A step with its lanes, the input of all numbers of the report.

    Attributes:
        manifest: The manifest, if there is one.
        begin_ns: Begin of the step.
        end_ns: End of the step.
        whole: Time of the step; without a manifest, the time in which any lane is observed.
        workers: The results of all workers in this step.
        of_capture: The results of all workers in the whole capture, which may have several steps.
        lanes: The readable lanes.
    """

    def __init__(self, manifest: Manifest | None, capture: Manifest | None = None) -> None:
        self.manifest = manifest
        self._recorded = manifest or Manifest(
            run_id="",
            capture_id="",
            step=0,
            steps=[],
            begin_ns=0,
            end_ns=0,
            controller=WorkerIdentity(role=""),
        )
        self.workers = self._recorded.workers
        self.of_capture = (capture or self._recorded).workers
        self.begin_ns = self._recorded.begin_ns
        self.end_ns = self._recorded.end_ns
        self.whole = time_of([self._recorded])
        self.lanes: list[Lane] = []

    def add(self, lane: Lane) -> None:
        """Add a lane, with its stages, pauses and device from the manifest."""
        self.lanes.append(lane)
        if self.manifest is None:
            self.whole = union(self.whole, lane.observed)
            edges = self.whole.reshape(-1).tolist() or [0]
            self.begin_ns, self.end_ns = edges[0], edges[-1]
        lane.observed = EMPTY if lane.is_unknown else intersection(self.whole, lane.observed)
        worker = self.worker_of(lane.source)
        if worker is None:
            return
        # Engines compute in other processes than the one that records pauses.
        lane.stages = worker.stages
        lane.device = _device_of(lane, worker)
        if lane.is_engine:
            at_work = self.during(ROLLOUT, VALIDATE)
        else:
            at_work = time_of(lane.stages)
            lane.pauses = time_of(worker.pauses)
        lane.unseen = subtract(intersection(at_work, self.whole), lane.observed)

    def lanes_of(self, worker: str) -> list[Lane]:
        """Return the lanes of a worker."""
        return [lane for lane in self.lanes if lane.source.worker == worker]

    @property
    def clock_error_ns(self) -> int:
        """Largest error of the clock offsets between hosts (ns); 0 without a manifest."""
        return max((clock.error_ns for clock in self._recorded.clocks), default=0)

    def worker_of(self, source: Source) -> CaptureResult | None:
        """Return the result of the worker that recorded a trace. A replica on several nodes has
        several workers of one name.
        """
        first = None
        for worker in self.workers:
            if worker.name == source.worker:
                first = first or worker
                if source.lane in map(attrgetter("lane"), worker.artifacts):
                    return worker
        return first

    def cut_off(self, span: StageSpan) -> bool:
        """Return whether the stage was still open when the capture ended, so that its duration is
        unknown.
        """
        return span.failed and span.end_ns >= self.end_ns

    def stages_of(self, source: Source) -> list[StageSpan]:
        """Return the outermost stages for a trace in order: the stages of its worker; if the worker
        marked none, the stages of the controller.
        """
        worker = self.worker_of(source)
        of_worker = worker.stages if worker else []
        for stages in (of_worker, self.stages):
            outermost = [span for span in stages if span.depth == 0]
            if outermost:
                return sorted(outermost, key=attrgetter("begin_ns"))
        return []

    def unrecorded_device(self, source: Source) -> str:
        """Return the kind of the device that a lane used but did not record; empty if there is
        none.

        The device of an engine without requests was not in use.
        """
        worker = self.worker_of(source)
        if worker is None or (
            source.replica is not None and worker.requests_logged and not worker.requests
        ):
            return ""
        for artifact in worker.artifacts:
            if artifact.lane == source.lane and artifact.unrecorded_device:
                return artifact.unrecorded_device
        return ""

    @property
    def span_ns(self) -> int:
        """Duration of the step, without the time between recordings of plain traces."""
        return length(self.whole)

    @cached_property
    def stages(self) -> list[StageSpan]:
        """The controller's stages, in order of begin."""
        return sorted(self._recorded.stages, key=attrgetter("begin_ns"))

    @cached_property
    def validations(self) -> Spans:
        """Time of validation, in the step and around it."""
        return time_of(validations(self._recorded))

    @cached_property
    def requests(self) -> list[RequestRow]:
        """The requests of all replicas."""
        return list(requests(self._recorded))

    def queued(self, replica: int | None) -> Spans:
        """Return the time in which all requests of a replica wait in the engine's queue.

        Requests that were open at the end of the log count as running from their begin on, because
        they may have.
        """
        queued: list[tuple[int, int]] = []
        running: list[tuple[int, int]] = []
        for worker in self.of_capture:
            if worker.identity.replica == replica:
                running += self._unfinished(worker)
            for request in worker.requests:
                if request.replica == replica:
                    for name, begin_ns, end_ns in request.parts():
                        if name == "queued":
                            queued.append((begin_ns, end_ns))
                        else:
                            running.append((begin_ns, end_ns))
        return subtract(spans_of(queued), spans_of(running))

    def _unfinished(self, worker: CaptureResult) -> list[tuple[int, int]]:
        """Return the times of the requests that were open at the end of the log."""
        return [(since_ns, self.end_ns) for since_ns in worker.pending_since_ns]

    def during(self, *names: str) -> Spans:
        """Return the time in which the controller was in one of the named stages; without names, in
        any stage.
        """
        return time_of(self.stages, *names)

    @cached_property
    def rollout(self) -> Spans:
        """The time in which the controller was in the stage ``rollout``."""
        return self.during(ROLLOUT)

    @cached_property
    def pending(self) -> list[int]:
        """Indexes of the replicas with requests that were open at the end of the step."""
        replicas = []
        for worker in self.workers:
            oldest_ns = min(worker.pending_since_ns, default=self.end_ns)
            if worker.identity.replica is not None and oldest_ns < self.end_ns:
                replicas.append(worker.identity.replica)
        return replicas

    @cached_property
    def served(self) -> dict[int, Spans]:
        """Time in which each replica had an unfinished request, if requests were logged.

        Requests that were sent before the log began are not in it. If the engine iterates outside
        all logged requests, and again, it is taken to have served from the step's begin to then.
        """
        runs = defaultdict[int, list[tuple[int, int]]](list)
        for worker in self.of_capture:
            if worker.requests_logged and worker.identity.replica is not None:
                runs[worker.identity.replica] += self._unfinished(worker)
            for request in worker.requests:
                runs[request.replica].append((request.begin_ns, request.end_ns))
        served = {replica: spans_of(pairs) for replica, pairs in runs.items()}
        for lane in self.lanes:
            replica = lane.source.replica
            if replica in served:
                outside = ~holding(served[replica], lane.iterations[:, 0])
                outside[1:] &= outside[:-1]  # an aborted request ends in the iteration before
                last_ns = int(lane.iterations[outside, 1].max(initial=self.begin_ns))
                before = spans_of([(self.begin_ns, last_ns)])
                served[replica] = union(served[replica], before)
        return served
