"""The report as data: what ``--json`` prints, and what every output format shows.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "REPORT_SCHEMA_VERSION",
    "Clock",
    "CollectiveRow",
    "CostRow",
    "Coverage",
    "EngineRow",
    "Finding",
    "GanttSpan",
    "LostRow",
    "MeasureRow",
    "OpRow",
    "Percentiles",
    "Report",
    "RequestRow",
    "RunningRow",
    "StageRow",
    "StragglerRow",
    "Tail",
    "Throughput",
    "WorkerRow",
]

REPORT_SCHEMA_VERSION = 1


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the controller, all its runs together.

    Attributes:
        name: The stage. ``(starting and stopping the capture)`` is the time outside stages that this
            took, ``(outside stages)`` the rest of the step.
        runs: Number of runs.
        begin_us: Begin of its first run, relative to the begin of the step.
        duration_us: Total time in it.
        share: Share of the step.
        depth: 0 for an outermost stage; only those add up to the step.
    """

    name: str
    runs: int
    begin_us: float
    duration_us: float
    share: float
    depth: int = 0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one lane (a training rank, or a rank of a rollout engine) spent its time.

    ``docs/report.md`` defines each number. All times lie inside the span.

    Attributes:
        name: Name of the lane.
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        device: ``False`` for a CPU trace, where operators are counted in place of kernels.
        span_us: Time for which it was observed.
        busy_us: Time in which anything ran.
        idle_us: ``span_us - busy_us``.
        compute_us: Time in which computing kernels ran.
        communication_us: Time in which communication kernels ran.
        exposed_communication_us: Communication with no computation at the same time.
        overlap_us: Computation and communication at the same time.
        memcpy_us: Time in which memory was copied or set.
        host_bound_us: Idle time inside its own stages (also in ``lost_us``).
        lost_us: Idle time by cause; adds up to ``idle_us``.
        load: Busy percentage of each of equally long parts of the step, 0 to 100.
        communication_load: Percentage of each part in which it communicated and computed nothing; a
            part of ``load``.
    """

    name: str
    role: str
    rank: int
    replica: int | None
    device: bool
    span_us: float
    busy_us: float
    idle_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    overlap_us: float
    memcpy_us: float
    host_bound_us: float
    lost_us: dict[str, float]
    load: list[int]
    communication_load: list[int] = []


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank of a rollout engine spent its time, from the names of its iterations.

    Attributes:
        name: Name of the lane.
        replica: Index of the replica.
        busy_us: As in :class:`WorkerRow`.
        queueing_us: From the begin of the rollout to the engine's first iteration.
        iterations: Number of iterations.
        prefill_us: Time in iterations that processed prompt tokens.
        decode_us: Time in iterations that only generated.
        prefill_tokens: Prompt tokens processed.
        decode_tokens: Tokens generated.
        finish_us: End of its last iteration, relative to the begin of the rollout.
    """

    name: str
    replica: int
    busy_us: float
    queueing_us: float | None
    iterations: int
    prefill_us: float
    decode_us: float
    prefill_tokens: int
    decode_tokens: int
    finish_us: float | None


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a sample.

    Attributes:
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        max: Largest value.
    """

    p50: float
    p90: float
    p99: float
    max: float


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """How long the rollout waits for its last replicas.

    Attributes:
        replicas: Number of replicas that were seen.
        median_finish_us: Median time at which a replica was done, relative to the begin of the rollout.
        last_finish_us: Time at which the last replica was done.
        ratio: ``last_finish_us / median_finish_us``.
        tail_share: Share of the step between the median finish and the last.
        requests: Number of requests, if the engine reported them.
        latency_s: Latency of the requests, from sending to the complete response.
        response_tokens: Lengths of the responses.
        finishes_us: Time at which each request (or else each replica) was done, sorted.
    """

    replicas: int
    median_finish_us: float
    last_finish_us: float
    ratio: float
    tail_share: float
    requests: int
    latency_s: Percentiles | None
    response_tokens: Percentiles | None
    finishes_us: list[float]


class StragglerRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart the workers of a role end a stage.

    Attributes:
        stage: The stage.
        role: The role.
        workers: Number of workers that ran it.
        slowest: Worker that took longest.
        slowest_us: Time that it took.
        median_us: Median over the workers.
        wait_us: Time by which the other workers were done before the last one, added up.
    """

    stage: str
    role: str
    workers: int
    slowest: str
    slowest_us: float
    median_us: float
    wait_us: float


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """How unevenly the ranks of a role arrive at a collective.

    Attributes:
        name: The collective.
        role: The role.
        calls: Calls that every rank made.
        median_us: Median of the shortest run of each call: its cost once all ranks have arrived.
        wait_us: Sum, over calls and ranks, of the time by which a run exceeds the shortest one.
        late: Rank that most often had the shortest run, which means that it arrived last.
        late_share: Share of the calls in which it did.
    """

    name: str
    role: str
    calls: int
    median_us: float
    wait_us: float
    late: str
    late_share: float


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel (or operator, in a CPU trace) in one stage, over all lanes.

    Attributes:
        name: The kernel.
        stage: Stage in which it began, or ``""``.
        calls: Number of calls.
        self_us: Time in it, without nested calls.
        share: Share of the self time of all kernels.
    """

    name: str
    stage: str
    calls: int
    self_us: float
    share: float


class LostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of all lanes due to one cause.

    Attributes:
        cause: Name of the cause; ``docs/report.md`` defines each.
        seconds: Lane-seconds; these are accelerator-seconds if each lane has its own accelerator.
        share: Share of the observed time of all lanes.
    """

    cause: str
    seconds: float
    share: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per time.

    Attributes:
        tokens: Tokens of the step.
        source: Where their number comes from.
        tokens_per_s: Tokens per second of the step.
        tokens_per_s_per_lane: The same, divided by the number of lanes.
    """

    tokens: float
    source: str
    tokens_per_s: float
    tokens_per_s_per_lane: float


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request that ended while its replica was captured.

    It is a row of a table, not of the report: a step may have a hundred thousand.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        begin_us: When it was sent, after the begin of the step.
        first_token_us: When its first output arrived, after the begin of the step; ``None`` where
            only whole responses are handed over.
        end_us: When its response was complete, after the begin of the step.
        latency_us: From being sent to the complete response.
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response.
        policy_version: Version of the weights that it began with, where it is known.
        failed: It raised, or was given up.
    """

    worker: str
    replica: int
    begin_us: float
    first_token_us: float | None
    end_us: float
    latency_us: float
    prompt_tokens: int
    response_tokens: int
    policy_version: int | None
    failed: bool


class RunningRow(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a replica are running over time.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        requests: Mean number of requests on their way in each of equally long parts of the step.
    """

    worker: str
    replica: int
    requests: list[float]


class MeasureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One number that a worker recorded with the capture, such as the peak memory of a stage.

    Attributes:
        worker: Name of the worker.
        stage: The stage that it was recorded in, or ``""``.
        name: What it is, with its unit, e.g. ``process_peak_rss_bytes``.
        value: The number; of a stage that ran several times, the largest.
    """

    worker: str
    stage: str
    name: str
    value: float


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the capture cost one worker.

    Attributes:
        worker: Name of the worker.
        start_s: Seconds to start recording.
        stop_s: Seconds to stop it.
        export_s: Of these, seconds to write what was recorded.
        bytes: Size of its artifacts on disk, as far as it is known.
    """

    worker: str
    start_s: float
    stop_s: float
    export_s: float
    bytes: int


class GanttSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a stage on one worker.

    Attributes:
        lane: Name of the worker, or ``controller``.
        name: The stage.
        begin_us: Begin, relative to that of the step.
        end_us: End, relative to the begin of the step.
        depth: 0 for an outermost stage.
        busy_us: Time of it in which the worker's lanes were busy, on average; ``None`` without a trace.
        communication_us: Time of it in which they communicated and computed nothing; a part of ``busy_us``.
    """

    lane: str
    name: str
    begin_us: float
    end_us: float
    depth: int
    busy_us: float | None = None
    communication_us: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that stands out.

    Attributes:
        rule: Name of the rule; ``docs/report.md`` gives its threshold.
        text: A sentence with its number.
        advice: What to try.
        weight: Lane-seconds at stake; the heaviest come first.
    """

    rule: str
    text: str
    advice: str
    weight: float


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How accurately the clock of a host is known.

    Attributes:
        host: Host name.
        offset_us: How far it is ahead of the controller's; corrected in all numbers.
        error_us: Bound of the remaining error.
        drift_us: Change of the offset while the capture was open.
    """

    host: str
    offset_us: float
    error_us: float
    drift_us: float


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was expected is in the report.

    Attributes:
        expected: Artifacts that the capture should have written.
        read: Traces that could be read.
        events: Events in them.
        missing: What is missing or damaged, as sentences.
        limited: Traces that were not read whole because of a limit; ``missing`` says which.
    """

    expected: int
    read: int
    events: int
    missing: list[str]
    limited: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one step.

    Attributes:
        schema_version: Version of this schema.
        directory: Folder of the step.
        step: Number of the step, if known.
        policy_version: Version of the weights, if the loop reports one.
        complete: ``False`` if the step ended early.
        span_us: Duration of the step, from ``on_step_begin`` to ``on_step_end``; without a
            manifest, from the first to the last event.
        stages: Step anatomy, in order of time.
        workers: One row per lane.
        engines: One row per lane of a rollout engine.
        tail: How the rollout ended.
        stragglers: One row per stage and role with several workers.
        collectives: The collectives that cost most waiting.
        ops: All kernels, those with most self time first.
        lost: Idle time by cause, largest first, ``unexplained`` last; adds up to all idle time.
        weight_sync_share: Share of the step spent on updating the engines' weights.
        throughput: Tokens per time, if their number is known.
        gantt: Runs of stages.
        findings: What stands out, at most five.
        clocks: Hosts whose clock is not the controller's.
        coverage: How much of what was expected is in the report.
        metrics: What the loop reported for the step.
        notes: Notes of the capture.
        measures: Numbers that workers recorded, such as the peak memory of their stages.
        costs: What the capture cost each worker.
        running: Requests running over time, one row per replica.
        timeline_begin_ns: Where the step begins in its merged timeline (ns); ``None`` without a manifest.
    """

    schema_version: int = REPORT_SCHEMA_VERSION
    directory: str
    step: int | None
    policy_version: int | None
    complete: bool
    span_us: float
    stages: list[StageRow]
    workers: list[WorkerRow]
    engines: list[EngineRow]
    tail: Tail | None
    stragglers: list[StragglerRow]
    collectives: list[CollectiveRow]
    ops: list[OpRow]
    lost: list[LostRow]
    weight_sync_share: float
    throughput: Throughput | None
    gantt: list[GanttSpan]
    findings: list[Finding]
    clocks: list[Clock]
    coverage: Coverage
    metrics: dict[str, float]
    notes: list[str]
    measures: list[MeasureRow] = []
    costs: list[CostRow] = []
    running: list[RunningRow] = []
    timeline_begin_ns: int | None = None
