"""Builds the report of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import groupby

import msgspec
import numpy as np

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, Manifest
from verl_profiling.report.activity import NoOperatorsError, read_lane
from verl_profiling.report.anatomy import anatomy, capture_time, outside_rows
from verl_profiling.report.capture_rows import (
    Counters,
    anchors,
    clock_notes,
    core_notes,
    costs,
    measures,
    replica_rows,
    requests,
)
from verl_profiling.report.collectives import (
    collective_rows,
    last_to,
    matched_calls,
    stragglers,
    waiting_by_lane,
)
from verl_profiling.report.findings import find
from verl_profiling.report.intervals import EMPTY, intersection, length
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.lost import (
    BEHIND_TRAJECTORIES,
    WEIGHT_SYNC,
    lost_by_cause,
    lost_total,
    unlogged_requests,
)
from verl_profiling.report.model import Clock, Coverage, Report
from verl_profiling.report.numbers import (
    device_row,
    engine_row,
    kernels,
    lost_of_device,
    rollout_tail,
    shared_devices,
    throughput,
    unknown_devices,
    worker_row,
)
from verl_profiling.report.over_time import gantt, requests_running
from verl_profiling.report.rollout.section import few_causes, rollout_of
from verl_profiling.report.suspects import Activities, asked_of
from verl_profiling.timeline.logs import read_logs
from verl_profiling.timeline.merge import zero_ns
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.trajectory_log import TrajectoryLog
from verl_profiling.units import step_list
from verl_profiling.visible import visible_text_of

_MOST_NOTES = 100


class StepRead(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose traces were read.

    Attributes:
        step: The step, with its lanes.
        traces: Number of traces that could be read.
        events: Number of events in them.
        missing: What is not there or not whole, as sentences.
        incomplete: The lanes of which something is not there or not whole.
        unrecorded: The lanes whose device was in use while no event of it was recorded.
        notes: What to know of the figures, as sentences.
    """

    step: Step
    traces: int
    events: int
    missing: list[str]
    incomplete: list[str]
    unrecorded: list[str]
    notes: list[str]


def read_step(inputs: StepInputs, on_progress: Callable[[Source], None] | None = None) -> StepRead:
    """Read the traces of one step.

    Args:
        inputs: The step, from :func:`~verl_profiling.timeline.inputs.find_steps`.
        on_progress: Called with each trace once it is read.

    Raises:
        TraceFormatError: There is neither a manifest nor a readable trace.
    """
    missing = [*([f"{inputs.title} {inputs.unfinished}"] if inputs.unfinished else []), *inputs.absent]
    notes = [f"counted as communication on request: {pattern}" for pattern in inputs.communication]
    incomplete = (
        [] if inputs.manifest is None else _without_trace(inputs.manifest, [*inputs.sources, *inputs.logs])
    )
    lost: list[str] = []
    traces = events = 0
    read: list[Lane] = []
    stages = Step(inputs.manifest)
    between = (
        (inputs.manifest.begin_ns, inputs.manifest.end_ns) if inputs.manifest and inputs.capture else None
    )
    for _, group in groupby(inputs.sources, key=lambda source: source.lane):
        sources = list(group)
        try:
            marks, windows = _marks(inputs.manifest, sources[0]), stages.windows_of(sources[0])
            unrecorded = _unrecorded_device(stages, sources[0])
            found = read_lane(
                sources, marks, windows, inputs.limits, inputs.communication, between, unrecorded
            )
        except NoOperatorsError as error:
            (missing if inputs.manifest is None else notes).append(f"{sources[0].path.name}: {error.problem}")
            traces += len(sources)
        except TraceFormatError as error:
            missing.append(str(error))
            incomplete.append(sources[0].lane)
        else:
            if unrecorded and found.lanes[0].is_unknown:
                lost.append(sources[0].lane)
            if found.problems:
                incomplete.append(sources[0].lane)
            missing += found.problems
            notes += found.notes
            traces, events = traces + found.traces, events + found.events
            read += found.lanes
        for source in sources:
            if on_progress:
                on_progress(source)
    if inputs.manifest is None and not read:
        raise TraceFormatError(inputs.directory, "; ".join(missing) or "holds no trace to report on")
    return StepRead(
        step=Step(inputs.manifest, read, inputs.capture),
        traces=traces,
        events=events,
        missing=missing,
        incomplete=incomplete,
        unrecorded=lost,
        notes=notes,
    )


def build_report(inputs: StepInputs, on_progress: Callable[[Source], None] | None = None) -> Report:
    """Read the traces of one step and compute its report.

    Args:
        inputs: The step, from :func:`~verl_profiling.timeline.inputs.find_steps`.
        on_progress: Called with each trace once it is read.

    Raises:
        TraceFormatError: There is neither a manifest nor a readable trace.
    """
    manifest = inputs.manifest
    found = read_step(inputs, on_progress)
    step = found.step
    tail = rollout_tail(step)
    calls = matched_calls(step)
    waiting = waiting_by_lane(calls)
    lost = [lost_by_cause(lane, step, tail) for lane in step.lanes]
    workers = [
        worker_row(lane, step, causes, waiting, inputs.directory)
        for lane, causes in zip(step.lanes, lost, strict=True)
    ]
    groups = shared_devices(step)
    lost_of = {lane.name: causes for lane, causes in zip(step.lanes, lost, strict=True)}
    lost_together = [lost_of_device(lanes, [lost_of[lane.name] for lane in lanes]) for lanes in groups]
    devices = [
        device_row(lanes, causes, waiting) for lanes, causes in zip(groups, lost_together, strict=True)
    ]
    logs = _Logs(inputs, Counters(step.begin_ns, step.end_ns))
    rollout, explanation = rollout_of(step, logs.read()) or (None, None)
    parts = {}
    if explanation is not None:
        for cause in BEHIND_TRAJECTORIES:
            parts[cause] = few_causes(
                explanation.of(np.concatenate((EMPTY, *(of[cause] for of in lost_together))))
            )
    idle = [causes["other_stages"] for causes in lost]
    measured = measures(manifest) if manifest else []
    asked, suspects = asked_of(step, measured, Activities(lost_of, waiting)) or (None, [])
    if asked is not None and (asked.stage or asked.sign in ("slow_step", "leader")):
        last, waited_s = last_to(asked.stage, step, calls)
        asked = msgspec.structs.replace(asked, last=last, waited_s=waited_s)
    engines = [engine_row(lane, step) for lane in step.lanes if lane.is_engine]
    served = requests(manifest) if manifest else []
    running = requests(_from(step.begin_ns, step.capture)) if step.capture else []
    promised = [artifact for worker in manifest.workers for artifact in worker.artifacts] if manifest else []
    expected = sum(artifact.status != "skipped" for artifact in promised) if manifest else found.traces
    report = Report(
        directory=str(inputs.directory),
        name=inputs.name or ("" if inputs.step is not None else inputs.title),
        step=inputs.step,
        policy_version=manifest.policy_version if manifest else None,
        complete=manifest.complete if manifest else True,
        span_us=step.span_ns / 1000,
        stages=anatomy(step, reduce(intersection, idle) if idle else EMPTY),
        workers=workers,
        engines=engines,
        tail=tail,
        stragglers=stragglers(step, calls, waiting),
        collectives=collective_rows(calls),
        kernels=kernels(step),
        lost=lost_total(devices, parts),
        weight_sync_share=step.share(step.during(WEIGHT_SYNC)),
        throughput=throughput(step, engines, len(devices)),
        gantt=list(gantt(step)),
        findings=[],
        clocks=list(_clocks(manifest)) if manifest else [],
        coverage=Coverage(
            expected=expected,
            read=found.traces + logs.readable,
            events=found.events,
            missing=[*found.missing, *logs.problems],
            lanes=[*found.incomplete, *logs.incomplete],
            unrecorded=found.unrecorded,
        ),
        metrics=manifest.metrics if manifest else {},
        notes=[*(_notes(manifest, step, inputs.capture) if manifest else []), *found.notes],
        measures=measured,
        costs=costs(manifest, inputs.directory) if manifest else [],
        capture_us=length(capture_time(step)) / 1000,
        anchors=anchors(manifest) if manifest else [],
        captured=manifest is not None,
        running=requests_running(running, step.span_ns / 1000),
        replicas=replica_rows(served),
        rollout=rollout,
        outside=outside_rows(manifest) if manifest else [],
        devices=devices,
        timeline_begin_ns=step.begin_ns - zero_ns(step.capture.begin_ns) if step.capture else None,
        asked=asked,
        suspects=suspects,
        counters=logs.counters.rows(),
        capture_steps=inputs.capture.steps if inputs.capture else [],
    )
    return visible_text_of(find(report))


class _Logs:
    """The logs of trajectories of a step, one in memory at a time, and what is wrong with them."""

    def __init__(self, inputs: StepInputs, counters: Counters) -> None:
        self._inputs = inputs
        self.counters = counters
        self.readable = 0
        self.problems: list[str] = []
        self.incomplete: list[str] = []

    def read(self) -> Iterator[tuple[Source, TrajectoryLog]]:
        for found in read_logs(self._inputs):
            self.problems += found.problems
            self.incomplete += [found.source.lane] if found.problems else []
            if found.log is not None:
                self.readable += 1
                self.counters.add(found.source, found.log)
                yield found.source, found.log


def _from(begin_ns: int, capture: Manifest) -> Manifest:
    """Return the manifest of a capture for times relative to the begin of one of its steps."""
    return msgspec.structs.replace(capture, begin_ns=begin_ns)


def _without_trace(manifest: Manifest, sources: Iterable[Source]) -> list[str]:
    """Return the lanes that should have a trace and have none."""
    known = {source.lane for source in sources}
    promised = (artifact for worker in manifest.workers for artifact in worker.artifacts)
    expected = (artifact.lane for artifact in promised if artifact.status != "skipped")
    return [lane for lane in dict.fromkeys(expected) if lane not in known]


def _unrecorded_device(step: Step, source: Source) -> str:
    """Return the kind of a lane's device if it was in use and a trace has no event of it, else nothing.

    An engine without a request had nothing to run on it.
    """
    worker = step.worker_of(source)
    if worker is None or (source.replica is not None and worker.requests_logged and not worker.requests):
        return ""
    of_lane = (artifact for artifact in worker.artifacts if artifact.lane == source.lane)
    return next((a.unrecorded_device for a in of_lane if a.unrecorded_device), "")


def _marks(manifest: Manifest | None, source: Source) -> set[str]:
    """Return the names of the stages that appear as marks in a lane's traces."""
    workers = manifest.workers if manifest else []
    return {span.name for worker in workers if worker.name == source.worker for span in worker.stages}


def _notes(manifest: Manifest, step: Step, capture: Manifest | None) -> list[str]:
    """Return what the capture noted, what its clocks and hosts show, and what is not known.

    Notes of the capture do not say which of its steps they are of.
    """
    on_cpus = [lane.source.worker for lane in step.lanes if not lane.on_device]
    noted = [*manifest.notes, *(note for worker in manifest.workers for note in worker.notes)]
    if (more := len(noted) - _MOST_NOTES) > 0:
        noted[_MOST_NOTES:] = [f"{more:,} more notes are in {MANIFEST_NAME}"]
    if capture is not None:
        noted = [f"of the whole capture, {step_list(capture.steps)}: {note}" for note in noted]
    told = [*noted, *clock_notes(manifest), *core_notes(manifest, on_cpus)]
    return [*told, *unlogged_requests(step), *unknown_devices(step)]


def _clocks(manifest: Manifest) -> Iterator[Clock]:
    for clock in manifest.clocks:
        if clock.samples:
            yield Clock(
                host=clock.host,
                offset_us=clock.offset_ns / 1000,
                error_us=clock.error_ns / 1000,
                drift_us=(clock.closing_offset_ns - clock.offset_ns) / 1000,
            )
