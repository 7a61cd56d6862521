"""The steps of a continuous capture, each as if it had been captured alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from verl_profiling.identity import step_folder_name
from verl_profiling.manifest import (
    MAX_NS,
    Artifact,
    CaptureCost,
    CaptureResult,
    Manifest,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.timeline.lanes import Source
from verl_profiling.timeline.step_inputs import StepInputs

__all__ = ["one_by_one"]


def one_by_one(inputs: StepInputs) -> list[StepInputs]:
    """Return the inputs of each step of a capture; those of a capture of one step are returned as they are.

    A span that reaches over the end of a step is a part of both. A request belongs to the step in which it
    was sent; what lies between two steps, such as validation, belongs to none.
    """
    manifest = inputs.manifest
    if manifest is None or len(manifest.step_spans) < 2 or not _in_order(manifest.step_spans):
        return [inputs]
    *before, last = manifest.step_spans
    if manifest.state != "written":  # its process was killed in the last step
        last = msgspec.structs.replace(last, end_ns=max(last.end_ns, manifest.end_ns))
        manifest = msgspec.structs.replace(manifest, step_spans=[*before, last])
    return [_inputs_of(inputs, manifest, index) for index in range(len(manifest.step_spans))]


def _in_order(spans: Sequence[StepSpan]) -> bool:
    """Return whether steps follow each other; a manifest that says anything else says nothing of steps."""
    follows = (a.step < b.step and a.end_ns <= b.begin_ns for a, b in pairwise(spans))
    return all(follows) and all(span.begin_ns <= span.end_ns for span in spans)


def _inputs_of(inputs: StepInputs, manifest: Manifest, index: int) -> StepInputs:
    span = manifest.step_spans[index]
    step = _Part(manifest, index)
    return msgspec.structs.replace(
        inputs,
        step=span.step,
        manifest=step.manifest(),
        capture=manifest,
        sources=[source for source in inputs.sources if step.has_a_part_of(source, inputs.directory)],
        label=step_folder_name(span.step),
    )


class _Part:
    """What of a manifest is of one of its steps."""

    def __init__(self, manifest: Manifest, index: int) -> None:
        self._whole = manifest
        self._index = index
        self._span = manifest.step_spans[index]

    def manifest(self) -> Manifest:
        whole, span = self._whole, self._span
        return msgspec.structs.replace(
            whole,
            step=span.step,
            steps=[span.step],
            step_spans=[span],
            policy_version=span.policy_version,
            begin_ns=span.begin_ns,
            end_ns=span.end_ns,
            complete=whole.complete or self._index < len(whole.step_spans) - 1,
            stages=list(self._stages(whole.stages, 0)),
            outside=list(self._outside()),
            rpcs=[rpc for rpc in whole.rpcs if self._is_of(rpc.begin_ns)],
            workers=[self._worker(worker) for worker in whole.workers],
            metrics=span.metrics,
        )

    def has_a_part_of(self, source: Source, directory: Path) -> bool:
        """Return whether a trace was recorded while the step ran."""
        name = source.path.relative_to(directory).as_posix()
        return any(
            name.startswith(artifact.path.removesuffix(".gz"))
            for worker in self._whole.workers
            if worker.name == source.worker
            for artifact in self._recorded(worker)
        )

    def _recorded(self, worker: CaptureResult) -> list[Artifact]:
        """Return the artifacts of which a part is of this step, and those of which it is not known."""
        shift = self._whole.offset_ns(worker.identity)
        begin_ns, end_ns = self._span.begin_ns + shift, self._span.end_ns + shift
        return [
            artifact
            for artifact in worker.artifacts
            if not artifact.end_ns or (artifact.begin_ns < end_ns and artifact.end_ns > begin_ns)
        ]

    def _worker(self, worker: CaptureResult) -> CaptureResult:
        shift = self._whole.offset_ns(worker.identity)
        begin_ns, end_ns = self._span.begin_ns + shift, self._span.end_ns + shift
        tool_spans = [span for span in worker.tool_spans if self._is_of(span.begin_ns - shift)]
        return msgspec.structs.replace(
            worker,
            step=self._span.step,
            stages=list(self._stages(worker.stages, shift)),
            tool_spans=tool_spans,
            cost=_cost(worker, tool_spans),
            requests=[request for request in worker.requests if begin_ns <= request.begin_ns < end_ns],
            artifacts=self._recorded(worker),
        )

    def _stages(self, stages: Sequence[StageSpan], shift: int) -> Iterator[StageSpan]:
        begin_ns, end_ns = self._span.begin_ns + shift, self._span.end_ns + shift
        for stage in stages:
            first, last = max(stage.begin_ns, begin_ns), min(stage.end_ns, end_ns)
            if first < last or begin_ns <= stage.begin_ns == stage.end_ns < end_ns:
                yield StageSpan(stage.name, first, last, stage.thread, stage.depth, stage.failed)

    def _outside(self) -> Iterator[StageSpan]:
        """Yield what the loop did before the first step, and between this one and the next."""
        spans, here = self._whole.step_spans, self._span
        begin_ns = spans[self._index + 1].begin_ns if self._index + 1 < len(spans) else MAX_NS
        for stage in sorted((*self._whole.outside, *self._whole.stages), key=lambda stage: stage.begin_ns):
            before_all = self._index == 0 and stage.end_ns <= here.begin_ns
            if before_all or here.end_ns <= stage.begin_ns < begin_ns:
                yield stage

    def _is_of(self, begin_ns: int) -> bool:
        """Return whether what drives the capture is of this step: the last that had begun, else the first."""
        spans = self._whole.step_spans
        begun = [index for index, span in enumerate(spans) if span.begin_ns <= begin_ns]
        return max(begun, default=0) == self._index


def _cost(worker: CaptureResult, tool_spans: Sequence[ToolSpan]) -> CaptureCost:
    """Return the part of a worker's cost that these starts and stops of its tool are."""

    def seconds(spans: Sequence[ToolSpan], name: str) -> float:
        return sum(span.end_ns - span.begin_ns for span in spans if span.name == name) / 1e9

    stops_s = seconds(worker.tool_spans, "stop")
    stop_s = seconds(tool_spans, "stop")
    return CaptureCost(
        start_s=seconds(tool_spans, "start"),
        stop_s=stop_s,
        export_s=worker.cost.export_s * stop_s / stops_s if stops_s else 0.0,
    )
