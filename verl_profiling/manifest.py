"""The manifest: the only contract between capturing and analysing.

A step folder's ``manifest.json`` lists everything that was expected of the step and what
became of it. All times are unix nanoseconds on the clock of the process that took them;
:class:`HostClock` says how far each host's clock is from the controller's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.clock import ClockAnchor
from verl_profiling.devices import Device
from verl_profiling.identity import ProcessId, WorkerIdentity, artifact_name

__all__ = [
    "MANIFEST_NAME",
    "MAX_NS",
    "POLLING",
    "SCHEMA_VERSION",
    "Artifact",
    "CaptureCost",
    "CaptureResult",
    "HostClock",
    "Manifest",
    "Request",
    "RequestPart",
    "Rpc",
    "RunInfo",
    "StageSpan",
    "StepSpan",
    "ToolSpan",
    "expected_artifact",
    "finite_numbers",
    "worst_status",
]

SCHEMA_VERSION = 1
_MOST_NAMED = 10
MANIFEST_NAME = "manifest.json"
RUN_NAME = "run.json"

CAPTURE_START, CAPTURE_STOP = "capture_start", "capture_stop"
"""The loop's pauses before and after a captured step."""

POLLING = "polling the replay buffer"
"""The stage in which a trainer sleeps until it looks again whether trajectories have ended."""

CUT_SHORT = "the step was cut short"
"""How the note begins that says why a step ended early."""

MAX_NS = 4 * 10**18
"""Largest time in a manifest or a trace (the year 2096): the sum or the difference of two fits 64 bits."""

Ns = Annotated[int, msgspec.Meta(ge=-MAX_NS, le=MAX_NS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
ArtifactStatus = Literal["ok", "pending", "missing", "empty", "truncated", "failed", "skipped"]
CaptureStatus = Literal["ok", "failed", "empty", "truncated", "skipped"]
ManifestState = Literal["begun", "written"]
RequestPart = Literal[
    "to the engine", "queued", "prefill", "first token", "decode", "generate", "from the engine"
]


class StageSpan(msgspec.Struct, frozen=True):
    """One run of a stage (or of a named range inside one), in unix nanoseconds.

    Attributes:
        name: Stage name, e.g. ``update_actor``.
        begin_ns: When it began.
        end_ns: When it ended.
        thread: Native id of the thread it ran on (Python's own id if that thread has ended).
        depth: 0 for an outermost stage, 1 for a stage inside one, ...
        failed: User code raised inside it, or the capture ended before it did.
    """

    name: str
    begin_ns: Ns
    end_ns: Ns
    thread: int = 0
    depth: int = 0
    failed: bool = False


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a capture, on the controller's clock.

    Attributes:
        step: Number of the step.
        begin_ns: When ``on_step_begin`` returned to the loop.
        end_ns: When the loop called ``on_step_end``, or the capture ended.
        policy_version: Version of the weights, if the loop reports one.
        metrics: What the loop passed for this step.
    """

    step: int
    begin_ns: Ns
    end_ns: Ns
    policy_version: int | None = None
    metrics: dict[str, float] = {}


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file (or folder) that a tool was expected to write.

    Attributes:
        path: Path relative to the step folder.
        lane: Lane that it fills in the timeline, e.g. ``actor_rank0`` or ``rollout0_rank1``.
        tool: Name of the tool.
        status: What became of it. ``pending``: the bytes were still being compressed or uploaded in the
            background when the manifest was written; whether the file at ``path`` exists decides.
        stage: Stage it holds, in discrete mode; ``None`` in e2e mode.
        occurrence: Which run of that stage in this step, from 1.
        begin_ns: When recording began.
        end_ns: When recording ended.
        bytes: Size on disk, if known.
        events: Number of trace events, if known.
        step: Step in which its recording began.
        policy_versions: Versions of a rollout engine's weights during its window, in order, if known;
            more than one if the weights were updated inside the window.
        reason: Why the status is not ``ok``, or what to know of it.
        unrecorded_device: Kind of the device (``cuda``) that was in use, and of which the trace has no event.
        where: ``host:path`` of a file that is not in the step folder, but on a host's own file system.
    """

    path: str
    lane: str
    tool: str
    status: ArtifactStatus
    stage: str | None = None
    occurrence: int = 1
    begin_ns: Ns = 0
    end_ns: Ns = 0
    bytes: int | None = None
    events: int | None = None
    step: int | None = None
    policy_versions: list[int] = []
    reason: str = ""
    unrecorded_device: str = ""
    where: str = ""

    def is_run_of(self, other: Artifact) -> bool:
        """Return whether both describe the same recording, whatever their status."""
        return (self.lane, self.tool, self.stage, self.occurrence) == (
            other.lane,
            other.tool,
            other.stage,
            other.occurrence,
        )


def expected_artifact(
    lane: str, tool: str, suffix: str, stage: str | None = None, occurrence: int = 1
) -> Artifact:
    """Return an artifact as it is expected before anything is written.

    Args:
        lane: Lane of the rank that records.
        tool: Name of the tool.
        suffix: What names of its artifacts end in.
        stage: Stage, in discrete mode.
        occurrence: Which run of that stage in this step, from 1.
    """
    return Artifact(
        path=artifact_name(lane, suffix, stage, occurrence),
        lane=lane,
        tool=tool,
        status="missing",
        stage=stage,
        occurrence=occurrence,
    )


class CaptureCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the capture in the training process, in seconds."""

    start_s: float = 0.0
    stop_s: float = 0.0
    export_s: float = 0.0


class ToolSpan(msgspec.Struct, frozen=True):
    """One start or stop of a worker's tools, in unix nanoseconds.

    Attributes:
        name: ``start``, or ``stop``, which includes writing.
        begin_ns: When it began.
        end_ns: When it ended.
        stage: Stage that the recording holds, in discrete mode; ``None`` in e2e mode.
    """

    name: Literal["start", "stop"]
    begin_ns: Ns
    end_ns: Ns
    stage: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request that ended while a rollout engine was captured.

    Times are unix nanoseconds on the clock of the process that sent the request; a time that the
    engine does not tell is 0.

    Attributes:
        replica: Replica that served it.
        id: What the engine was given as its id; empty if that is not known.
        begin_ns: When it was sent.
        arrival_ns: When the engine's scheduler got it.
        scheduled_ns: When the engine first scheduled it.
        first_token_ns: When the engine had its first token, or else when its first output arrived.
        last_token_ns: When the engine had its last token.
        end_ns: When its response was complete.
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response; summed over the samples of one request.
        cached_tokens: Of the prompt, what came from the engine's prefix cache, if known.
        preemptions: How often the engine took it off and began it again, if known.
        policy_version: Version of the weights that it began with, if known.
        failed: It raised, or was cancelled.
    """

    replica: int
    id: str = ""
    begin_ns: Ns
    arrival_ns: Ns = 0
    scheduled_ns: Ns = 0
    first_token_ns: Ns = 0
    last_token_ns: Ns = 0
    end_ns: Ns
    prompt_tokens: Count
    response_tokens: Count
    cached_tokens: Count | None = None
    preemptions: Count | None = None
    policy_version: int | None = None
    failed: bool = False

    def parts(self) -> list[tuple[RequestPart, int, int]]:
        """Return what it waited for, from its begin to its end without a gap: name, begin, end.

        What is not known apart stays one part: ``first token`` is queued and prefill,
        ``generate`` that and decode.
        """
        marks: tuple[tuple[RequestPart, int], ...] = (
            ("to the engine", self.arrival_ns),
            ("queued", self.scheduled_ns),
            ("prefill" if self.scheduled_ns else "first token", self.first_token_ns),
            ("decode" if self.first_token_ns else "generate", self.last_token_ns or self.end_ns),
            ("from the engine", self.end_ns),
        )
        parts = []
        since_ns = self.begin_ns
        for name, mark_ns in marks:
            until_ns = min(mark_ns, self.end_ns)
            if until_ns > since_ns:
                parts.append((name, since_ns, until_ns))
                since_ns = until_ns
        return parts


class HostClock(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host's clock is ahead of the controller's.

    ``controller_ns = host_ns - offset_ns``, with an error of at most ``error_ns``.

    Attributes:
        host: Host name.
        clock_domain: The workers to which it applies (see ``WorkerIdentity.clock_domain``).
        offset_ns: Offset when the capture opened.
        error_ns: Bound of its error: half of the shortest round trip.
        closing_offset_ns: Offset when the capture closed (drift shows as a difference).
        closing_error_ns: Bound of its error.
        samples: Round trips measured; 0 where no correction is needed (same clock).
    """

    host: str
    clock_domain: str
    offset_ns: Ns = 0
    error_ns: Ns = 0
    closing_offset_ns: Ns = 0
    closing_error_ns: Ns = 0
    samples: int = 0


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one worker for one capture: plain and picklable.

    Attributes:
        identity: The worker.
        roles: All roles that share the worker's process and joined the capture.
        capture_id: The capture it belongs to.
        step: First step of the capture.
        mode: ``e2e`` or ``discrete``.
        tools: Names of the tools that recorded.
        status: The worst status among the artifacts, or why there are none.
        reason: Why the status is not ``ok``.
        artifacts: Everything expected of this worker.
        stages: Spans of the stages it ran, in order of their begin.
        anchors: Clock readings at start and stop.
        cost: What the capture cost this worker.
        tool_spans: When its tools were started and stopped, in order of their end.
        cores: CPUs of its host; 0 where that is not known.
        notes: Things a user should know, e.g. a selection that matched nothing.
        requests: Inference requests that a rollout engine served, in order of their end.
        policy_versions: Versions of a rollout engine's weights during the capture, in order, if
            known; more than one if the weights were updated meanwhile.
        metrics: Plain numbers recorded with the capture, e.g. ``{"stage/update_actor/peak_rss_bytes": ...}``.
        devices: What it computes on, as far as it is known: of a replica in order of rank, of any other
            worker the devices that its process has used.
        requests_logged: Whether requests were logged, so that without one the engine had nothing to do.
        pending_since_ns: When the requests were sent that had not ended when the log did.
        process: The process that recorded.
        revision: How often that process has written its result; of two, the larger one holds.
        stopped: ``False`` in what a process writes while it still records.
        folder: Absolute path, or URL, of the step folder as that process sees it.
        cut_short: Why the step ended early in that process, a rank of a loop that runs on all ranks.
        clock: Its clock, where the process measured that itself.
    """

    identity: WorkerIdentity
    roles: list[str] = []
    capture_id: str = ""
    step: int = 0
    mode: str = "e2e"
    tools: list[str] = []
    status: CaptureStatus = "ok"
    reason: str = ""
    artifacts: list[Artifact] = []
    stages: list[StageSpan] = []
    anchors: list[ClockAnchor] = []
    cost: CaptureCost = CaptureCost()
    tool_spans: list[ToolSpan] = []
    cores: int = 0
    notes: list[str] = []
    requests: list[Request] = []
    policy_versions: list[int] = []
    metrics: dict[str, float] = {}
    devices: list[Device] = []
    requests_logged: bool = False
    pending_since_ns: list[Ns] = []
    process: ProcessId | None = None
    revision: Count = 0
    stopped: bool = True
    folder: str = ""
    cut_short: str = ""
    clock: HostClock | None = None

    @property
    def name(self) -> str:
        return self.identity.name


class Rpc(msgspec.Struct, frozen=True):
    """One call from the controller to a worker, on the controller's clock."""

    worker: str
    method: str
    begin_ns: Ns
    end_ns: Ns
    ok: bool = True


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one capture.

    Attributes:
        schema_version: Version of this schema.
        run_id: Identifies the run.
        capture_id: Identifies the capture within the run.
        state: ``begun``: what was expected when the capture began; the loop has written nothing since.
            ``written``: what became of it.
        step: First step captured; names the folder.
        steps: All steps captured (several for a continuous capture).
        step_spans: When each of them ran, in order.
        policy_version: Version of the weights, if the loop reports one.
        begin_ns: When ``on_step_begin`` returned to the loop, on the controller's clock.
        end_ns: When the loop called ``on_step_end``. The calls that start and stop the capture are
            not part of the step.
        complete: ``False`` if the step ended early (an exception, the end of the process).
        controller: The process that runs the loop.
        process: The same process, told apart from a later one with its id.
        stages: The controller's stages.
        outside: What the loop's process did outside of the step: ``capture_start`` before it,
            ``capture_stop`` after it (which includes ``write``), and then the loop's own stages, such as
            ``validate``, until it began the next step or ended.
        rpcs: Calls made to drive the capture.
        workers: One entry per worker that was expected to take part.
        clocks: One entry per clock domain.
        metrics: What the loop passed to ``on_step_end`` and ``on_rollout_end``.
        trigger: Who asked for the capture, and why.
        notes: Things a user should know.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    capture_id: str
    state: ManifestState = "written"
    step: int
    steps: list[int]
    step_spans: list[StepSpan] = []
    policy_version: int | None = None
    begin_ns: Ns
    end_ns: Ns
    complete: bool = True
    controller: WorkerIdentity
    process: ProcessId | None = None
    stages: list[StageSpan] = []
    outside: list[StageSpan] = []
    rpcs: list[Rpc] = []
    workers: list[CaptureResult] = []
    clocks: list[HostClock] = []
    metrics: dict[str, float] = {}
    trigger: Trigger = Trigger()
    notes: list[str] = []

    def offset_ns(self, identity: WorkerIdentity) -> int:
        """Return what to subtract from a worker's times to put them on the controller's clock."""
        for clock in self.clocks:
            if clock.clock_domain == identity.clock_domain:
                return clock.offset_ns
        return 0


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: what holds for every step of a run. A resumed run has a folder of its own.

    Attributes:
        schema_version: Version of this schema.
        run_id: Identifies the run.
        begin_ns: When it began to record.
        process: The process that runs the loop.
        config: The settings as used.
        versions: Versions of the packages that matter.
        first_step: The first step that the loop began; added when training ends, like the next three.
        last_step: The last one.
        end_ns: When training ended; ``None`` while it runs, and if nobody lived to say so.
        never_came: The steps that ``schedule.steps`` lists and the loop never began.
        not_captured: Why the capture of a step could not begin, by step.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    begin_ns: Ns
    process: ProcessId
    config: dict[str, Any]
    versions: dict[str, str]
    first_step: int | None = None
    last_step: int | None = None
    end_ns: Ns | None = None
    never_came: list[int] = []
    not_captured: dict[int, str] = {}


def worst_status(artifacts: Iterable[Artifact]) -> tuple[CaptureStatus, str]:
    """Return the status of a capture with these artifacts, and why it is not ``ok``."""
    artifacts = list(artifacts)
    worst: tuple[tuple[ArtifactStatus, CaptureStatus], ...] = (
        ("failed", "failed"),
        ("missing", "failed"),
        ("truncated", "truncated"),
        ("empty", "empty"),
    )
    for found, status in worst:
        for artifact in artifacts:
            if artifact.status == found:
                return status, artifact.reason or f"{artifact.path} is {found}"
    return "ok", ""


def finite_numbers(metrics: Mapping[str, Any] | None) -> tuple[dict[str, float], list[str]]:
    """Return the entries that are finite numbers, and notes on numbers that are not finite.

    Args:
        metrics: The loop's metrics, of any type; scalars of NumPy and torch are numbers. Nothing in
            them raises: a captured step must not fail where another one does not.
    """
    numbers: dict[str, float] = {}
    infinite: list[str] = []
    try:
        entries = list(metrics.items()) if metrics is not None else []
    except Exception:
        return {}, [f"the metrics are a {type(metrics).__name__}, no mapping from names to numbers: left out"]
    for key, value in entries:
        if isinstance(value, str | bytes):
            continue
        try:
            name, number = str(key).encode(errors="replace").decode(), float(value)
        except Exception:
            continue
        if math.isfinite(number):
            numbers[name] = number
        else:
            infinite.append(f"{name} is {number}")
    if not infinite:
        return numbers, []
    more = f" and {len(infinite) - _MOST_NAMED} more" if len(infinite) > _MOST_NAMED else ""
    return numbers, [f"metrics that are not finite were left out: {', '.join(infinite[:_MOST_NAMED])}{more}"]
