"""Reads one step: its lanes, collectives, trajectories and counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.trajectory_log import TrajectoryLog
from verl_profiling.manifest import Request
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.calls import Calls, matched_calls
from verl_profiling.steps.causes import Pieces, pieces_of
from verl_profiling.steps.device_lanes import read_lane
from verl_profiling.steps.lane_events import LaneJob, LaneTraces
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.parallel_reads import results
from verl_profiling.steps.step import Source, StepInputs
from verl_profiling.steps.trajectory_columns import Records, requests_of
from verl_profiling.steps.trajectory_spans import read_logs

Counts = dict[tuple[str, str], list[tuple[int, float]]]
"""Samples (unix ns, value) of each counter, by lane and counter name."""


class Content(msgspec.Struct, kw_only=True):
    """Everything that was read of a step.

    Attributes:
        step: The step with its lanes.
        coverage: Files of the step that were read, and those that are missing.
        notes: Sentences for the report on what its numbers leave out or assume.
        calls: Collectives, matched between ranks.
        records: Trajectories and their spans.
        served: The engine's request of each ``generate`` span, by row in ``records.spans``.
        pieces: Time of the trajectories, as intervals with a cause such as ``decode``.
        of_processes: Time of spans outside trajectories, as intervals with a cause.
        counts: Samples of the processes' counters.
    """

    step: Step
    coverage: Coverage
    notes: list[str]
    calls: list[Calls]
    records: Records
    served: dict[int, Request]
    pieces: Pieces
    of_processes: Pieces
    counts: Counts


def read_lanes(
    inputs: StepInputs, on_progress: Callable[[Source], None] | None = None
) -> tuple[Step, Coverage, list[str]]:
    """Read the traces of one step; return the step with its lanes, its completeness, and notes.

    Args:
        inputs: The step, from :func:`~verl_profiling.steps.inputs.find_steps`.
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
            error, traces = traces, LaneTraces()
            for source in job.sources:
                traces.problems.append(str(TraceFormatError(source.path, error.problem)))
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
    """Return the completeness before any trace is read: number of artifacts in the manifest, lanes
    without a file, and sentences on missing files.
    """
    coverage = Coverage(missing=list(inputs.absent))
    if inputs.unfinished:
        coverage.missing.insert(0, f"{inputs.title} {inputs.unfinished}")
    elif inputs.manifest is not None and inputs.workers and inputs.manifest.why_nothing:
        coverage.missing.append(f"nothing was recorded: {inputs.manifest.why_nothing}")
    there = {source.lane for source in inputs.files}
    for worker in inputs.workers:
        for artifact in worker.artifacts:
            if artifact.status != "skipped":
                coverage.expected += 1
                if artifact.lane not in {*there, *coverage.lanes}:
                    coverage.lanes.append(artifact.lane)
    return coverage


def _jobs(inputs: StepInputs, step: Step, coverage: Coverage) -> Iterator[LaneJob]:
    """Yield the inputs for reading each lane. Its traces on a second host count as missing."""
    for sources in grouped(inputs.sources, attrgetter("lane")).values():
        first = sources[0]
        here = []
        for source in sources:
            if source.host == first.host:
                here.append(source)
            else:
                sentence = f"{source.path.name} is on another host than the lane's other traces"
                coverage.missing.append(sentence)
        marks: set[str] = set()
        for worker in step.workers:
            if worker.name == first.worker:
                marks.update(map(attrgetter("name"), worker.stages))
        yield LaneJob(
            sources=here,
            limits=inputs.limits,
            communication=inputs.communication,
            is_captured=step.manifest is not None,
            stages=step.stages_of(first),
            marks=marks,
            between=(step.begin_ns, step.end_ns) if inputs.capture else None,
            unrecorded=step.unrecorded_device(first),
        )


def _add(traces: LaneTraces, job: LaneJob, step: Step, coverage: Coverage) -> None:
    """Add the lanes of one process to the step, and its traces to the step's completeness."""
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
    calls, unmatched = matched_calls(step)
    counts: Counts = defaultdict(list)
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


def _read_trajectories(
    inputs: StepInputs, coverage: Coverage, counts: Counts
) -> Iterator[tuple[Source, TrajectoryLog]]:
    """Yield the trajectory logs, one in memory at a time; add to ``coverage`` and ``counts``."""
    for source, log, problems in read_logs(inputs):
        coverage.missing += problems
        if problems:
            coverage.lanes.append(source.lane)
        if log is not None:
            coverage.read += 1
            for count in log.counts:
                sample = (count.at_ns - source.offset_ns, count.value)
                counts[source.lane, count.name].append(sample)
            yield source, log


class Coverage(msgspec.Struct, kw_only=True):
    """Completeness of a step: what was read, and what is missing.

    Attributes:
        expected: Number of artifacts that the capture should have written.
        read: Number of readable traces and trajectory logs.
        events: Number of events in the traces.
        missing: Sentences on missing and damaged data.
        lanes: Lanes with missing or damaged data.
        unrecorded: Lanes with a device that was in use, but has no events in the traces.
        has_stacks: Whether Python frames were recorded.
    """

    expected: int = 0
    read: int = 0
    events: int = 0
    missing: list[str]
    lanes: list[str] = []
    unrecorded: list[str] = []
    has_stacks: bool = False
