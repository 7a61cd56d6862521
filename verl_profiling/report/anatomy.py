"""The stages of a step: which one each instant belongs to, and what the loop did around the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, Manifest, Rpc, StageSpan
from verl_profiling.report.intervals import (
    EMPTY,
    Spans,
    covered_before,
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
from verl_profiling.report.rows import OutsideRow, StageRow
from verl_profiling.units import duration

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
    idle = _without(capture, nobody)
    rows: dict[tuple[str, int], StageRow] = {}
    for depth, stages in runs.items():
        times = [_without(capture, _time_of(spans, step)) for spans in stages.values()]
        beside = crowded(times)
        for (name, spans), time, part_ns in zip(stages.items(), times, divided(times), strict=True):
            rows[name, depth] = StageRow(
                name=name,
                runs=len(spans),
                begin_us=(spans[0].begin_ns - step.begin_ns) / 1000,
                duration_us=length(time) / 1000,
                share=part_ns / max(step.span_ns, 1),
                depth=depth,
                side_by_side_us=_common_ns(time, beside) / 1000,
                idle_us=_common_ns(time, idle) / 1000,
            )
    if not rows:
        return []
    outermost = _time_of((span for span in step.stages if span.depth == 0), step)
    rest = subtract(spans_of([(step.begin_ns, step.end_ns)]), union(outermost, capture))
    calls = [_rest_row(CAPTURE_CALLS, capture, step)] if len(capture) else []
    return [*(rows[place] for place in order), *calls, _rest_row(OUTSIDE_STAGES, rest, step)]


def _time_of(runs: Iterable[StageSpan], step: Step) -> Spans:
    return within(spans_of((run.begin_ns, run.end_ns) for run in runs), step.begin_ns, step.end_ns)


def _without(capture: Spans, time: Spans) -> Spans:
    """Return a set of time on an axis that the capture is cut out of."""
    return union(time - covered_before(capture, time))


def _common_ns(time: Spans, other: Spans) -> int:
    return int(np.diff(covered_before(other, time), axis=1).sum())


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

    Around the step these are the pauses, and outside of stages the calls that do so. Inside a stage, in
    discrete mode, they are the starts and stops of tools that record this very stage: a worker that stops
    its tool while the loop is in another stage holds up nobody. A worker's stage that the controller has no
    stage of the same name for counts where the controller is in one stage only.
    """
    stages: dict[str, list[tuple[int, int]]] = {}
    outermost: dict[str, list[tuple[int, int]]] = {}
    for span in step.stages:
        for kind in (stages, outermost) if span.depth == 0 else (stages,):
            kind.setdefault(span.name, []).append((span.begin_ns, span.end_ns))
    tools: dict[str, list[tuple[int, int]]] = {}  # by stage; "" for stages of no name that the loop knows
    for worker in step.workers:
        for tool_span in worker.tool_spans:
            if tool_span.stage is not None:
                stage = tool_span.stage if tool_span.stage in stages else ""
                tools.setdefault(stage, []).append((tool_span.begin_ns, tool_span.end_ns))
    whole = step.during()
    elsewhere = spans_of(tools.pop("", []))
    if len(elsewhere):
        alone = subtract(whole, crowded([spans_of(runs) for runs in outermost.values()]))
        elsewhere = intersection(elsewhere, alone)
    inside = (intersection(spans_of(spans), spans_of(stages[name])) for name, spans in tools.items())
    return union(step.pauses, subtract(step.calls, whole), elsewhere, *inside)


_ROWS = _PARTS = 4


def outside_rows(manifest: Manifest) -> list[OutsideRow]:
    """Return a row for each pause and for each outermost stage outside of the step, in order of time."""
    runs: dict[str, list[StageSpan]] = {}
    inside: dict[str, dict[str, float]] = {}
    outermost = ""
    for span in sorted(manifest.outside, key=lambda span: (span.begin_ns, span.depth)):
        if span.depth == 0:
            outermost = span.name
            runs.setdefault(outermost, []).append(span)
            inside.setdefault(outermost, {})
        elif span.depth == 1 and outermost:
            parts = inside[outermost]
            parts[span.name] = parts.get(span.name, 0.0) + _seconds([span])
    return [
        OutsideRow(
            name=name,
            runs=len(spans),
            begin_us=(spans[0].begin_ns - manifest.begin_ns) / 1000,
            duration_us=_seconds(spans) * 1e6,
            parts=_largest_first(inside[name] | _answers(manifest, name, spans[0])),
        )
        for name, spans in runs.items()
    ]


def outside_sentences(rows: Sequence[OutsideRow]) -> Iterator[str]:
    """Yield a line for what precedes the step, and one for what follows it, with what took longest."""
    before = [row for row in rows if row.name == CAPTURE_START]
    for when, found in (("before", before), ("after", [row for row in rows if row not in before])):
        if found:
            longest = sorted(found, key=lambda row: -row.duration_us)[:_ROWS]
            more = f" and {len(found) - _ROWS} more" if len(found) > _ROWS else ""
            yield f"{when} the step: {', '.join(_in_words(row) for row in found if row in longest)}{more}"


def _in_words(row: OutsideRow) -> str:
    name = "pause" if row.is_pause else row.name
    parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in list(row.parts.items())[:_PARTS])
    return f"{name} {duration(row.duration_us / 1e6)}" + (f" ({parts})" if parts else "")


def _answers(manifest: Manifest, name: str, pause: StageSpan) -> dict[str, float]:
    """Return for each role how long its slowest worker took to answer in a pause, in seconds."""
    method = {CAPTURE_START: "start_capture", CAPTURE_STOP: "stop_capture"}.get(name)
    roles = {worker.name: worker.identity.role for worker in manifest.workers}
    calls: dict[str, list[Rpc]] = {}
    for rpc in manifest.rpcs:
        if rpc.method == method and pause.begin_ns <= rpc.begin_ns <= pause.end_ns:
            calls.setdefault(roles.get(rpc.worker, rpc.worker), []).append(rpc)
    return {
        role: (max(rpc.end_ns for rpc in made) - min(rpc.begin_ns for rpc in made)) / 1e9
        for role, made in calls.items()
    }


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _seconds(spans: Sequence[StageSpan]) -> float:
    return sum(span.end_ns - span.begin_ns for span in spans) / 1e9
