"""The anatomy of a step: which stage each instant of it belongs to."""

from __future__ import annotations

from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import (
    EMPTY,
    Spans,
    crowded,
    divided,
    intersection,
    length,
    spans_of,
    subtract,
    union,
    within,
)
from verl_profiling.report.lanes import Step
from verl_profiling.report.rows import StageRow

__all__ = ["CAPTURE_CALLS", "OUTSIDE_STAGES", "anatomy", "capture_time"]

CAPTURE_CALLS = "(starting and stopping the capture)"
OUTSIDE_STAGES = "(outside stages)"


def anatomy(step: Step, nobody: Spans = EMPTY) -> list[StageRow]:
    """Return the controller's stages in order of their first begin, and the rest of the step.

    An instant belongs to the capture if that starts or stops then, else in equal parts to the outermost
    stages that run, else to no stage. So the shares of the rows with depth 0 add up to 1. A nested row is
    a part of the one around it, and divided among nested stages in the same way.

    Args:
        step: The step.
        nobody: When every lane was idle and none took part in what the controller did.
    """
    runs: dict[int, dict[str, list[StageSpan]]] = {}
    order = dict.fromkeys((span.name, span.depth) for span in step.stages)
    for span in step.stages:
        runs.setdefault(span.depth, {}).setdefault(span.name, []).append(span)
    capture = within(capture_time(step), step.begin_ns, step.end_ns)
    rows: dict[tuple[str, int], StageRow] = {}
    outermost = EMPTY
    for depth, stages in runs.items():
        times = [_time_of(spans, capture, step) for spans in stages.values()]
        if depth == 0:
            outermost = union(*times)
        beside = crowded(times)
        for (name, spans), time, part_ns in zip(stages.items(), times, divided(times), strict=True):
            rows[name, depth] = StageRow(
                name=name,
                runs=len(spans),
                begin_us=(spans[0].begin_ns - step.begin_ns) / 1000,
                duration_us=length(time) / 1000,
                share=part_ns / max(step.span_ns, 1),
                depth=depth,
                side_by_side_us=length(intersection(time, beside)) / 1000,
                idle_us=length(intersection(time, nobody)) / 1000,
            )
    if not rows:
        return []
    rest = subtract(spans_of([(step.begin_ns, step.end_ns)]), union(outermost, capture))
    calls = [_rest_row(CAPTURE_CALLS, capture, step)] if len(capture) else []
    return [*(rows[place] for place in order), *calls, _rest_row(OUTSIDE_STAGES, rest, step)]


def _time_of(runs: list[StageSpan], capture: Spans, step: Step) -> Spans:
    time = within(spans_of((run.begin_ns, run.end_ns) for run in runs), step.begin_ns, step.end_ns)
    return subtract(time, capture)


def _rest_row(name: str, spans: Spans, step: Step) -> StageRow:
    return StageRow(
        name=name,
        runs=len(spans),
        begin_us=(int(spans[0, 0]) - step.begin_ns) / 1000 if len(spans) else 0.0,
        duration_us=length(spans) / 1000,
        share=step.share(spans),
    )


def capture_time(step: Step) -> Spans:
    """Return when the loop did nothing but wait for recordings to start and stop.

    Outside of stages these are the calls that do so. Inside a stage, in discrete mode, they are the starts
    and stops of tools that record this very stage: a worker that stops its tool while the loop is in another
    stage holds up nobody. A worker's stage that the controller has no stage of the same name for counts
    where the controller is in one stage only.
    """
    stages, whole = step.stages, step.during()
    outermost: dict[str, list[tuple[int, int]]] = {}
    for span in stages:
        if span.depth == 0:
            outermost.setdefault(span.name, []).append((span.begin_ns, span.end_ns))
    alone = subtract(whole, crowded([spans_of(runs) for runs in outermost.values()]))
    by_stage: dict[str, list[tuple[int, int]]] = {}
    for worker in step.workers:
        for tool_span in step.tool_spans_of(worker):
            if tool_span.stage is not None:
                by_stage.setdefault(tool_span.stage, []).append((tool_span.begin_ns, tool_span.end_ns))
    names = {span.name for span in stages}
    inside = (
        intersection(spans_of(spans), step.during(name) if name in names else alone)
        for name, spans in by_stage.items()
    )
    return union(subtract(step.calls, whole), *inside)
