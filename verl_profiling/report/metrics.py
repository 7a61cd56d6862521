"""The numbers of the report: every formula, its unit and its source is here.

Let ``S`` be the set of time in which a lane was observed, ``C``, ``M`` and ``K`` those in
which it computed, communicated and copied (see :mod:`~verl_profiling.report.activity`), all
inside ``S``, and ``|X|`` the length of a set:

==========================  ==============================  ====================================
number                      formula                         source
==========================  ==============================  ====================================
busy                        ``|C + M + K|``                 HTA temporal breakdown (span - idle)
idle                        ``|S| - busy``                  HTA temporal breakdown, idle time
compute                     ``|C|``                         HTA temporal breakdown, compute time
communication               ``|M|``                         HTA communication/computation overlap
overlap                     ``|C * M|``                     HTA communication/computation overlap
exposed communication       ``|M - C|``                     communication - overlap
==========================  ==============================  ====================================

``S`` is the step for an e2e capture, the recorded windows for a discrete one, and the time
from the first to the last busy event where there is no manifest (HTA's definition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import Manifest, StageSpan
from verl_profiling.report.activity import Activity, read_activity
from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, spans_of, subtract, union
from verl_profiling.report.model import Clock, Coverage, Report, StageRow, WorkerRow
from verl_profiling.timeline.sources import Source, StepInputs

__all__ = ["OUTSIDE_STAGES", "build_report"]

OUTSIDE_STAGES = "(outside stages)"


def build_report(inputs: StepInputs, on_progress: Callable[[Source], None] | None = None) -> Report:
    """Read the traces of one step and compute its report.

    Args:
        inputs: The step, from :func:`~verl_profiling.timeline.inputs.find_steps`.
        on_progress: Called with each trace when it was read.

    Raises:
        TraceFormatError: There is neither a manifest nor a trace that can be read.
    """
    manifest = inputs.manifest
    missing = list(inputs.absent)
    lanes: list[tuple[Source, Activity]] = []
    read = 0
    for _, group in groupby(inputs.sources, key=lambda source: source.lane):
        sources = list(group)
        try:
            activity = read_activity((source.path, source.offset_ns) for source in sources)
        except TraceFormatError as error:
            missing.append(str(error))
            continue
        finally:
            for source in sources:
                if on_progress:
                    on_progress(source)
        missing += activity.problems
        read += len(sources)
        lanes.append((sources[0], activity))
    if manifest is None and not lanes:
        raise TraceFormatError(inputs.directory, "; ".join(missing) or "holds no trace to report on")
    begin_ns, end_ns = _step_span(manifest, [activity for _, activity in lanes])
    expected = sum(a.status != "skipped" for w in manifest.workers for a in w.artifacts) if manifest else read
    return Report(
        directory=str(inputs.directory),
        step=inputs.step,
        policy_version=manifest.policy_version if manifest else None,
        complete=manifest.complete if manifest else True,
        span_us=(end_ns - begin_ns) / 1000,
        stages=_anatomy(manifest) if manifest else [],
        workers=[_worker_row(source, a, _observed(manifest, source, a)) for source, a in lanes],
        clocks=list(_clocks(manifest)) if manifest else [],
        coverage=Coverage(
            expected=expected, read=read, events=sum(a.events for _, a in lanes), missing=missing
        ),
        metrics=manifest.metrics if manifest else {},
        notes=[*manifest.notes, *(note for w in manifest.workers for note in w.notes)] if manifest else [],
    )


def _step_span(manifest: Manifest | None, activities: list[Activity]) -> tuple[int, int]:
    if manifest:
        return manifest.begin_ns, manifest.end_ns
    begins = [a.first_ns for a in activities if a.first_ns is not None]
    ends = [a.last_ns for a in activities if a.last_ns is not None]
    return min(begins, default=0), max(ends, default=0)


def _anatomy(manifest: Manifest) -> list[StageRow]:
    """Return the controller's stages in order of their first begin, and the rest of the step."""
    step_ns = max(manifest.end_ns - manifest.begin_ns, 1)
    runs: dict[tuple[str, int], list[StageSpan]] = {}
    for span in sorted(manifest.stages, key=lambda s: s.begin_ns):
        runs.setdefault((span.name, span.depth), []).append(span)
    rows = []
    for (name, depth), spans in runs.items():
        took = length(spans_of((s.begin_ns, s.end_ns) for s in spans))
        rows.append(
            StageRow(
                name=name,
                runs=len(spans),
                begin_us=(spans[0].begin_ns - manifest.begin_ns) / 1000,
                duration_us=took / 1000,
                share=took / step_ns,
                depth=depth,
            )
        )
    inside = spans_of((s.begin_ns, s.end_ns) for s in manifest.stages)
    outside = length(subtract(spans_of([(manifest.begin_ns, manifest.end_ns)]), inside))
    if manifest.stages:
        rows.append(
            StageRow(
                name=OUTSIDE_STAGES, runs=1, begin_us=0.0, duration_us=outside / 1000, share=outside / step_ns
            )
        )
    return rows


def _observed(manifest: Manifest | None, source: Source, activity: Activity) -> Spans:
    """Return the set of time that the numbers of a lane refer to."""
    if manifest is None:
        busy = activity.busy
        return spans_of([(int(busy[0, 0]), int(busy[-1, 1]))]) if len(busy) else EMPTY
    worker = next(w for w in manifest.workers if w.name == source.worker)
    if worker.mode == "discrete":
        windows = [(a.begin_ns, a.end_ns) for a in worker.artifacts if a.lane == source.lane and a.end_ns]
        return spans_of((begin - source.offset_ns, end - source.offset_ns) for begin, end in windows)
    return spans_of([(manifest.begin_ns, manifest.end_ns)])


def _worker_row(source: Source, activity: Activity, observed: Spans) -> WorkerRow:
    compute = intersection(activity.compute, observed)
    communication = intersection(activity.communication, observed)
    memory = intersection(activity.memory, observed)
    busy_ns = length(union(compute, communication, memory))
    overlap_ns = length(intersection(compute, communication))
    return WorkerRow(
        name=source.lane,
        role=source.role,
        rank=source.rank,
        replica=source.replica,
        device=activity.on_device,
        span_us=length(observed) / 1000,
        busy_us=busy_ns / 1000,
        idle_us=(length(observed) - busy_ns) / 1000,
        compute_us=length(compute) / 1000,
        communication_us=length(communication) / 1000,
        exposed_communication_us=(length(communication) - overlap_ns) / 1000,
        overlap_us=overlap_ns / 1000,
        memcpy_us=length(memory) / 1000,
    )


def _clocks(manifest: Manifest) -> Iterator[Clock]:
    for clock in manifest.clocks:
        if clock.samples:
            yield Clock(
                host=clock.host,
                offset_us=clock.offset_ns / 1000,
                error_us=clock.error_ns / 1000,
                drift_us=(clock.closing_offset_ns - clock.offset_ns) / 1000,
            )
