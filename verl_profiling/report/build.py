"""Builds the report of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.files.run_files import known_run
from verl_profiling.files.step_summary import ROLLOUT, StepSummary
from verl_profiling.files.watch_log import read_watch_log
from verl_profiling.manifest import MANIFEST_NAME, WEIGHT_SYNC, Manifest
from verl_profiling.numbers import capture_rows, collectives, idle_causes, lane_rows, stage_rows
from verl_profiling.numbers.achieved import Achieved
from verl_profiling.numbers.bandwidth import link_rows
from verl_profiling.numbers.capture_rows import trajectory_gantt
from verl_profiling.numbers.given_work import with_reason, work_rows
from verl_profiling.numbers.rollout_section import rollout_of
from verl_profiling.numbers.suspects import requested_of, with_fault
from verl_profiling.numbers.taught_nothing import useless_training
from verl_profiling.predict.engine_fit import Knee, fitted, knee_of
from verl_profiling.predict.graph import graph_of
from verl_profiling.predict.prediction import Prediction, predict
from verl_profiling.predict.replays import replay
from verl_profiling.predict.service_rows import service_rows
from verl_profiling.predict.step_graph import Graph
from verl_profiling.report.findings import find
from verl_profiling.report.health import noticed_here
from verl_profiling.report.html import NotebookReport
from verl_profiling.report.model import Report
from verl_profiling.slices.intervals import EMPTY, Spans, common, length
from verl_profiling.steps.causes import Explanation
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.read import Content
from verl_profiling.steps.step import StepInputs, zero_ns
from verl_profiling.units import step_list, visible, visible_text_of

_KNEE_SHARE = 0.3  # of the step that waits for the rollout: below, its engines matter little
_MOST_NOTES = 100


def build_report(inputs: StepInputs, content: Content) -> Report:
    """Compute the report of a step; predictions (critical path, changes that would help) are added
    later.

    Args:
        inputs: Folder, manifest and files of the step.
        content: Everything that was read of them.
    """
    step, calls, notes = content.step, content.calls, content.notes
    tail = lane_rows.rollout_tail(step)
    called = collectives.in_calls(calls)
    waits = collectives.waits(calls)
    for lane in step.lanes:
        lane.waiting = waits.get(lane, EMPTY)
        lane.idle = idle_causes.lost_by_cause(lane, step, tail)
    devices = [(lanes, lane_rows.lost_of_device(lanes)) for lanes in lane_rows.shared_devices(step)]
    device_rows = [lane_rows.device_row(lanes, causes) for lanes, causes in devices]
    rollout, explanation = rollout_of(content) or (None, None)
    nobody = common([lane.idle["other_stages"] for lane in step.lanes])
    unmatched_ns = sum(map(length, collectives.unmatched(step, calls).values()))
    unmatched_ns += collectives.whole_graphs_ns(step.lanes)
    request, suspects = requested_of(step, calls)
    log = _log_of(inputs)
    watched = _watched(inputs, log)
    request = with_fault(request, suspects, watched, log)
    engines = [lane_rows.engine_row(lane, step) for lane in step.lanes if lane.is_engine]
    of_manifest: dict[str, Any] = {}
    if inputs.manifest is not None:
        replicas = capture_rows.replica_rows(step.requests)
        ended_early = [*capture_rows.unfinished_requests(replicas), *idle_causes.last_aborted(step)]
        notes = [*_notes(inputs.manifest, step, inputs.capture), *ended_early, *notes]
        of_manifest = _of_manifest(inputs.manifest, step)
        of_manifest["replicas"] = replicas
        capture = inputs.capture or inputs.manifest
        of_manifest["timeline_begin_ns"] = step.begin_ns - zero_ns(capture.begin_ns)
    work = list(work_rows(step))
    info = known_run(inputs.directory.parent)
    achieved = Achieved(step, work, info.config if info else {})
    report = NotebookReport(
        **of_manifest,
        directory=str(inputs.directory),
        name=inputs.name or ("" if inputs.step is not None else inputs.title),
        step=inputs.step,
        span_us=step.span_ns / 1000,
        stages=list(stage_rows.anatomy(step, nobody)),
        workers=[lane_rows.worker_row(lane, step, inputs.directory) for lane in step.lanes],
        engines=engines,
        tail=tail,
        stragglers=[with_reason(row, step, called) for row in collectives.stragglers(step, calls)],
        work=work,
        achieved=achieved.rows,
        unknown_limits=achieved.unknown,
        useless_training=useless_training(step),
        collectives=collectives.collective_rows(calls),
        links=link_rows(step, calls),
        unmatched_us=unmatched_ns / 1000,
        kernels=lane_rows.kernels(step),
        lost=idle_causes.lost_total(device_rows, _parts(step, devices, explanation)),
        throughput=lane_rows.throughput(step, engines, len(devices)),
        gantt=list(stage_rows.gantt(step)),
        trajectory_gantt=list(trajectory_gantt(content)),
        findings=[],
        coverage=content.coverage,
        notes=notes,
        captured=inputs.manifest is not None,
        rollout=rollout,
        devices=device_rows,
        capture_request=request,
        suspects=suspects,
        counters=list(capture_rows.counter_rows(content.counts, step.begin_ns, step.end_ns)),
        watched=watched,
        capture_steps=inputs.capture.steps if inputs.capture else [],
    )
    return visible_text_of(find(report, noticed_here(report, log)))


def _parts(
    step: Step,
    devices: list[tuple[list[Lane], Mapping[str, Spans]]],
    explanation: Explanation | None,
) -> dict[str, dict[str, float]]:
    """Return the seconds of causes of idle time by what happened meanwhile, for some causes."""
    parts = {}
    if explanation is not None:
        for cause in idle_causes.BEHIND_TRAJECTORIES:
            window = np.concatenate((EMPTY, *(causes[cause] for _, causes in devices)))
            parts[cause] = explanation.of(window)
    synced = idle_causes.sync_parts(step, (lanes for lanes, _ in devices))
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
        "costs": list(capture_rows.costs(manifest)),
        "around_the_step": list(stage_rows.around_rows(manifest)),
    }


def _log_of(inputs: StepInputs) -> Sequence[StepSummary]:
    """Return the log of the run's watch; empty without one."""
    with suppress(TraceFormatError):
        return read_watch_log(inputs.directory.parent)
    return []


def _watched(inputs: StepInputs, log: Sequence[StepSummary]) -> StepSummary | None:
    """Return the last summary of the captured step in the log of the run's watch."""
    for line in reversed(log):
        if (line.step, line.captured) == (inputs.step, inputs.directory.name):
            return line
    return None


def _notes(manifest: Manifest, step: Step, capture: Manifest | None) -> list[str]:
    """Return the notes of the capture, on its clocks and hosts, and on missing data.

    Notes of a continuous capture do not belong to a single step.
    """
    notes = list(manifest.notes)
    for worker in manifest.workers:
        notes += worker.notes
    if (more := len(notes) - _MOST_NOTES) > 0:
        notes[_MOST_NOTES:] = [f"{more:,} more notes are in {MANIFEST_NAME}"]
    if capture is not None:
        notes = [f"of the whole capture, {step_list(capture.steps)}: {note}" for note in notes]
    return [*notes, *capture_rows.clock_notes(manifest), *idle_causes.unlogged_requests(step)]


def with_predictions(report: Report, content: Content) -> tuple[Report, Graph | None]:
    """Return a report with its critical path and the changes that would help, and the graph of the
    step.

    An error costs these alone: it becomes a sentence on missing data.

    Args:
        report: The report of a step.
        content: Everything that was read of the step.
    """
    try:
        graph = graph_of(content)
        prediction = visible_text_of(predict(graph))
        knee = _knee(report, graph, prediction)
    except Exception as error:
        problem = (
            f"no critical path and no changes that would help: {type(error).__name__}: {error}"
        )
        report.coverage.missing.append(visible(problem))
        return report, None
    rows: dict[str, Any] = {
        "services": service_rows(content, graph.limits),
        "what_would_help": prediction.what_would_help,
        "critical_path": prediction.path,
        "knee": knee,
    }
    return msgspec.structs.replace(report, **rows), graph


def _knee(report: Report, graph: Graph, prediction: Prediction) -> Knee | None:
    """Return how many requests a replica should get, where the step waits for the rollout."""
    rollout = [row for row in prediction.path if row.stage.startswith(ROLLOUT)]
    share = sum(row.duration_us for row in rollout) / max(report.span_us, 1)
    if share < _KNEE_SHARE:
        return None
    recorded = replay(graph)
    try:
        return knee_of(recorded, fitted(recorded))
    except ConfigError:  # no requests, or they do not show it
        return None
