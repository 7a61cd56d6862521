"""Builds the report of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, WEIGHT_SYNC, Manifest, Request
from verl_profiling.report import anatomy, capture_rows, collectives, lost, numbers
from verl_profiling.report.activity import LaneJob, LaneTraces, lane_job, read_lane
from verl_profiling.report.findings import find
from verl_profiling.report.intervals import EMPTY, Spans, common, grouped, length
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.model import Coverage, Report
from verl_profiling.report.records import Explanation, Pieces, Records, pieces_of
from verl_profiling.report.rollout_section import requests_of, rollout_of
from verl_profiling.report.suspects import asked_of
from verl_profiling.step_summary import StepSummary
from verl_profiling.timeline.cluster import results
from verl_profiling.timeline.member import read_logs
from verl_profiling.timeline.merge import zero_ns
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.trajectory_log import TrajectoryLog
from verl_profiling.units import step_list, visible_text_of
from verl_profiling.watch_log import read_watch_log

_MOST_NOTES = 100


@dataclass(kw_only=True, eq=False)
class Content:
    """Everything that was read of a step.

    Attributes:
        step: The step with its lanes.
        coverage: Completeness of the step.
        notes: Notes on the traces.
        calls: The matched collectives.
        records: The trajectories.
        served: The engine's request of each ``generate`` span, by the number of the span.
        pieces: Time of the trajectories by cause.
        of_processes: Time of processes outside trajectories by cause.
        counts: Samples of the processes' counters.
    """

    step: Step
    coverage: Coverage
    notes: list[str]
    calls: list[collectives.Calls]
    records: Records
    served: dict[int, Request]
    pieces: Pieces
    of_processes: Pieces
    counts: capture_rows.Counts


def read_lanes(
    inputs: StepInputs, on_progress: Callable[[Source], None] | None = None
) -> tuple[Step, Coverage, list[str]]:
    """Read the traces of one step; return its lanes, what was read, and notes.

    Args:
        inputs: The step, from :func:`~verl_profiling.timeline.inputs.find_steps`.
        on_progress: Called with each trace once it is read.

    Raises:
        TraceFormatError: There is neither a manifest nor a readable trace.
    """
    step, coverage = Step(inputs.manifest, inputs.capture), _expected(inputs)
    notes = [
        f"counted as communication by the option: {pattern}" for pattern in inputs.communication
    ]
    notes += inputs.notes
    jobs = list(_jobs(inputs, step, coverage))
    read = results([(partial(read_lane, job), job.sources) for job in jobs], inputs.ray)
    for job, traces in zip(jobs, read, strict=True):
        if isinstance(traces, TraceFormatError):
            problems = [
                str(TraceFormatError(source.path, traces.problem)) for source in job.sources
            ]
            traces = LaneTraces(problems=problems)
        _add(traces, job, step, coverage)
        notes += traces.notes
        if on_progress:
            for source in job.sources:
                on_progress(source)
    if inputs.manifest is None:
        coverage.expected = coverage.read
        if not step.lanes:
            problem = "; ".join([*coverage.missing, *notes]) or "holds no trace to report on"
            raise TraceFormatError(inputs.directory, problem)
    return step, coverage, list(dict.fromkeys(notes))  # lanes may share a file


def _expected(inputs: StepInputs) -> Coverage:
    """Return what the manifest promises, and what of it is missing."""
    coverage = Coverage(missing=list(inputs.absent))
    if inputs.unfinished:
        coverage.missing.insert(0, f"{inputs.title} {inputs.unfinished}")
    there = {source.lane for source in inputs.files}
    for worker in inputs.manifest.workers if inputs.manifest else []:
        for artifact in worker.artifacts:
            if artifact.status != "skipped":
                coverage.expected += 1
                if artifact.lane not in {*there, *coverage.lanes}:
                    coverage.lanes.append(artifact.lane)
    return coverage


def _jobs(inputs: StepInputs, step: Step, coverage: Coverage) -> Iterator[LaneJob]:
    """Yield the inputs for each lane: its traces on one host."""
    for sources in grouped(inputs.sources, attrgetter("lane")).values():
        here = [source for source in sources if source.host == sources[0].host]
        coverage.missing += [
            f"{source.path.name} is on another host than the lane's other traces"
            for source in sources
            if source not in here
        ]
        yield lane_job(here, step, inputs)


def _add(traces: LaneTraces, job: LaneJob, step: Step, coverage: Coverage) -> None:
    """Add the traces of a lane to the step, and to what was read of it."""
    name = job.sources[0].lane
    for lane in traces.lanes:
        step.add(lane)
    if job.unrecorded and any(lane.is_unknown for lane in traces.lanes):
        coverage.unrecorded.append(name)
    if traces.problems:
        coverage.lanes.append(name)
    coverage.missing += traces.problems
    coverage.read += len(traces.paths)
    coverage.events += traces.events
    coverage.has_stacks |= traces.has_stacks


def read_step(inputs: StepInputs, on_progress: Callable[[Source], None] | None = None) -> Content:
    """Read the traces and logs of one step; arguments and errors are those
    of :func:`read_lanes`.
    """
    step, coverage, notes = read_lanes(inputs, on_progress)
    calls, unmatched = collectives.matched_calls(step)
    counts: capture_rows.Counts = defaultdict(list)
    records = Records(_read_trajectories(inputs, coverage, counts), step.begin_ns, step.end_ns)
    served = requests_of(records, inputs.manifest) if inputs.manifest else {}
    pieces, of_processes = pieces_of(records, served)
    return Content(
        step=step,
        coverage=coverage,
        notes=[*notes, *unmatched],
        calls=calls,
        records=records,
        served=served,
        pieces=pieces,
        of_processes=of_processes,
        counts=counts,
    )


def build_report(inputs: StepInputs, content: Content) -> Report:
    """Compute the report of a step; predictions (critical path, changes that would help) are added
    later.

    Args:
        inputs: The step.
        content: Everything that was read of it.
    """
    step, calls, notes = content.step, content.calls, content.notes
    tail = numbers.rollout_tail(step)
    waits = collectives.waits(calls)
    for lane in step.lanes:
        lane.waiting = waits.get(lane, EMPTY)
        lane.idle = lost.lost_by_cause(lane, step, tail)
    devices = [(lanes, numbers.lost_of_device(lanes)) for lanes in numbers.shared_devices(step)]
    device_rows = [numbers.device_row(lanes, causes) for lanes, causes in devices]
    rollout, explanation = rollout_of(
        step, content.records, content.served, content.pieces, content.of_processes
    ) or (None, None)
    nobody = common([lane.idle["other_stages"] for lane in step.lanes])
    unmatched_ns = sum(map(length, collectives.unmatched(step, calls).values()))
    unmatched_ns += collectives.whole_graphs_ns(step.lanes)
    asked, suspects = asked_of(step, calls)
    engines = [numbers.engine_row(lane, step) for lane in step.lanes if lane.is_engine]
    of_manifest: dict[str, Any] = {}
    if inputs.manifest is not None:
        replicas = capture_rows.replica_rows(step.requests)
        ended_early = [*capture_rows.unfinished_requests(replicas), *lost.last_aborted(step)]
        notes = [*_notes(inputs.manifest, step, inputs.capture), *ended_early, *notes]
        of_manifest = _of_manifest(inputs.manifest, step)
        of_manifest["replicas"] = replicas
        capture = inputs.capture or inputs.manifest
        of_manifest["timeline_begin_ns"] = step.begin_ns - zero_ns(capture.begin_ns)
    report = Report(
        **of_manifest,
        directory=str(inputs.directory),
        name=inputs.name or ("" if inputs.step is not None else inputs.title),
        step=inputs.step,
        span_us=step.span_ns / 1000,
        stages=anatomy.anatomy(step, nobody),
        workers=[numbers.worker_row(lane, step, inputs.directory) for lane in step.lanes],
        engines=engines,
        tail=tail,
        stragglers=collectives.stragglers(step, calls),
        collectives=collectives.collective_rows(calls),
        unmatched_us=unmatched_ns / 1000,
        kernels=numbers.kernels(step),
        lost=lost.lost_total(device_rows, _parts(step, devices, explanation)),
        throughput=numbers.throughput(step, engines, len(devices)),
        gantt=list(anatomy.gantt(step)),
        findings=[],
        coverage=content.coverage,
        notes=notes,
        captured=inputs.manifest is not None,
        rollout=rollout,
        devices=device_rows,
        asked=asked,
        suspects=suspects,
        counters=list(capture_rows.counter_rows(content.counts, step.begin_ns, step.end_ns)),
        watched=_watched(inputs),
        capture_steps=inputs.capture.steps if inputs.capture else [],
    )
    return visible_text_of(find(report))


def _parts(
    step: Step,
    devices: list[tuple[list[Lane], Mapping[str, Spans]]],
    explanation: Explanation | None,
) -> dict[str, dict[str, float]]:
    """Return the parts (s) of causes of idle time that are divided further."""
    parts = {}
    if explanation is not None:
        for cause in lost.BEHIND_TRAJECTORIES:
            window = np.concatenate((EMPTY, *(causes[cause] for _, causes in devices)))
            parts[cause] = explanation.of(window)
    synced = lost.sync_parts(step, (lanes for lanes, _ in devices))
    if synced.keys() - {WEIGHT_SYNC}:
        parts["weight_sync"] = synced
    return parts


def _of_manifest(manifest: Manifest, step: Step) -> dict[str, Any]:
    """Return the fields of the report that plain traces lack."""
    return {
        "policy_version": manifest.policy_version,
        "complete": manifest.complete,
        "clocks": [clock for clock in manifest.clocks if clock.samples],
        "metrics": manifest.metrics,
        "measures": [
            row for worker in manifest.workers for row in capture_rows.measures_of(worker)
        ],
        "costs": capture_rows.costs(manifest),
        "running": anatomy.requests_running(step),
        "outside": anatomy.outside_rows(manifest),
    }


def _read_trajectories(
    inputs: StepInputs, coverage: Coverage, counts: capture_rows.Counts
) -> Iterator[tuple[Source, TrajectoryLog]]:
    """Yield the trajectory logs, one in memory at a time; add to ``coverage`` and ``counts``."""
    for source, log, problems in read_logs(inputs):
        coverage.missing += problems
        if problems:
            coverage.lanes.append(source.lane)
        if log is not None:
            coverage.read += 1
            for one in log.counts:
                counts[source.lane, one.name].append((one.at_ns - source.offset_ns, one.value))
            yield source, log


def _watched(inputs: StepInputs) -> StepSummary | None:
    """Return the last summary of the captured step in the log of the run's watch."""
    with suppress(TraceFormatError):
        for line in reversed(read_watch_log(inputs.directory.parent)):
            if (line.step, line.captured) == (inputs.step, inputs.directory.name):
                return line
    return None


def _notes(manifest: Manifest, step: Step, capture: Manifest | None) -> list[str]:
    """Return the notes of the capture, on its clocks and hosts, and on missing data.

    Notes of a continuous capture do not belong to a single step.
    """
    notes = [*manifest.notes, *(note for worker in manifest.workers for note in worker.notes)]
    if (more := len(notes) - _MOST_NOTES) > 0:
        notes[_MOST_NOTES:] = [f"{more:,} more notes are in {MANIFEST_NAME}"]
    if capture is not None:
        notes = [f"of the whole capture, {step_list(capture.steps)}: {note}" for note in notes]
    return [*notes, *capture_rows.clock_notes(manifest), *lost.unlogged_requests(step)]
