"""The tables of the report: one type of row each.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP
from verl_profiling.units import duration


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the controller, all its runs together.

    Attributes:
        name: The stage. ``(starting and stopping the capture)`` is the time that this took, which is
            in no stage, ``(outside stages)`` the rest of the step.
        runs: Number of runs.
        begin_us: Begin of its first run, relative to the begin of the step.
        duration_us: Total time in it, without the starts and stops of tools.
        share: Share of the step. Time in which several stages run side by side is divided equally among
            them, so the shares of all rows with depth 0 add up to 1.
        depth: 0 for an outermost stage.
        side_by_side_us: Part of ``duration_us`` in which another stage of the same depth ran too.
        idle_us: Part of ``duration_us`` in which every lane was idle and none was in a stage of its own.
    """

    name: str
    runs: int
    begin_us: float
    duration_us: float
    share: float
    depth: int = 0
    side_by_side_us: float = 0.0
    idle_us: float = 0.0


class OutsideRow(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the loop around the step: a pause in which the capture started or stopped, or a stage.

    Attributes:
        name: ``capture_start``, ``capture_stop``, or the stage, e.g. ``validate``.
        runs: Number of runs.
        begin_us: Begin of its first run, relative to the begin of the step.
        duration_us: Time in all its runs.
        parts: Of a pause, how long each role took to answer (they are called at the same time) and how
            long writing took; of a stage, the stages in it. Seconds, largest first.
    """

    name: str
    runs: int
    begin_us: float
    duration_us: float
    parts: dict[str, float] = {}

    @property
    def is_pause(self) -> bool:
        """Whether the loop only waited for the capture."""
        return self.name in (CAPTURE_START, CAPTURE_STOP)


class UseRow(msgspec.Struct, frozen=True, kw_only=True):
    """How a lane, or a device with all lanes that share it, spent its time.

    ``docs/report.md`` defines each number. All times lie inside the span.

    Attributes:
        name: Name of the lane; of a device that lanes share, their names with ``+`` in between.
        device: ``False`` for CPU traces, where operators are counted in place of kernels.
        span_us: Time for which it was observed.
        busy_us: Time in which anything ran.
        idle_us: ``span_us - busy_us``.
        compute_us: Time in which computing kernels ran.
        communication_us: Time in which communication kernels ran.
        exposed_communication_us: Communication with no computation at the same time.
        overlap_us: Computation and communication at the same time.
        memcpy_us: Time in which memory was copied or set.
        unrecognised_us: Time in which its device was busy with work of no known kind.
        waiting_us: Part of the communication in which all that it did was wait for ranks that came later to
            a collective.
        host_bound_us: Idle time with the cause ``host_bound`` (also in ``lost_us``).
        lost_us: Lost time by cause; adds up to ``idle_us`` and ``waiting_us``.
        graphs: Whether a host launched graphs (CUDA graphs, say) on it in place of single kernels.
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
    graphs: bool

    @property
    def busy_share(self) -> float:
        """Share of the observed time in which it was busy."""
        return self.busy_us / self.span_us if self.span_us else 0.0


class WorkerRow(UseRow, frozen=True, kw_only=True):
    """How one lane (a training rank, or a rank of a rollout engine) spent its time.

    Attributes:
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        load: Busy percentage of each of equally long parts of the step, 0 to 100.
        communication_load: Percentage of each part in which it communicated and computed nothing; a
            part of ``load``.
        waiting_load: Percentage of each part in which all that it did was wait in collectives, as in
            ``waiting_us``; a part of ``communication_load``. A rank that is waited for has little of it.
        accelerator: Name of its device, such as ``GPU 0``; empty for a CPU trace.
        traces: The files that it was read from, relative to the folder of the report.
    """

    role: str
    rank: int
    replica: int | None
    load: list[int]
    communication_load: list[int]
    waiting_load: list[int]
    accelerator: str
    traces: list[str]


class DeviceRow(UseRow, frozen=True, kw_only=True):
    """How one device spent its time, all lanes that share it together; most often it is one.

    Attributes:
        lanes: Names of its lanes.
        roles: Their roles.
        kind: ``cuda``, ``npu``, ``cpu`` and so on; empty where it is not known.
        uuid: Its UUID, where that is known.
        place: Its host and its number there, likewise.
    """

    lanes: list[str]
    roles: list[str]
    kind: str
    uuid: str
    place: str

    @property
    def located(self) -> str:
        """Where it is, as far as that is known."""
        return self.place or self.uuid


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


class StragglerRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart the work of a role's workers in a stage is.

    Attributes:
        stage: The stage.
        role: The role.
        workers: Number of workers that ran it.
        slowest: Worker that worked longest: its time in the stage, less that in which it waited in
            collectives for others.
        slowest_us: Time that it worked.
        median_us: Median over the workers.
        wait_us: Time for which workers waited for others, in collectives of the stage or between their end
            of it and the last one's, added up.
        behind_us: Time by which the slowest worked longer than each of the others, added up: what they
            would not have to wait if it were as fast.
    """

    stage: str
    role: str
    workers: int
    slowest: str
    slowest_us: float
    median_us: float
    wait_us: float
    behind_us: float = 0.0


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """How unevenly the ranks of a process group arrive at a collective.

    Attributes:
        name: The collective.
        role: Their role.
        group: Ranks of the group, as the traces list them; for an NPU, its number.
        calls: Calls that every rank made.
        median_us: Median of the shortest run of each call: its cost once all ranks have arrived.
        wait_us: Time for which ranks waited in it for later ones, added up over the ranks. An instant
            counts once for a rank, however many of its calls wait in it.
        late: Rank that most often had the shortest run, which means that it arrived last; empty where some
            ranks of the group are not known.
        late_share: Share of the calls in which it did.
    """

    name: str
    role: str
    calls: int
    median_us: float
    wait_us: float
    late: str
    late_share: float
    group: str = ""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
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


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one cause, of all that a table is about.

    Attributes:
        cause: Its name. In a rollout it is what trajectories waited for; where none ran, what their processes
            did, ``controller: <stage>``, or ``requests of no trajectory``.
        seconds: Its time; of the rollout's, on the wall clock.
        share: Share of the whole.
    """

    cause: str
    seconds: float
    share: float


class LostRow(PartRow, frozen=True, kw_only=True):
    """The lane-seconds lost by one cause: devices idled, or waited for other ranks in collectives.

    Attributes:
        cause: Its name; ``docs/report.md`` defines each.
        seconds: Device-seconds: lanes that share a device count once.
        share: Share of the observed time of all devices.
        parts: What trajectories, their processes and the loop did meanwhile, in device-seconds that add up to
            ``seconds``; only where trajectories were recorded, of causes that they are behind.
    """

    parts: dict[str, float] = {}


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request that ended while its replica was captured.

    It is a row of a table, not of the report: a step may have a hundred thousand.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        begin_us: When it was sent, after the begin of the step.
        first_token_us: When the engine had its first token, or else when its first output arrived, after
            the begin of the step; ``None`` where neither is known.
        end_us: When its response was complete, after the begin of the step.
        latency_us: From being sent to the complete response.
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response.
        id: What the engine was given as its id; empty if that is not known.
        arrival_us: When the engine's scheduler got it, after the begin of the step, if known.
        scheduled_us: When the engine first scheduled it, likewise.
        last_token_us: When the engine had its last token, likewise.
        to_first_token_us: From being sent to the first token, if that is known.
        per_token_us: Mean time from token to token behind the first, if known.
        cached_tokens: Of the prompt, what came from the engine's prefix cache, if known.
        preemptions: How often the engine took it off and began it again, if known.
        policy_version: Version of the weights that it began with, where it is known.
        failed: It raised, or was given up.
        validate: It was sent while the loop validated.
    """

    worker: str
    replica: int
    begin_us: float
    first_token_us: float | None
    end_us: float
    latency_us: float
    prompt_tokens: int
    response_tokens: int
    id: str = ""
    arrival_us: float | None = None
    scheduled_us: float | None = None
    last_token_us: float | None = None
    to_first_token_us: float | None = None
    per_token_us: float | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    policy_version: int | None
    failed: bool
    validate: bool = False


class RunningRow(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a replica are running over time.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        requests: Mean number of requests on their way in each of equally long parts of the step.
        queued: Of these, those that the engine had not scheduled yet; empty if it does not tell.
    """

    worker: str
    replica: int
    requests: list[float]
    queued: list[float] = []


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one replica's requests; ``None`` where its engine does not report.

    Percentiles are of the requests that did not fail. All numbers but ``validation`` are of the rollout.

    Attributes:
        worker: Name of the replica, e.g. ``rollout0``.
        replica: Index of the replica.
        requests: Number of requests.
        failed: Of these, those that raised or were given up.
        queued_p50_us: From the engine getting a request to scheduling it, the median.
        queued_p90_us: The same, 90th percentile.
        queued_p99_us: The same, 99th percentile.
        to_first_token_p50_us: From being sent to the first token, the median.
        to_first_token_p90_us: The same, 90th percentile.
        to_first_token_p99_us: The same, 99th percentile.
        per_token_p50_us: Mean time from token to token of a request, behind the first, the median.
        per_token_p90_us: The same, 90th percentile.
        per_token_p99_us: The same, 99th percentile.
        cache_hit_share: Share of the prompts' tokens that came from the prefix cache.
        preemptions: How often requests were taken off and begun again.
        validation: Requests that were sent while the loop validated, which nothing else here counts.
    """

    worker: str
    replica: int
    requests: int
    failed: int
    queued_p50_us: float | None
    queued_p90_us: float | None
    queued_p99_us: float | None
    to_first_token_p50_us: float | None
    to_first_token_p90_us: float | None
    to_first_token_p99_us: float | None
    per_token_p50_us: float | None
    per_token_p90_us: float | None
    per_token_p99_us: float | None
    cache_hit_share: float | None
    preemptions: int | None
    validation: int = 0


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

    @property
    def unit(self) -> str:
        """Unit of the number, where its name says one."""
        return "bytes" if self.name.endswith("_bytes") else ""


class CounterRow(msgspec.Struct, frozen=True, kw_only=True):
    """How much of something a process had in the step, e.g. how long a queue was.

    Attributes:
        lane: The process that counted, e.g. ``rollouter_rank0``.
        name: What it counted.
        samples: How often it did so in the step.
        last: The last count.
        mean: Mean over time, from the first count on; each holds until the next.
        max: The largest.
    """

    lane: str
    name: str
    samples: int
    last: float
    mean: float
    max: float


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the capture for one worker.

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


class AnchorRow(msgspec.Struct, frozen=True, kw_only=True):
    """The drift of a worker's clock, from its first reading in the capture to its last.

    Attributes:
        worker: Name of the worker.
        host: Its host.
        begin_us: When the clock was first read, after the begin of the step.
        end_us: When it was last read, after the begin of the step.
        set_us: How far unix time moved ahead of monotonic time in between; more than a few microseconds
            where the clock was set, or slewed by NTP.
    """

    worker: str
    host: str
    begin_us: float
    end_us: float
    set_us: float

    @property
    def watched_us(self) -> float:
        """Time from the first reading to the last."""
        return self.end_us - self.begin_us


class SuspectRow(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of a suspect, against its peers'.

    Attributes:
        suspect: Lane or worker that may be the cause.
        peers: What it is compared with; of several, the median.
        kind: ``stage``: time in it without waiting for other ranks. ``time``: what the lane did in the stage
            that was slow, or else in the step; these add up to it. ``kernel``: self time. ``memory``: a peak.
        name: Name of the stage, the part of the time, the kernel or the measure.
        unit: Unit of the numbers.
        value: The suspect's.
        peer_value: The peers'; ``None`` where they have none.
    """

    suspect: str
    peers: str
    kind: Literal["stage", "time", "kernel", "memory"]
    name: str
    unit: Literal["s", "bytes"] = "s"
    value: float
    peer_value: float | None

    @property
    def difference(self) -> float | None:
        """By how much the suspect has more."""
        return None if self.peer_value is None else self.value - self.peer_value


class CauseRow(PartRow, frozen=True, kw_only=True):
    """The waiting of all trajectories for one cause.

    Attributes:
        cause: ``decode``, ``tool:search``, ``loop lag``, ...; ``docs/agents.md`` defines each.
        seconds: Trajectory-seconds; those of all causes add up to the time of all trajectories.
        share: Share of these.
        validate: They are of validation rollouts.
        trajectories: Number of trajectories that have any of it.
    """

    validate: bool
    trajectories: int


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one name: a tool, an environment, scoring, generating, waiting.

    Attributes:
        role: Role of the processes.
        name: Name of the spans.
        calls: Number of spans.
        failed: How many of them an exception left.
        seconds: Their durations, added up.
        p50_s: Median of their durations, and so on.
        p90_s: 90th percentile.
        p99_s: 99th percentile.
        longest_s: The longest.
        mean_running: How many ran at once, on average over the time in which any did.
        most_running: How many ran at once at the most.
    """

    role: str
    name: str
    calls: int
    failed: int
    seconds: float
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float
    mean_running: float
    most_running: int


class BlockRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task that blocked the event loop of a process.

    Attributes:
        lane: Lane of the process.
        what: The span that ran, or else the function; ``unknown`` where no sample saw any.
        function: The function that ran for longest.
        blocks: How often.
        seconds: For how long, all together.
        longest_s: The longest time.
        trajectories: Number of trajectories that stood still meanwhile.
        stood_still_s: For how long, added up.
    """

    lane: str
    what: str
    function: str
    blocks: int
    seconds: float
    longest_s: float
    trajectories: int
    stood_still_s: float


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one prompt.

    Attributes:
        group: The group.
        members: Number of its trajectories.
        first_s: When the first of them was done, after the begin of the step.
        last_s: When the last was.
        waited_s: Time between the end of each and the end of the last, added up.
        last_cause: What the last one waited for most, since the first was done.
        whole: All of them ended in the step.
    """

    group: str
    members: int
    first_s: float
    last_s: float
    waited_s: float
    last_cause: str
    whole: bool

    @property
    def last_of(self) -> str:
        """The cause that its last one waited for, and whether that one is done."""
        return self.last_cause if self.whole else f"{self.last_cause} (not done)"


class StatusRow(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of one status, and their cost.

    Attributes:
        validate: They are of validation rollouts.
        status: ``done``, ``failed``, ``filtered``, ...
        trajectories: How many.
        seconds: Their time, added up.
        share: Share of the time of all trajectories, validation apart.
        response_tokens: Tokens that they generated, as far as the loop or the engine said.
        turns: Their turns, as far as the loop said.
        tool_calls: Their spans of tools.
    """

    validate: bool
    status: str
    trajectories: int
    seconds: float
    share: float
    response_tokens: int
    turns: int
    tool_calls: int


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories that failed, or were cancelled, with one error in one span.

    Attributes:
        validate: They are of validation rollouts.
        status: ``failed`` or ``cancelled``; empty for all others as one.
        error: The error, in one line of at most 120 characters.
        trajectories: How many.
        example: Group and sample of one of them: ``group/sample``.
        span: Name of the last span of it that failed, else that was open at its end; empty without one.
    """

    validate: bool
    status: str
    error: str
    trajectories: int
    example: str
    span: str


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Training trajectories and requests that were made with one version of the weights.

    Attributes:
        version: The version.
        behind: How many versions the step's is ahead of it, negative where it is newer than the step's;
            ``None`` if that is not known.
        oldest: Trajectories of which it is the oldest version.
        newest: Trajectories of which it is the newest version.
        segments: Requests of trajectories that it served.
        segment_tokens: Tokens that these generated.
    """

    version: int
    behind: int | None
    oldest: int
    newest: int
    segments: int
    segment_tokens: int

    @property
    def distance(self) -> str:
        """How far it is behind the step's version, or by how much newer: engines may get the next one."""
        if self.behind is None:
            return ""
        return f"{self.behind:,}" if self.behind >= 0 else f"{-self.behind:,} newer"


class LastTrajectories(msgspec.Struct, frozen=True, kw_only=True):
    """The tail of the rollout: its last training trajectories, from when all others were done.

    Attributes:
        trajectories: How many they are.
        of: Number of all training trajectories.
        begin_s: When the others were done, after the begin of the step.
        seconds: From then to the end of the last one.
        share: Share of the time from the first trajectory's begin to the last one's end.
        parts: What they waited for meanwhile; an instant is divided equally among them.
    """

    trajectories: int
    of: int
    begin_s: float
    seconds: float
    share: float
    parts: list[PartRow]


class Polling(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer that looks for ended trajectories from time to time.

    Attributes:
        pauses: How often it slept in the rollout until it looked again.
        interval_s: How long it slept, the median.
        seconds: How long it slept, in all.
        late_s: How much of that was after the last trajectory of its batch had ended, or less than that:
            trajectories beyond the batch end, too, where a trainer is asynchronous.
        late_share: The same as a share of the step.
    """

    pauses: int
    interval_s: float
    seconds: float
    late_s: float
    late_share: float


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The section on the rollout: the waiting of trajectories in a step.

    Attributes:
        trajectories: Number of training trajectories.
        validation: Number of trajectories of validation rollouts.
        cut: Trajectories of which only a part was in the step, or was recorded.
        seconds: Time of the training trajectories, added up.
        p50_s: Median of their times, of those that were recorded whole; ``None`` without one.
        p99_s: 99th percentile of these.
        begin_s: When the first one began, after the begin of the step.
        wall_s: From then to the end of the last one.
        causes: What trajectories waited for.
        uncertain_lag_s: Part of the training trajectories' ``loop lag`` that is an upper bound.
        time: What went on in the rollout, on the wall clock.
        explained: Share of that which has a name.
        last: The tail.
        calls: Tools and other spans, those that took most first.
        blocks: What blocked event loops.
        groups: Groups of training trajectories, those whose members waited most first.
        groups_seen: Number of groups of several trajectories.
        group_waited_s: Time for which members of these waited for their group's last one, added up.
        group_spread_p50_s: Median of the time from a group's first end to its last.
        group_spread_max_s: The longest of these.
        statuses: What became of trajectories.
        failures: Why they failed, most frequent first, validation last.
        versions: Versions of the weights that made the training trajectories, newest first.
        versioned: Training trajectories of which the versions are known.
        partial: Those of them that several versions made.
        polling: What it cost that the trainer polls, if it does.
    """

    trajectories: int
    validation: int
    cut: int
    seconds: float
    p50_s: float | None
    p99_s: float | None
    begin_s: float
    wall_s: float
    causes: list[CauseRow]
    uncertain_lag_s: float
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

    @property
    def of_trajectories(self) -> str:
        """Its trajectories' time on the wall clock, as a phrase."""
        return f"the {duration(self.wall_s)} from the first trajectory's begin to the last one's end"
