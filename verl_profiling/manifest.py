"""The manifest: the only contract between capturing and analysing.

A step folder's ``manifest.json`` lists all expected artifacts of the step, with their status. Times
are unix nanoseconds on the clock of the measuring process; :class:`HostClock` has the offset of a
host's clock from the controller's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.clock import ClockAnchor
from verl_profiling.identity import ProcessId, WorkerIdentity, artifact_name
from verl_profiling.units import listed, local_time

__all__ = [
    "MANIFEST_NAME",
    "MAX_NS",
    "POLLING",
    "SCHEMA_VERSION",
    "Artifact",
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
    "Work",
    "expected_artifact",
    "finite_numbers",
    "worst_status",
]

SCHEMA_VERSION = 1
_MOST_NAMED = 10
# Metrics that are read from one call: loops have hundreds, and 300,000 delayed a step by 30 s.
_MOST_METRICS = 10_000
MANIFEST_NAME = "manifest.json"
RUN_NAME = "run.json"

NSYS_FOLDER = "nsys"
"""Subfolder of the run for reports of Nsight Systems."""

NOTES_SUFFIX = ".ranges.jsonl"
"""Suffix of the file with a process's ranges; the reports have the same stem."""

CAPTURE_START, CAPTURE_STOP = "capture_start", "capture_stop"
"""Stages of the loop in which a capture starts before a step, and stops after it."""

WAIT = "wait:"
"""Begin of the name of a stage or span that only waits, e.g. for a free slot:
no work of its own.
"""
WAIT_FOR_REQUESTS = WAIT + "requests"
"""The stage in which an engine without a loop has no request."""
POLLING = "polling the replay buffer"
"""The stage in which a trainer sleeps between two polls for finished trajectories."""

WEIGHT_SYNC = "update_weights"
"""The stage in which weights go to the rollout engines; its parts, such as ``transfer``,
are stages inside.
"""

BUCKET = "bucket"
"""A part of a weight update: several tensors that go to an engine at once, until it has them."""

BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMBER_BYTES = "bytes_per_weight"
"""Number of an engine: bytes of a loaded weight; 0 if they are quantized."""

GC = "gc"
"""Name of the pauses of Python's garbage collector."""

CUT_SHORT = "the step was cut short"
"""The beginning of the note with the reason why a step ended early."""

MAX_NS = 4 * 10**18
"""Largest time in a manifest or a trace (the year 2096):
sums and differences of two times fit 64 bits.
"""

MOST_NESTED = 32
"""Most levels of nested stages and spans that calculations follow, as each level costs time
and memory.
"""

Ns = Annotated[int, msgspec.Meta(ge=-MAX_NS, le=MAX_NS)]
MOST_WORK = 1 << 53
"""Largest valid count; floats represent every integer up to it exactly."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_WORK)]
Depth = Annotated[int, msgspec.Meta(ge=0, le=1000)]
ArtifactStatus = Literal["ok", "pending", "missing", "empty", "truncated", "failed", "skipped"]
CaptureStatus = Literal["ok", "failed", "empty", "truncated", "skipped"]

AS_PLANNED = ("ok", "skipped")
"""Statuses of a worker or an artifact that is whole, or was left out on purpose."""

ManifestState = Literal["begun", "written"]
RequestPart = Literal[
    "to the engine", "queued", "prefill", "first token", "decode", "generate", "from the engine"
]


Lessons = dict[str, dict[str, Count]]
"""Tokens, or time (ns), by task and by the reason why they teach nothing; see :class:`Work`."""


MOST_TASKS = 32
"""Maximum number of tasks that are told apart in a step; further ones are one."""


def divided(whole: int, lessons: Lessons) -> Lessons:
    """Return a whole number, such as a duration in ns, divided in proportion to lessons."""
    tokens = sum(sum(of_task.values()) for of_task in lessons.values()) or 1
    return {
        task: {reason: round(whole * many / tokens) for reason, many in of_task.items()}
        for task, of_task in lessons.items()
    }


class UselessPart(NamedTuple):
    """A part of what lessons count from which nothing was learned.

    Attributes:
        task: Its task; empty if unknown.
        cause: Reason why nothing was learned.
        amount: Tokens or time (ns).
        share: Share of all.
        share_of_task: Share of all of the task.
    """

    task: str
    cause: str
    amount: int
    share: float
    share_of_task: float


def useless_parts(lessons: Lessons) -> list[UselessPart]:
    """Return the parts from which nothing was learned, the largest first."""
    whole = sum(sum(of_task.values()) for of_task in lessons.values()) or 1
    parts = []
    for task, of_task in lessons.items():
        whole_task = sum(of_task.values()) or 1
        for cause, many in of_task.items():
            if cause:
                parts.append(UselessPart(task, cause, many, many / whole, many / whole_task))
    return sorted(parts, key=lambda part: -part.amount)


def added(one: Any, other: Any) -> Any:
    """Return the sum of two numbers, or of two tables of numbers with the keys of both."""
    if not isinstance(one, dict):
        return one + other
    table = dict(one)
    for key, value in other.items():
        table[key] = added(table[key], value) if key in table else value
    return table


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """Size of the batch that a stage got each time it ran; ``None`` for an unknown number.

    Attributes:
        samples: Number of sequences.
        tokens: Sum of their lengths.
        tokens_squared: Sum of their squared lengths; the time of attention is proportional to it.
        micro_batches: Number of micro-batches.
        lessons: Tokens by task, and by the reason why nothing is learned from their sequences. The
            reason is empty for sequences that teach; the task is empty if unknown.
    """

    samples: Count | None = None
    tokens: Count | None = None
    tokens_squared: Count | None = None
    micro_batches: Count | None = None
    lessons: Lessons | None = None

    def __add__(self, other: Work) -> Work:
        """Return the sums of the numbers; a number is unknown if one of both lacks it."""
        sums: dict[str, Any] = {}
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                sums[name] = added(mine, theirs)
        return Work(**sums)

    def replaced_by(self, other: Work) -> Work:
        """Return this work with the numbers that ``other`` has."""
        return Work(**(msgspec.to_builtins(self) | msgspec.to_builtins(other)))


class StageSpan(msgspec.Struct, frozen=True):
    """One execution of a stage (or of a named range inside a stage), in unix nanoseconds.

    Attributes:
        name: Stage name, e.g. ``update_actor``.
        begin_ns: Begin of the execution.
        end_ns: End of the execution.
        thread: Native id of the stage's thread (Python's own id after the end of the thread).
        depth: 0 for an outermost stage, 1 for a stage inside one, ...
        failed: Whether user code raised inside the stage, or the stage was open at the end of the
            capture.
        work: Size of the batch that the stage got, if the code passed it.
        bytes: Bytes that were moved, released or reserved in it; 0 if unknown.
    """

    name: str
    begin_ns: Ns
    end_ns: Ns
    thread: int = 0
    depth: Depth = 0
    failed: bool = False
    work: Work | None = None
    bytes: Count = 0


class StepSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a capture, on the controller's clock.

    Attributes:
        step: Number of the step.
        begin_ns: Time at which ``on_step_begin`` returned to the loop.
        end_ns: Time at which the loop called ``on_step_end``, or the capture ended.
        policy_version: Version of the policy's weights, if the loop reports it.
        metrics: Metrics that the loop passed for this step.
    """

    step: int
    begin_ns: Ns
    end_ns: Ns
    policy_version: int | None = None
    metrics: dict[str, float] = {}


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """An expected file (or folder) of a tool.

    Attributes:
        path: Path relative to the step folder.
        lane: Lane of the artifact in the timeline, e.g. ``actor_rank0`` or ``rollout0_rank1``.
        tool: Name of the tool.
        status: ``ok``, or what is wrong, e.g. ``truncated``. ``pending``: the file was still being
            compressed or uploaded in the background when the manifest was written. A file at
            ``path`` is complete.
        stage: Recorded stage, in discrete mode; ``None`` in e2e mode.
        occurrence: 1 for the first time that the stage ran in the step, 2 for the second, ...
        begin_ns: Begin of the recording.
        end_ns: End of the recording.
        bytes: Size on disk, if known.
        events: Number of trace events, if known.
        step: Step in which the recording began.
        policy_versions: Versions of a rollout engine's weights during the recording, in order, if
            known; several if the weights were updated meanwhile.
        reason: Reason for any status but ``ok``, or a remark.
        unrecorded_device: Kind of a device (``cuda``) that was in use but has no events in the
            trace.
        where: ``host:path`` of a file on another host's own file system.
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
        """Return whether both artifacts describe the same recording,
        independent of their status.
        """
        own, its = ((one.lane, one.tool, one.stage, one.occurrence) for one in (self, other))
        return own == its

    def with_status(self, status: ArtifactStatus, reason: str = "", **fields: Any) -> Artifact:
        """Return the artifact with another status and reason, and changes of further fields."""
        return msgspec.structs.replace(self, status=status, reason=reason, **fields)


def expected_artifact(
    lane: str, tool: str, suffix: str, stage: str | None = None, occurrence: int = 1
) -> Artifact:
    """Return an expected artifact that is not written yet, with status ``missing``.

    Args:
        lane: Lane of the recording rank, e.g. ``actor_rank0``.
        tool: Name of the tool.
        suffix: The tool's suffix of file names, e.g. ``.torch.json.gz``.
        stage: The recorded stage, in discrete mode; ``None`` in e2e mode.
        occurrence: 1 for the first time that the stage runs in the step, 2 for the second, ...
    """
    path = artifact_name(lane, suffix, stage, occurrence)
    return Artifact(
        path=path, lane=lane, tool=tool, status="missing", stage=stage, occurrence=occurrence
    )


class ToolSpan(msgspec.Struct, frozen=True):
    """One start or stop of a worker's tools, in unix nanoseconds.

    Attributes:
        name: ``start``, or ``stop``, which includes writing.
        begin_ns: Begin of the start or stop.
        end_ns: End of the start or stop.
        stage: Recorded stage, in discrete mode; ``None`` in e2e mode.
    """

    name: Literal["start", "stop"]
    begin_ns: Ns
    end_ns: Ns
    stage: str | None = None


BLOCK_TOKENS = 64
"""Tokens of a block of a prompt whose hash is recorded. Prompts of a step are often shorter than
the 512 of Mooncake's own files, in which they would share nothing; one of 4,096 tokens has 64.
"""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that a rollout engine generated, if it ended during the capture.

    Times are unix nanoseconds on the clock of the process that sent the request; a time that the
    engine does not report is 0.

    Attributes:
        replica: Index of the serving replica.
        id: Request id in the engine; empty if unknown.
        begin_ns: Time of sending.
        arrival_ns: Arrival at the engine's scheduler.
        scheduled_ns: First scheduling by the engine.
        first_token_ns: First token in the engine; if unknown, arrival of the first output.
        last_token_ns: Last token in the engine.
        end_ns: End of the response, or of its batch if ``ends_with_batch``.
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response.
        cached_tokens: Number of prompt tokens from the engine's prefix cache, if known.
        preemptions: Number of preemptions by the engine, if known.
        policy_version: Policy version at the begin of the request, if known.
        failed: Whether the request raised, was cancelled or was aborted.
        ends_with_batch: Whether only the end of the response's batch is known, and not its own.
        prompt_blocks: A hash of each block of the prompt, with all blocks before it; empty unless
            the setting ``rollout.prompt_hashes`` is on.
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
    ends_with_batch: bool = False
    prompt_blocks: tuple[int, ...] = ()

    def parts(self) -> list[tuple[RequestPart, int, int]]:
        """Return the consecutive parts of the request without gaps: name, begin, end (unix ns).

        Where the engine does not report the time between two parts, the parts are one:
        ``first token`` is queued and prefill, and ``generate`` is queued, prefill and decode.
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
    """Offset of a host's clock from the controller's.

    ``controller_ns = host_ns - offset_ns``, with an error of at most ``error_ns``.

    Attributes:
        host: Host name.
        clock_domain: Clock domain of the workers with this clock (see
            ``WorkerIdentity.clock_domain``).
        offset_ns: Offset at the begin of the capture.
        error_ns: Error bound of ``offset_ns``: half of the shortest round trip.
        closing_offset_ns: Offset at the end of the capture (drift shows as a difference).
        closing_error_ns: Error bound of ``closing_offset_ns``.
        samples: Number of measured round trips; 0 for the controller's own clock.
    """

    host: str
    clock_domain: str
    offset_ns: Ns = 0
    error_ns: Ns = 0
    closing_offset_ns: Ns = 0
    closing_error_ns: Ns = 0
    samples: int = 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a worker.

    Attributes:
        kind: ``cuda``, ``npu``, ``xpu``, or ``cpu`` for a worker without an accelerator.
        index: Number of the device in the process and its traces.
        uuid: UUID of the device in lower case, without ``GPU-``; empty if unknown.
        place: Host, and number of the device on the host (``node7/3``); empty if unknown. On a CPU,
            the share of an accelerator that Ray gave to the process.
    """

    kind: str
    index: int | None = None
    uuid: str = ""
    place: str = ""


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one worker for one capture, which the worker sends to the loop and writes
    into its result file.

    Attributes:
        identity: The worker.
        roles: All roles that share the worker's process and joined the capture.
        capture_id: Id of the capture.
        step: First step of the capture.
        mode: ``e2e`` or ``discrete``.
        tools: Names of the tools that recorded.
        status: The worst status among the artifacts; without artifacts, the status of the capture
            itself.
        reason: Reason for any status but ``ok``.
        artifacts: All expected artifacts of the worker.
        stages: Spans of the worker's stages, in order of their begin.
        pauses: Pauses of the process by Python's garbage collector.
        anchors: Readings of the wall clock and the monotonic clock, at start and stop.
        tool_spans: Starts and stops of the worker's tools, in order of their end.
        notes: Sentences for the user, e.g. on a selection that matched nothing.
        requests: Inference requests that a rollout engine served, in order of their end.
        policy_versions: Versions of a rollout engine's weights during the capture, in order, if
            known; several after a weight update.
        metrics: Plain numbers recorded with the capture, e.g.
            ``{"stage/update_actor/process_peak_rss_bytes": ...}``.
        devices: Known devices: of a replica, in order of rank; of any other worker, the used
            devices of its process.
        requests_logged: Whether requests were logged, so that an engine without requests was idle.
        pending_since_ns: For each request that was open at the end of the log, when it was sent.
        process: The recording process.
        revision: Counts the versions of this result that the process made; the highest is valid.
        stopped: ``False`` in a result written during the recording.
        folder: Absolute path or URL of the step folder in the recording process.
        cut_short: Reason why the step ended early in this rank of an SPMD loop.
        clock: Offset of the process's clock, if the process measured the offset itself.
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
    pauses: list[StageSpan] = []
    anchors: list[ClockAnchor] = []
    tool_spans: list[ToolSpan] = []
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

    def cost_s(self, call: Literal["start", "stop"]) -> float:
        """Return the time of starting, or of stopping, the worker's tools;
        a stop includes writing.
        """
        return (
            sum(span.end_ns - span.begin_ns for span in self.tool_spans if span.name == call) / 1e9
        )

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


class StatusChange(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """A status of trajectories that was set after their end, e.g. ``filtered`` for a whole group.

    Attributes:
        group: Id of the group of trajectories.
        sample: Id of the sample in the group; ``None`` for all samples.
        status: The new status.
        at_ns: Time at which the status was set.
    """

    group: str
    sample: int | str | None
    status: str
    at_ns: Ns


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one capture: steps, stages, workers and their artifacts.

    Attributes:
        schema_version: Version of this schema.
        run_id: Identifies the run.
        capture_id: Identifies the capture within the run.
        state: ``begun``: written at the begin of the capture, with expected artifacts. ``written``:
            final.
        step: First captured step, with whose number the folder is named.
        steps: All captured steps (several in a continuous capture).
        step_spans: Begin and end of each step, in order.
        policy_version: Version of the policy's weights, if the loop reports it.
        begin_ns: Time at which ``on_step_begin`` returned to the loop, on the controller's clock.
        end_ns: Time at which the loop called ``on_step_end``. The calls that start and stop the
            capture are not part of the step.
        complete: ``False`` if the step ended early (an exception, the end of the process).
        controller: The process that runs the loop.
        process: Unique identity of the same process, even if its pid is used again.
        stages: The controller's stages.
        pauses: Pauses of the controller's process by Python's garbage collector.
        around_the_step: Stages of the loop's process around the step: ``capture_start`` before it,
            ``capture_stop`` after it (which includes ``write``), then the loop's own stages, such
            as ``validate``, until the next step or the end.
        rpcs: Calls from the controller to workers for this capture, such as ``start_capture``.
        workers: One entry per expected worker.
        clocks: Offset of each clock that the workers read.
        metrics: Metrics that the loop passed to ``on_step_end`` and ``on_rollout_end``.
        trigger: Origin of the capture, and its reason.
        notes: Sentences for the user.
        statuses: Statuses that the loop set on ended trajectories, in order.
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
    pauses: list[StageSpan] = []
    around_the_step: list[StageSpan] = []
    rpcs: list[Rpc] = []
    workers: list[CaptureResult] = []
    clocks: list[HostClock] = []
    metrics: dict[str, float] = {}
    trigger: Trigger = Trigger()
    notes: list[str] = []
    statuses: list[StatusChange] = []

    def offset_ns(self, identity: WorkerIdentity) -> int:
        """Return the offset (ns) to subtract from a worker's times for the controller's clock."""
        for clock in self.clocks:
            if clock.clock_domain == identity.clock_domain:
                return clock.offset_ns
        return 0

    @property
    def why_nothing(self) -> str:
        """Reasons for which no worker recorded anything, e.g. as no selected stage ran; empty if
        one did, or should have.
        """
        if any(worker.artifacts or worker.status != "skipped" for worker in self.workers):
            return ""
        reasons = dict.fromkeys(worker.reason for worker in self.workers)
        return "; ".join(reasons if reasons else ("no worker was captured", *self.notes))

    def runs_the_loop(self, worker: CaptureResult) -> bool:
        """Return whether a worker's process runs the loop, as in an SPMD program, so that the
        worker's stages are the loop's.
        """
        own, stages = (
            {(one.name, one.begin_ns) for one in spans} for spans in (worker.stages, self.stages)
        )
        return worker.process == self.process is not None and own == stages != set()


class NsysRange(msgspec.Struct, frozen=True, kw_only=True):
    """One range, i.e. one recording, of the ``nsys`` tool, as its process logs it next to the
    reports.

    Nsight Systems numbers its reports by process and range; only the process knows the step and the
    stage.

    Attributes:
        number: Number of the range in the process, from 1.
        folder: Path of the step folder, below ``save_path``.
        artifact: Name of the artifact for the report.
        begin_ns: Begin of the range.
        end_ns: End of the range; 0 if the process ended before.
        keep: ``False`` for a warm-up, whose report is discarded.
    """

    number: int
    folder: str
    artifact: str
    begin_ns: int
    end_ns: int = 0
    keep: bool = True


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: facts about a whole run. A resumed run has a folder of its own.

    Attributes:
        schema_version: Version of this schema.
        run_id: Identifies the run.
        begin_ns: Begin of the run's recording.
        process: The process that runs the loop.
        config: The settings as used.
        versions: Versions of the relevant packages.
        first_step: The first step of the loop; like the next three fields, added at the end of
            training.
        last_step: The last step of the loop.
        end_ns: End of training; ``None`` during training, and for a killed run.
        never_came: The steps in ``schedule.steps`` that the loop never began.
        not_captured: Reasons why captures could not begin, by step.
        captured: Names of the step folders of all captures, but for the removed ones.
        removed: Names of the step folders that ``limits.keep_last`` removed.
        failed: Files that were not written or uploaded by the end of training: reasons by folder.
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
    captured: list[str] = []
    removed: list[str] = []
    failed: dict[str, str] = {}

    @property
    def is_watched(self) -> bool:
        """Whether the settings switch the watch on."""
        watch = self.config.get("watch")
        return isinstance(watch, dict) and watch.get("enable") is True

    @property
    def scheduled_steps(self) -> list[int]:
        """The steps in ``schedule.steps``."""
        schedule = self.config.get("schedule")
        return (schedule.get("steps") or []) if isinstance(schedule, dict) else []

    @property
    def over(self) -> str:
        """Reason why the run is over; empty for a running run, or a process on another host."""
        if self.end_ns is not None:
            last = f" after step {self.last_step}" if self.last_step is not None else ""
            return f"training ended{last}, at {local_time(self.end_ns)}"
        if self.process.alive() is False:
            return f"{self.process}, which ran the job, is gone"
        return ""


def worst_status(artifacts: Iterable[Artifact]) -> tuple[CaptureStatus, str]:
    """Return the worst status of these artifacts as that of their capture, and its reason; the
    reason of ``ok`` is empty.
    """
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


def with_artifacts(result: CaptureResult, artifacts: list[Artifact]) -> CaptureResult:
    """Return a result with other artifacts; if its status came from its old artifacts, the new
    ones decide the status.
    """
    status, reason = result.status, result.reason
    if (status, reason) == worst_status(result.artifacts):
        status, reason = worst_status(artifacts)
    return msgspec.structs.replace(result, artifacts=artifacts, status=status, reason=reason)


def finite_numbers(metrics: Mapping[str, Any] | None) -> tuple[dict[str, float], list[str]]:
    """Return the entries that are finite numbers, and notes on numbers that are not finite.

    Args:
        metrics: The loop's metrics, of any type; scalars of NumPy and torch are numbers. No value
        raises, because a capture must not make a step fail.
    """
    numbers: dict[str, float] = {}
    infinite: list[str] = []
    try:
        entries = list(islice(metrics.items(), _MOST_METRICS + 1)) if metrics is not None else []
    except Exception:
        return {}, [
            f"the metrics are a {type(metrics).__name__}, no mapping from names to numbers: "
            "left out"
        ]
    notes = []
    if len(entries) > _MOST_METRICS:
        notes.append(f"metrics after the first {_MOST_METRICS:,} were left out")
    for key, value in entries[:_MOST_METRICS]:
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
    if infinite:
        named = listed(infinite, _MOST_NAMED)
        notes.append(f"metrics that are not finite were left out: {named}")
    return numbers, notes
