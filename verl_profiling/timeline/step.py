"""The input of the analysis: the traces of one step, and where its results go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import step_folder_name
from verl_profiling.manifest import (
    MAX_NS,
    CaptureCost,
    CaptureResult,
    Manifest,
    Rpc,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.trace import Event
from verl_profiling.trajectory_log import LOG_SUFFIX

_ROLE_ORDER = ("controller", "actor", "critic", "ref", "reward", "rollouter", "agent_loop", "rollout")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one lane: a trace, or a log of trajectories.

    Attributes:
        path: The file.
        lane: Lane it fills, e.g. ``actor_rank0``.
        worker: Name of the worker it belongs to (``rollout0`` for each lane of a replica).
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        topology: Coordinates in named parallel dimensions.
        offset_ns: Subtracted from its times, gives the controller's.
        error_ns: Bound of that offset's error.
        stage: Stage it holds, in discrete mode.
        begin_ns: When its first event begins, for a file without a manifest.
    """

    path: Path
    lane: str
    worker: str
    role: str
    rank: int = 0
    replica: int | None = None
    topology: dict[str, int] = {}
    offset_ns: int = 0
    error_ns: int = 0
    stage: str | None = None
    begin_ns: int = 0

    @property
    def is_log(self) -> bool:
        """Whether it is a log of trajectories."""
        return self.path.name.endswith(LOG_SUFFIX)

    @property
    def title(self) -> str:
        """Name of the lane in the timeline: ``actor_rank1 [tp1 pp0]``."""
        where = " ".join(f"{dimension}{index}" for dimension, index in self.topology.items())
        return f"{self.lane} [{where}]" if where else self.lane


def sorted_sources(sources: Iterable[Source]) -> list[Source]:
    """Return sources in the order of their lanes: by role, replica, rank, then file name."""

    def key(source: Source) -> tuple[int, str, int, int, str]:
        order = _ROLE_ORDER.index(source.role) if source.role in _ROLE_ORDER else len(_ROLE_ORDER)
        return order, source.role, source.replica or 0, source.rank, source.path.name

    return sorted(sources, key=key)


TIMELINE_NAME = "timeline.json.gz"
TIMELINE_MARK = "verlProfilingTimeline"
"""Key at the head of a timeline, by which it is not taken for a trace."""

_LABEL = 80


class StepInputs(msgspec.Struct, kw_only=True):
    """Everything found of one step.

    Attributes:
        directory: Folder that results are written to.
        step: Number of the step, if known.
        manifest: The manifest, where the folder has one; all its times are on the clock of the loop.
        capture: The manifest of the whole capture, of which ``manifest`` is one step.
        sources: Trace files, sorted by lane.
        logs: Logs of trajectories, likewise; :func:`~verl_profiling.timeline.trajectories.read_logs`
            reads them.
        absent: What is missing or cannot be put on a timeline, as sentences.
        limits: How much of each trace is read.
        communication: Regular expressions of kernels that communicate, besides those that are known.
        unfinished: Why the step is not whole, where its capture has begun and was never written.
        name: What plain traces are called beside their step's number.
        label: Part of the names of the results, where others go to the same folder.
    """

    directory: Path
    step: int | None = None
    manifest: Manifest | None = None
    capture: Manifest | None = None
    sources: list[Source] = []
    logs: list[Source] = []
    absent: list[str] = []
    unfinished: str = ""
    limits: Limits = Limits()
    communication: tuple[str, ...] = ()
    name: str = ""
    label: str = ""

    @property
    def title(self) -> str:
        """``step 12``, or the name of the file, the recording or the folder."""
        step = f"step {self.step}" if self.step is not None else ""
        return ", ".join(filter(None, (step, self.name))) or self.directory.resolve().name

    def output(self, name: str, selection: str = "") -> Path:
        """Return where a result of this step goes.

        Args:
            name: Its usual name, e.g. ``timeline.json.gz``.
            selection: What of the step it holds, if that is not all.
        """
        stem, _, suffix = name.partition(".")
        return self.directory / ".".join(filter(None, (stem, self.label, short_label(selection), suffix)))


class FoundSteps(msgspec.Struct, frozen=True):
    """The steps under a path.

    Attributes:
        steps: The steps that can be read.
        damaged: What is wrong with the others.
    """

    steps: list[StepInputs]
    damaged: list[TraceFormatError] = []

    def problems(self) -> list[str]:
        """Return what keeps steps from being whole, as sentences."""
        begun = [f"{step.directory}: {step.unfinished}" for step in self.steps if step.unfinished]
        return [*map(str, self.damaged), *begun]


def short_label(text: str) -> str:
    """Return a text as a part of a file's name, of at most 80 characters; different texts stay different."""
    label = re.sub(r"[^\w.,+-]", "_", text)
    if label == text and len(label) <= _LABEL:
        return label
    return f"{label[: _LABEL - 9]}_{sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events; by default it keeps all. The names of threads are always kept.

    Attributes:
        min_us: Drops complete events (``ph == "X"``) shorter than this.
        windows_ns: Drops events outside all of these spans (unix nanoseconds on the controller's
            clock); empty for no such limit.
    """

    min_us: float = 0.0
    windows_ns: tuple[tuple[int, int], ...] = ()

    def holds(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether a span (unix ns on the controller's clock) is kept."""
        windows = self.windows_ns
        is_long = end_ns - begin_ns >= self.min_us * 1000
        return is_long and (
            not windows or any(begin_ns < last and end_ns >= first for first, last in windows)
        )

    def select(self, events: list[Event], base_ns: int) -> list[Event]:
        """Return the events that are kept.

        Args:
            events: Events of one trace.
            base_ns: Unix nanoseconds, on the controller's clock, of their ``ts == 0``.
        """
        if self.min_us:
            events = [e for e in events if e.ph != "X" or (e.dur or 0.0) >= self.min_us]
        if self.windows_ns:
            windows = [((begin - base_ns) / 1000, (end - base_ns) / 1000) for begin, end in self.windows_ns]
            events = [e for e in events if e.ph == "M" or _overlaps(e.ts or 0.0, e.dur or 0.0, windows)]
        return events


def _overlaps(ts: float, dur: float, windows: list[tuple[float, float]]) -> bool:
    return any(ts < end and ts + dur >= begin for begin, end in windows)


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
    return [_of_step(inputs, manifest, index) for index in range(len(manifest.step_spans))]


def _in_order(spans: Sequence[StepSpan]) -> bool:
    """Return whether steps follow each other; a manifest that says anything else says nothing of steps."""
    follows = (a.step < b.step and a.end_ns <= b.begin_ns for a, b in pairwise(spans))
    return all(follows) and all(span.begin_ns <= span.end_ns for span in spans)


def _of_step(inputs: StepInputs, whole: Manifest, index: int) -> StepInputs:
    span, *later = whole.step_spans[index:]
    begin_ns, end_ns, next_ns = span.begin_ns, span.end_ns, later[0].begin_ns if later else MAX_NS

    def drives(begun: ToolSpan | Rpc) -> bool:
        """Return whether what drives the capture is of this step: the last that had begun, else the first."""
        return (not index or begin_ns <= begun.begin_ns) and begun.begin_ns < next_ns

    def clipped(stages: Iterable[StageSpan]) -> list[StageSpan]:
        parts = ((stage, max(stage.begin_ns, begin_ns), min(stage.end_ns, end_ns)) for stage in stages)
        return [
            msgspec.structs.replace(stage, begin_ns=first, end_ns=last)
            for stage, first, last in parts
            if first < last or begin_ns <= stage.begin_ns == stage.end_ns < end_ns
        ]

    def is_outside(stage: StageSpan) -> bool:
        """Return whether the loop did it before the first step, or between this one and the next."""
        return (not index and stage.end_ns <= begin_ns) or end_ns <= stage.begin_ns < next_ns

    def part_of(worker: CaptureResult) -> CaptureResult:
        tool_spans = [one for one in worker.tool_spans if drives(one)]
        return msgspec.structs.replace(
            worker,
            step=span.step,
            stages=clipped(worker.stages),
            tool_spans=tool_spans,
            cost=_cost(worker, tool_spans),
            requests=[request for request in worker.requests if begin_ns <= request.begin_ns < end_ns],
            artifacts=[
                one
                for one in worker.artifacts
                if not one.end_ns or (one.begin_ns < end_ns and one.end_ns > begin_ns)
            ],
        )

    around = sorted((*whole.outside, *whole.stages), key=lambda stage: stage.begin_ns)
    manifest = msgspec.structs.replace(
        whole,
        step=span.step,
        steps=[span.step],
        step_spans=[span],
        policy_version=span.policy_version,
        begin_ns=begin_ns,
        end_ns=end_ns,
        complete=whole.complete or bool(later),
        stages=clipped(whole.stages),
        outside=list(filter(is_outside, around)),
        rpcs=list(filter(drives, whole.rpcs)),
        workers=list(map(part_of, whole.workers)),
        metrics=span.metrics,
    )
    recorded = [
        (worker.name, inputs.directory / artifact.path.removesuffix(".gz"))
        for worker in manifest.workers
        for artifact in worker.artifacts
    ]
    return msgspec.structs.replace(
        inputs,
        step=span.step,
        manifest=manifest,
        capture=whole,
        sources=[
            source
            for source in inputs.sources
            if any(
                source.worker == name and str(source.path).startswith(str(path)) for name, path in recorded
            )
        ],
        label=step_folder_name(span.step),
    )


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
