"""The columns of the report's tables, one class of rows per table, and its other parts.

``columns`` of a class lists the shown columns as ``heading=field``, or as ``field`` if the heading
is the field's name without its unit. A column with a leading ``+`` is shown on the page only.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from verl_profiling.capture_request import Trigger
from verl_profiling.units import duration


def sum_of(rows: Iterable[object], column: str) -> float:
    """Return the sum of a numeric field over all rows."""
    return float(sum(getattr(row, column) for row in rows))


class Row(Struct, frozen=True):
    """A row of a table.

    Attributes:
        columns: The shown columns of the table, see above.
    """

    columns: ClassVar[str] = ""


class AroundRow(Row, frozen=True):
    """Time of the loop before or after the step: a pause to start or stop the capture, or a stage.

    Attributes:
        name: ``capture_start``, ``capture_stop``, or the stage, e.g. ``validate``.
        runs: Number of runs.
        begin_us: Begin of the first run, relative to the begin of the step.
        duration_us: Time in all runs.
    """

    columns = "name, runs, time=duration_us"

    name: str
    runs: int
    begin_us: float
    duration_us: float


class StageRow(AroundRow, frozen=True):
    """One stage of the controller, over all its runs.

    Attributes:
        name: The stage; also ``(starting and stopping the capture)``, which is part of no stage,
            and ``(outside stages)``, the rest of the step.
        runs: Number of runs.
        begin_us: Begin of the first run, relative to the begin of the step.
        duration_us: Total time in the stage, without the starts and stops of tools.
        share: Share of the step. Time in which several stages run side by side is divided equally
            among them, so the shares of all rows with depth 0 add up to 1.
        depth: 0 for an outermost stage.
        idle_us: Part of ``duration_us`` in which every lane was idle and no worker was in a stage
            of its own.
        lanes: Number of workers that run in an outermost stage; the next four times are parts of
            ``duration_us``.
        alone_us: Time in which no worker runs.
        work_us: Mean of the workers' work, without communication and waits.
        communication_us: Mean of the workers' communication without computation, and without waits.
        tail_us: The rest: waits of workers for the last one.
    """

    columns = (
        "stage=name, runs, time=duration_us, share, +lanes, +loop alone=alone_us, "
        "+mean work=work_us, +communication_us, +wait for the last=tail_us"
    )

    share: float
    depth: int = 0
    idle_us: float = 0.0
    lanes: int = 0
    alone_us: float = 0.0
    work_us: float = 0.0
    communication_us: float = 0.0
    tail_us: float = 0.0


class HelpRow(Row, frozen=True):
    """The predicted effect of one change.

    Attributes:
        change: The change in words, e.g. that a stage takes half of its time.
        option: The change, as an option of ``verl-profiling what-if``.
        stage: Outermost stage that is changed.
        predicted_us: Duration of the step with the change.
        difference_us: ``predicted_us`` minus the duration of the recorded step.
        difference_share: ``difference_us`` as a share of the recorded step.
        hours_a_day: Saved time of all lanes in 24 hours of such steps.
        unit: Unit of ``hours_a_day``: ``GPU-hours`` if lanes are GPUs, else ``lane-hours``.
    """

    columns = (
        "change, what-if=option, predicted=predicted_us, difference_us, saves a day=hours_a_day"
    )

    change: str
    option: str
    stage: str
    predicted_us: float
    difference_us: float
    difference_share: float
    hours_a_day: float
    unit: str


class PathRow(Row, frozen=True):
    """A segment of the critical path, the chain of work that determines the step's duration.

    Attributes:
        stage: Stages around it, the outermost first.
        who: Lane, worker or the loop, and group and sample of a trajectory.
        kind: ``own code`` of the loop, ``capture`` of the step, ``work`` of a worker, a collective,
            ``delay``, part of a request, or cause of a trajectory's time.
        begin_us: Begin, relative to the begin of the step.
        duration_us: Duration.
        share: Share of the step.
        idle_us: Part of a worker's ``duration_us`` in which all its lanes are idle, if a trace is
            recorded.
        worker: ``who`` without group and sample.
    """

    columns = "stage, who, kind, time=duration_us, share, idle_us"

    stage: str
    who: str
    kind: str
    begin_us: float
    duration_us: float
    share: float
    idle_us: float | None = None
    worker: str = ""


class UseRow(Struct, frozen=True):
    """Time of a lane, or of a device with all lanes that share it, by use.

    ``docs/report.md`` defines each number. All times lie inside the span.

    Attributes:
        name: Name of the lane; for a shared device, the names of its lanes joined by ``+``.
        device: ``False`` for CPU traces, where operators are counted in place of kernels.
        span_us: Observed time.
        busy_us: Time in which anything ran.
        idle_us: ``span_us - busy_us``.
        compute_us: Time in which computing kernels ran.
        communication_us: Time in which communication kernels ran.
        exposed_communication_us: Communication with no computation at the same time.
        overlap_us: Computation and communication at the same time.
        memcpy_us: Time in which memory was copied or set.
        unrecognised_us: Time in which the device was busy with work of unknown kind.
        waiting_us: Part of the communication in which the lane only waited for ranks that entered a
            collective later.
        host_bound_us: Idle time with the cause ``host_bound`` (also in ``lost_us``).
        lost_us: Lost time by cause; adds up to ``idle_us`` and ``waiting_us``.
    """

    name: str
    device: bool
    span_us: float
    busy_us: float
    idle_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    overlap_us: float
    memcpy_us: float
    unrecognised_us: float
    waiting_us: float
    host_bound_us: float
    lost_us: dict[str, float]

    @property
    def busy_share(self) -> float | None:
        """Busy share of the observed time; ``None`` for an unknown share."""
        if self.span_us:
            return self.busy_us / self.span_us
        return None


class WorkerRow(UseRow, frozen=True):
    """Time of one lane (a training rank, or a rank of a rollout engine) by use.

    Attributes:
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        load: Busy percentage (0 to 100) of each of 240 equal parts of the step.
        communication_load: Percentage of each part with communication and no computation; a part of
            ``load``.
        waiting_load: Percentage of each part in which the lane only waited in collectives, as in
            ``waiting_us``; a part of ``communication_load``. Ranks that arrive late wait little.
        accelerator: Name of the device, such as ``GPU 0``; empty for a CPU trace.
        traces: The lane's trace files, relative to the folder of the report.
    """

    columns = (
        "name, +device=accelerator, observed=span_us, busy_us, busy_share, +idle_us, "
        "host-bound=host_bound_us, compute_us, +communication_us, "
        "comm alone=exposed_communication_us, +waiting_us, +overlap_us, copies=memcpy_us, "
        "unrecognised_us, +files=traces"
    )

    role: str
    rank: int
    replica: int | None
    load: list[int]
    communication_load: list[int]
    waiting_load: list[int]
    accelerator: str
    traces: list[str]


class DeviceRow(UseRow, frozen=True):
    """Time of one device by use, over all lanes that share it (usually one).

    Attributes:
        lanes: Names of the lanes.
        roles: Roles of the lanes.
        kind: ``cuda``, ``npu``, ``cpu`` and so on; empty if unknown.
        uuid: UUID of the device; empty if unknown.
        place: Host, and number of the device on it, else its UUID; empty if unknown.
    """

    columns = (
        "lanes=name, observed=span_us, busy_us, busy_share, +idle_us, host-bound=host_bound_us, "
        "comm alone=exposed_communication_us, +waiting_us, device=place"
    )

    lanes: list[str]
    roles: list[str]
    kind: str
    uuid: str
    place: str


class EngineRow(Row, frozen=True):
    """Time of one rank of a rollout engine, from the names of the iterations in its trace.

    Attributes:
        name: Name of the lane.
        replica: Index of the replica.
        queueing_us: Time from the begin of the rollout to the engine's first iteration.
        iterations: Number of iterations.
        prefill_us: Time in iterations that processed prompt tokens.
        decode_us: Time in iterations that only generated.
        prefill_tokens: Prompt tokens processed; this and the next two are ``None`` if names do not
            say them.
        decode_tokens: Tokens generated.
        again_tokens: Other computed tokens: again (after a preemption, retraction or pause), or in
            vain.
        finish_us: End of the last iteration, relative to the begin of the rollout.
    """

    columns = (
        "name, iterations, prefill_us, decode_us, prompt tokens=prefill_tokens, "
        "new tokens=decode_tokens, computed again=again_tokens, queueing_us, finish_us"
    )

    name: str
    replica: int
    queueing_us: float | None
    iterations: int
    prefill_us: float
    decode_us: float
    prefill_tokens: int | None
    decode_tokens: int | None
    again_tokens: int | None
    finish_us: float | None


class StragglerRow(Row, frozen=True):
    """Spread of a stage's work over the workers of a role.

    Work is the time in the stage without waits for other workers in collectives.

    Attributes:
        stage: Name of the stage.
        role: Role of the workers.
        workers: Number of workers that ran the stage.
        slowest: Worker with the longest work.
        slowest_us: Work of the slowest worker.
        median_us: Median work of the workers.
        wait_us: Total wait of workers for others: in collectives, and after their own end of the
            stage.
        behind_us: Sum, over the other workers, of the slowest worker's extra work: the waits that
            it causes.
        lead_us: Work of the slowest worker minus the mean of the others.
        data_us: The part of ``lead_us`` that the slowest worker's data explain; the rest is its
            machine. ``None`` if it cannot be told.
        error_us: Error bound of ``data_us``.
        tokens: Tokens of the slowest worker as a multiple of the others' mean; 0 if unknown.
        fitted: Runs that ``data_us`` is fitted to, e.g. ``12 runs of update_actor``; if ``data_us``
            is ``None``, why nothing could be fitted.
    """

    columns = (
        "stage, +role, +workers, slowest, time=slowest_us, median_us, others waited=wait_us, "
        "its data=data_us, +give or take=error_us, +fitted to=fitted"
    )

    stage: str
    role: str
    workers: int
    slowest: str
    slowest_us: float
    median_us: float
    wait_us: float
    behind_us: float = 0.0
    lead_us: float = 0.0
    data_us: float | None = None
    error_us: float | None = None
    tokens: float = 0.0
    fitted: str = ""


class WorkRow(Row, frozen=True):
    """The work given to a worker in a stage, over the runs of the stage.

    Attributes:
        worker: Name of the worker.
        stage: The stage; ``rollout`` for the requests of an engine.
        runs: Number of runs with known work; of an engine, its requests.
        duration_us: Time in these runs; of an engine, from its first request to its last response.
        samples: Number of sequences.
        tokens: Sum of their lengths.
        tokens_squared: Sum of their squared lengths.
        micro_batches: Number of micro-batches; ``None`` if unknown, as for the other facts.
    """

    columns = (
        "worker, stage, +runs, samples, tokens, +tokens_squared, micro_batches, time=duration_us"
    )

    worker: str
    stage: str
    runs: int
    duration_us: float
    samples: int | None = None
    tokens: int | None = None
    tokens_squared: int | None = None
    micro_batches: int | None = None


class AchievedRow(Row, frozen=True):
    """The operations per second of a lane in a stage, and the bytes per second of decoding.

    Attributes:
        lane: Name of the worker, or of a rank of an engine.
        stage: The stage; ``prefill`` and ``decode`` of an engine; ``(step)`` for all of them, over
            the duration of the step.
        device: Model of the device, e.g. ``NVIDIA H200``; empty if unknown, or a CPU.
        duration_us: Time in the stage, with waits.
        operations: Floating-point operations that the model needs for the lane's share of the work.
        teraflops: Operations per second, in units of 10^12.
        compute_share: ``teraflops`` as a share of the device's peak (dense bfloat16); ``None`` for
            a device with an unknown peak. Of training, this is the MFU.
        gigabytes: Bytes per second that decoding has to read, in units of 10^9: weights, and cached
            keys and values.
        memory_share: ``gigabytes`` as a share of the device's bandwidth.
    """

    columns = (
        "lane, stage, time=duration_us, +operations, TFLOP/s=teraflops, of peak=compute_share, "
        "GB/s=gigabytes, of bandwidth=memory_share, +device"
    )

    lane: str
    stage: str
    device: str
    duration_us: float
    operations: float
    teraflops: float
    compute_share: float | None = None
    gigabytes: float | None = None
    memory_share: float | None = None


class CollectiveRow(Row, frozen=True):
    """Waits of the ranks of a process group for each other in a collective.

    Attributes:
        name: Name of the collective.
        role: Role of the ranks.
        group: Ranks of the group, as the traces list them; for an NPU, the group's number.
        calls: Calls that every rank made.
        median_us: Median, over the calls, of the shortest run, which is the cost without waits.
        wait_us: Time for which ranks waited for later ranks, summed over the ranks. Concurrent
            waits of one rank count once.
        late: Rank that arrived last most often, i.e. had the shortest run; empty if some ranks of
            the group are unknown.
        late_share: Share of the calls in which ``late`` arrived last.
    """

    columns = (
        "collective=name, +role, ranks=group, calls, median_us, waiting=wait_us, "
        "most often last=late, of calls=late_share"
    )

    name: str
    role: str
    calls: int
    median_us: float
    wait_us: float
    late: str
    late_share: float
    group: str = ""


class LinkRow(Row, frozen=True, kw_only=True):
    """Bytes and bandwidth of a collective in a process group, of messages of similar size; or of
    two NPUs.

    Attributes:
        name: Name of the collective; for NPUs, with the transport. ``weight bucket`` for weights
            that a worker sends to its engine: each of ``calls`` until the engine has it.
        group: Ranks of the group, as the traces list them; of buckets, the worker.
        pair: The hosts of the group (``host3-host7``), eight at most, or the two NPUs (``0-1``).
        hosts: Number of these hosts or NPUs; 0 if unknown.
        reach: ``in-node`` or ``over nodes``; empty if the hosts are unknown.
        ranks: Number of ranks.
        calls: Calls of one rank; ``None`` for NPUs.
        bytes: Bytes of all calls, each of the input or the output of one rank, whichever are more;
            for NPUs, those that the first one sent. ``None`` if unknown.
        duration_us: Time of the calls with known bandwidth, without waits for the last rank.
        algorithm_bytes_per_s: Median of bytes over time; ``None`` if unknown.
        bus_bytes_per_s: Median of what the slowest link carried; ``None`` if unknown.
        best_bytes_per_s: The same in the fastest calls, 90th percentile; for NPUs, in all calls.
        missing: Fact without which the bandwidths are unknown.
    """

    columns = (
        "collective=name, ranks=group, pair, reach, calls, bytes, a call=call_bytes, "
        "time=duration_us, algorithm=algorithm_bytes_per_s, bus=bus_bytes_per_s, "
        "+at best=best_bytes_per_s, unknown=missing"
    )

    name: str
    group: str
    pair: str
    reach: str
    hosts: int = 2
    ranks: int = 2
    calls: int | None = None
    bytes: float | None
    duration_us: float = 0.0
    algorithm_bytes_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    best_bytes_per_s: float | None = None
    missing: str = ""

    @property
    def call_bytes(self) -> float | None:
        """Mean bytes of a call; ``None`` if unknown."""
        return self.bytes and self.calls and self.bytes / self.calls


class KernelRow(Row, frozen=True):
    """One kernel (or operator, in a CPU trace) in one stage, over all lanes.

    Attributes:
        name: Name of the kernel.
        stage: Stage that launched it, or ``""``; without a recorded launch, the stage in which it
            began.
        calls: Number of calls.
        self_us: Time in the kernel, without nested calls.
        share: Share of the self time of all kernels.
    """

    columns = "stage, name, calls, self time=self_us, share"

    name: str
    stage: str
    calls: int
    self_us: float
    share: float


class PartRow(Row, frozen=True):
    """Time of one of several causes.

    Attributes:
        cause: Name of the cause. In a rollout, a cause of trajectories; while none ran, a span of
            their processes, ``controller: <stage>``, or ``requests of no trajectory``.
        seconds: Time of the cause; for the rollout, wall time.
        share: Share of the sum of all causes.
    """

    columns = "cause, time=seconds, share"

    cause: str
    seconds: float
    share: float


class LostRow(PartRow, frozen=True):
    """The time lost by one cause: devices idled, or waited for other ranks in collectives.

    Attributes:
        cause: Name of the cause; ``docs/report.md`` defines each.
        seconds: Lost seconds, summed over the devices; lanes that share a device count once.
        share: Share of the observed time of all devices.
        parts: ``seconds`` by what happened meanwhile: a cause of trajectories, a span of their
            processes, or a stage. Empty if unknown.
    """

    parts: dict[str, float] = {}


class ServiceRow(Struct, frozen=True):
    """Calls of something that trajectories share, over time.

    Attributes:
        name: Name of the tool, limit or replica, or ``blocked event loops``.
        running: Mean number of calls that run, or hold a slot, in each of 240 equal parts of the
            step; of event loops, those that a task blocks.
        waiting: Mean number of calls that wait, likewise; of event loops, the trajectories. Empty
            if unknown.
        slots: Limit of the running calls that explains the waits; ``None`` without one.
    """

    name: str
    running: list[float]
    waiting: list[float]
    slots: int | None = None


class ReplicaRow(Row, frozen=True):
    """The totals of one replica's requests; ``None`` for values that its engine does not report.

    Percentiles are of the requests that did not fail. All numbers but ``validation`` leave out
    validation.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        requests: Number of requests.
        failed: Number of requests that raised or were aborted.
        queued_p50_us: Median time from arrival at the engine to scheduling.
        queued_p99_us: The same, 99th percentile.
        to_first_token_p50_us: Median time from sending to the first token.
        to_first_token_p99_us: The same, 99th percentile.
        per_token_p50_us: Median, over requests, of the mean time per token after the first.
        per_token_p99_us: The same, 99th percentile.
        cache_hit_share: Share of prompt tokens that came from the prefix cache.
        preemptions: Number of preemptions.
        validation: Number of requests sent during validation.
    """

    columns = (
        "name=worker, requests, +failed, +queued_p50_us, queued_p99_us, 1st token "
        "p50=to_first_token_p50_us, 1st token p99=to_first_token_p99_us, a token "
        "p50=per_token_p50_us, +a token p99=per_token_p99_us, cached=cache_hit_share, "
        "preempted=preemptions, of validation besides=validation"
    )

    worker: str
    replica: int
    requests: int
    failed: int
    queued_p50_us: float | None
    queued_p99_us: float | None
    to_first_token_p50_us: float | None
    to_first_token_p99_us: float | None
    per_token_p50_us: float | None
    per_token_p99_us: float | None
    cache_hit_share: float | None
    preemptions: int | None
    validation: int = 0


class MeasureRow(Row, frozen=True):
    """One number that a worker recorded with the capture, such as the peak memory of a stage.

    Attributes:
        worker: Name of the worker.
        stage: The stage of the number, or ``""``.
        name: Name of the number, with its unit, e.g. ``process_peak_rss_bytes``.
        value: The number; the largest, if the stage ran several times.
    """

    columns = "worker, stage, number=name, value"

    worker: str
    stage: str
    name: str
    value: float

    @property
    def unit(self) -> str:
        """Unit of the number, from its name; empty if the name has none."""
        if self.name.endswith("_bytes"):
            return "bytes"
        return ""


class CounterRow(Row, frozen=True):
    """A counter of a process in the step, e.g. the length of a queue.

    Attributes:
        lane: Lane of the process, e.g. ``rollouter_rank0``.
        name: Name of the counter.
        samples: Number of samples in the step.
        last: The last sample.
        mean: Mean over time from the first sample on; each sample holds until the next.
        max: The largest sample.
    """

    columns = "of=lane, count=name, last, mean, largest=max, +counted=samples"

    lane: str
    name: str
    samples: int
    last: float
    mean: float
    max: float


class CostRow(Row, frozen=True):
    """The cost of the capture for one worker.

    Attributes:
        worker: Name of the worker.
        start_s: Seconds to start recording.
        stop_s: Seconds to stop recording, which includes writing.
    """

    columns = "worker, start_s, stop_s"

    worker: str
    start_s: float
    stop_s: float


Kind = Literal["stage", "time", "kernel", "request", "memory"]


class SuspectRow(Row, frozen=True, kw_only=True):
    """One number of a suspect, compared with its peers.

    Attributes:
        suspect: Lane or worker that may be the cause of a slow step.
        peers: Lanes or workers to compare with; the value of several peers is the median.
        kind: ``stage``: time in a stage without waits for other ranks. ``time``: a part of the slow
            stage, or of the step. ``kernel``: self time of a kernel. ``request``: median over an
            engine's requests. ``memory``: a peak.
        name: Name of the stage, the part of the time, the kernel or the measure.
        unit: Unit of the values.
        value: Value of the suspect.
        peer_value: Value of the peers; ``None`` if they have none.
    """

    columns = "suspect, what=kind, name, suspect's=value, peers, peers'=peer_value, difference"

    suspect: str
    peers: str
    kind: Kind
    name: str
    unit: Literal["s", "bytes"] = "s"
    value: float
    peer_value: float | None

    @property
    def difference(self) -> float | None:
        """The suspect's value minus the peers'."""
        if self.peer_value is None:
            return None
        return self.value - self.peer_value


class CauseRow(PartRow, frozen=True):
    """The time of all trajectories with one cause.

    Attributes:
        cause: ``decode``, ``tool:search``, ``loop lag``, ...; ``docs/agents.md`` defines each.
        seconds: Trajectory-seconds; all causes add up to the time of all trajectories.
        share: Share of the time of all trajectories.
        validate: Whether the row is of validation rollouts.
        trajectories: Number of trajectories with this cause.
    """

    columns = "cause, validation=validate, time=seconds, share, trajectories"

    validate: bool
    trajectories: int


class CallRow(Row, frozen=True):
    """Spans of one name: a tool, an environment, scoring, generating, waiting.

    Attributes:
        role: Role of the processes.
        name: Name of the spans.
        calls: Number of spans.
        failed: Number of spans that raised.
        seconds: Total duration of the spans.
        p50_s: Median duration.
        p90_s: 90th percentile of the durations.
        p99_s: 99th percentile of the durations.
        longest_s: Longest duration.
    """

    columns = "name, +role, calls, failed, time=seconds, p50_s, p90_s, p99_s, longest_s"

    role: str
    name: str
    calls: int
    failed: int
    seconds: float
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float


class BlockRow(Row, frozen=True):
    """One task that blocked the event loop of a process.

    Attributes:
        lane: Lane of the process whose loop was blocked.
        what: The blocking span, or else the function; ``unknown`` without a stack sample.
        function: The function that blocked longest.
        blocks: Number of blocks.
        seconds: Total duration of the blocks.
        longest_s: Longest block.
        trajectories: Number of trajectories delayed by the blocks.
        stood_still_s: Total delay of these trajectories.
    """

    columns = (
        "lane, by=what, +function, times=blocks, for=seconds, longest_s, stood still=trajectories, "
        "added up=stood_still_s"
    )

    lane: str
    what: str
    function: str
    blocks: int
    seconds: float
    longest_s: float
    trajectories: int
    stood_still_s: float


class GroupRow(Row, frozen=True):
    """The trajectories of one prompt.

    Attributes:
        group: Name of the group.
        members: Number of trajectories in the group.
        first_s: First end of a trajectory, relative to the begin of the step.
        last_s: Last end of a trajectory, relative to the begin of the step.
        waited_s: Sum, over the trajectories, of the time from their end to the last end.
        last_cause: Largest cause of the last trajectory's time after the first end.
        whole: Whether all trajectories of the group ended in the step.
    """

    columns = (
        "group, members, first done=first_s, last done=last_s, waited_s, "
        "the last's cause=last_cause, all done=whole"
    )

    group: str
    members: int
    first_s: float
    last_s: float
    waited_s: float
    last_cause: str
    whole: bool


class StatusRow(Row, frozen=True):
    """Trajectories of one status, and their cost.

    Attributes:
        validate: Whether the row is of validation rollouts.
        status: ``done``, ``failed``, ``filtered``, ...
        trajectories: Number of trajectories.
        seconds: Total time of the trajectories.
        share: Share of the time of all training (or all validation) trajectories.
    """

    columns = "status, validation=validate, trajectories, time=seconds, share"

    validate: bool
    status: str
    trajectories: int
    seconds: float
    share: float


class NothingRow(PartRow, frozen=True):
    """Training trajectories of one task from which nothing was learned, for one reason.

    Attributes:
        cause: ``equal rewards`` (of all samples of a group), ``truncated``, or the status of
            trajectories that were not used. A trajectory counts once, by its status first.
        seconds: Trajectory-seconds.
        share: Share of the time of all training trajectories.
        trajectories: Number of trajectories.
        groups: Number of their groups.
        task: Their task and environment; empty if unknown.
        share_of_task: Share of the time of all training trajectories of the task.
    """

    columns = "cause, task, trajectories, groups, time=seconds, share, of the task=share_of_task"

    trajectories: int
    groups: int
    task: str = ""
    share_of_task: float = 0.0


class UselessRow(PartRow, frozen=True):
    """Training on sequences of one task from which nothing was learned, for one reason.

    Attributes:
        stage: Outermost stage with the training.
        cause: ``equal rewards`` (of all samples of a group), ``masked``, or a reason that the loop
            passed.
        tokens: Tokens of these sequences.
        seconds: Lane-seconds: the time of each run, by the share of its tokens.
        share: Share of the stage's runs with known advantages, masks or reasons.
        task: Task or environment of the sequences; empty if unknown.
        share_of_task: Share of the time of these runs on the task.
    """

    columns = "stage, cause, task, tokens, time=seconds, share, of the task=share_of_task"

    stage: str
    tokens: int
    task: str = ""
    share_of_task: float = 0.0


class FailureRow(Row, frozen=True):
    """Trajectories that failed, or were cancelled, with one error in one span.

    Attributes:
        validate: Whether the row is of validation rollouts.
        status: ``failed`` or ``cancelled``; empty for the row of all other errors.
        error: The error, in one line of at most 120 characters.
        trajectories: Number of trajectories.
        example: One of the trajectories, as ``group/sample``.
        span: Last span that failed, else the last open span; empty if there is none.
    """

    columns = "error, validation=validate, trajectories, status, in=span, e.g.=example"

    validate: bool
    status: str
    error: str
    trajectories: int
    example: str
    span: str


class VersionRow(Row, frozen=True):
    """Training trajectories and requests of one policy version.

    Attributes:
        version: Version of the policy's weights.
        behind: Version that the step trains minus this version, negative for a newer version;
            ``None`` if unknown.
        oldest: Number of trajectories whose oldest version is this one.
        newest: Number of trajectories whose newest version is this one.
        segments: Number of requests served with this version.
        segment_tokens: Tokens generated by these requests.
    """

    columns = "version, behind, oldest of=oldest, newest of=newest, segments, tokens=segment_tokens"

    version: int
    behind: int | None
    oldest: int
    newest: int
    segments: int
    segment_tokens: int


def added(row: PathRow, other: PathRow) -> PathRow:
    """Return a row with the times of both rows added up."""
    idle_us = None
    if row.idle_us is not None:
        idle_us = row.idle_us + (other.idle_us or 0.0)
    duration_us, share = row.duration_us + other.duration_us, row.share + other.share
    return replace(row, duration_us=duration_us, share=share, idle_us=idle_us)


OTHER_RANKS = "waiting_for_other_ranks"
"""The cause of the lost time in which a collective waits for other ranks;
the device is busy then.
"""


class RequestedCapture(Trigger, frozen=True, kw_only=True):
    """The request of a capture: the fields of a ``Trigger``, the rank that was last in
    collectives, and whether the step has what was noticed.

    Attributes:
        when: Begin of the capture as a date and time, on the clock of the loop's host.
        last: Rank for which the others mostly waited in the collectives of the trigger's stage, or
            ``""``.
        waited_s: Total time for which the others waited for ``last`` (s).
        late_start_s: Time for which the others worked while ``last`` still started to record (s),
            added up over the others.
        only: Stages of a capture that is limited to a stage, those of the loop and of its workers.
        noticed_s: Length of what was noticed: of a lead, or of the slow step, stage or span (s);
            ``None`` if unknown.
        usual_s: The same before it was noticed (s); of a lead 0.
        seen_s: The same in the captured step (s); ``None`` if unknown.
    """

    when: str = ""
    last: str = ""
    waited_s: float = 0.0
    late_start_s: float = 0.0
    only: list[str] = []
    noticed_s: float | None = None
    usual_s: float = 0.0
    seen_s: float | None = None

    @property
    def is_late_start(self) -> bool:
        """Whether the others waited for ``last`` mostly because it started to record later."""
        return self.late_start_s >= self.waited_s / 2 > 0

    @property
    def is_gone(self) -> bool:
        """Whether the captured step has less than half of what was noticed."""
        if self.noticed_s is None or self.seen_s is None:
            return False
        return self.seen_s - self.usual_s < (self.noticed_s - self.usual_s) / 2


class Percentiles(Struct, frozen=True):
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


class LateResponse(Struct, frozen=True):
    """The response that ended last in the rollout, compared with others.

    Attributes:
        replica: Replica that made it.
        seconds: By how much later it ended than the others did, on average.
        others: Number of the others.
        one_per_replica: Whether the others are the last response of each other replica; of one
            replica, they are all its other responses.
        tokens: Length of the response.
        usual_tokens: Mean length of the others.
        preemptions: Number of its preemptions by the engine; 0 if unknown.
        prompt_tokens: Length of its prompt.
        cached_tokens: Number of prompt tokens from the engine's prefix cache, if known.
        parts: The delay by reason, which may be negative: ``sent later``, ``more tokens`` at the
            others' pace, ``slower tokens``, and parts of a request, such as ``queued``. The sum is
            ``seconds``.
    """

    replica: int
    seconds: float
    others: int
    one_per_replica: bool
    tokens: int
    usual_tokens: float
    preemptions: int
    prompt_tokens: int
    cached_tokens: int | None
    parts: list[PartRow]


class Tail(Struct, frozen=True):
    """The time in which the rollout waits for its last replicas.

    Attributes:
        replicas: Number of observed replicas.
        median_finish_us: Median end of a replica, relative to the begin of the rollout.
        last_finish_us: End of the last replica, relative to the begin of the rollout.
        ratio: ``last_finish_us / median_finish_us``.
        tail_share: Time from the median end to the last end, as a share of the step.
        requests: Number of requests, if the engine reported them.
        latency_s: Latency of the requests, from sending to the complete response, if known.
        response_tokens: Lengths of the responses.
        last_replica: Index of the replica that ended last.
        late: The response that ended last; ``None`` without requests.
    """

    replicas: int
    median_finish_us: float
    last_finish_us: float
    ratio: float
    tail_share: float
    requests: int
    latency_s: Percentiles | None
    response_tokens: Percentiles | None
    last_replica: int | None = None
    late: LateResponse | None = None


class LastTrajectories(Struct, frozen=True):
    """The tail of the rollout, in which only the last training trajectories ran.

    Attributes:
        trajectories: Number of trajectories in the tail.
        of: Number of training trajectories of the same batch: all, unless the next batch began
            after the last one of a batch.
        seconds: Duration of the tail, up to the end of the last trajectory.
        share: Share of the time from the first trajectory's begin to the last one's end.
        parts: Duration of the tail by cause; an instant is divided equally among the running
            trajectories.
        is_over: Whether all of them have ended; else the step or the recording ends first.
    """

    trajectories: int
    of: int
    seconds: float
    share: float
    parts: list[PartRow]
    is_over: bool = True


class Polling(Struct, frozen=True):
    """Cost of a trainer that polls for ended trajectories.

    Attributes:
        pauses: Number of sleeps between polls in the rollout.
        interval_s: Median duration of a sleep.
        seconds: Total duration of the sleeps.
        late_s: Part of ``seconds`` after the last trajectory's end. A lower bound for an
            asynchronous trainer, because trajectories of later batches end too.
        late_share: ``late_s`` as a share of the step.
    """

    pauses: int
    interval_s: float
    seconds: float
    late_s: float
    late_share: float


class Rollout(Struct, frozen=True):
    """The section on the rollout: the time of a step's trajectories by cause.

    Attributes:
        trajectories: Number of training trajectories.
        validation: Number of trajectories of validation rollouts.
        cut: Number of trajectories that are only partly in the step or in the recording.
        seconds: Total time of the training trajectories.
        p50_s: Median time of the completely recorded training trajectories; ``None`` if there are
            none.
        p99_s: 99th percentile of the same times.
        wall_s: Time from the begin of the first training trajectory to the end of the last one.
        causes: Time of the trajectories by cause.
        time: Wall time of the rollout by cause.
        explained: Share of this wall time with a known cause.
        last: Tail of the rollout.
        calls: Tools and other spans, the largest total time first.
        blocks: Functions and spans that blocked event loops.
        groups: Groups of training trajectories, the longest total wait first.
        groups_seen: Number of groups with several trajectories.
        group_waited_s: Total time for which trajectories of these groups waited for the last one of
            their group.
        group_spread_p50_s: Median time from a group's first end to its last.
        group_spread_max_s: Longest time from a group's first end to its last.
        statuses: Trajectories by status.
        nothing: Training trajectories from which nothing was learned, by reason, longest first.
        rewarded: Number of training trajectories with a known reward.
        failures: Errors of trajectories, most frequent first, validation last.
        versions: Policy versions of the training trajectories, newest first.
        versioned: Number of training trajectories with known versions.
        partial: Number of training trajectories generated with several versions.
        polling: Cost of the trainer's polling; ``None`` without polling.
    """

    trajectories: int
    validation: int
    cut: int
    seconds: float
    p50_s: float | None
    p99_s: float | None
    wall_s: float
    causes: list[CauseRow]
    time: list[PartRow]
    explained: float
    last: LastTrajectories | None
    calls: list[CallRow]
    blocks: list[BlockRow]
    groups: list[GroupRow]
    groups_seen: int
    group_waited_s: float
    group_spread_p50_s: float
    group_spread_max_s: float
    statuses: list[StatusRow]
    failures: list[FailureRow]
    versions: list[VersionRow]
    versioned: int
    partial: int
    polling: Polling | None = None
    nothing: list[NothingRow] = []
    rewarded: int = 0

    @property
    def of_trajectories(self) -> str:
        """``wall_s`` as text, with the begin and end that it counts from."""
        return (
            f"the {duration(self.wall_s)} from the first trajectory's begin to the last one's end"
        )


class Throughput(Struct, frozen=True):
    """Tokens per second of the step, over all devices and for each.

    Attributes:
        tokens: Number of tokens of the step.
        source: Source of ``tokens``, e.g. ``engine iterations``.
        tokens_per_s: Tokens per second of the step.
        tokens_per_s_per_device: ``tokens_per_s`` divided by the number of devices.
    """

    tokens: float
    source: str
    tokens_per_s: float
    tokens_per_s_per_device: float


class GanttSpan(Struct, frozen=True):
    """One run of a stage on one worker.

    Attributes:
        lane: Name of the worker, or ``controller``.
        name: Name of the stage.
        begin_us: Begin, relative to the begin of the step.
        end_us: End, relative to the begin of the step.
        depth: 0 for an outermost stage.
        row: Row inside the lane, from 0. Concurrent stages are in different rows; a nested stage is
            in the row of its parent.
        bytes: Bytes that an engine moved, released or reserved in it; 0 if unknown.
    """

    lane: str
    name: str
    begin_us: float
    end_us: float
    depth: int
    row: int = 0
    bytes: int = 0
