"""The summary of a step that the watch makes: time by process and outermost stage, memory, spans
and findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from struct import iter_unpack
from typing import Annotated, Literal, NamedTuple

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.files.host_use import KINDS, MachineUse, ProcessUse
from verl_profiling.manifest import (
    GC,
    MAX_NS,
    WEIGHT_SYNC,
    Count,
    Lessons,
    Ns,
    Work,
)
from verl_profiling.units import duration

Period = tuple[Ns, Ns]
"""Begin and end of a period (ns)."""

Collectives = dict[str, dict[int, int]]
"""Times (unix ns) at which a process entered collectives, by process group and sequence number."""

Duration = Annotated[int, msgspec.Meta(ge=0, le=MAX_NS)]
"""Nanoseconds, within bounds that are checked when a file is read."""

OTHERS = "(others)"
"""Name under which all stages or spans beyond the maximum number of names are summed."""

ROLLOUT, TRAINING, NO_REQUESTS = "rollout", "training", "nothing to generate"
"""Causes of idle time. Training processes wait for the rollout; rollout replicas wait for the
training, or have nothing to generate.
"""

MOST_SPANS = 64
"""Maximum number of span names in a summary."""


class SpanTotal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All spans of one name that ended in one step.

    Attributes:
        name: Name of the spans; ``trajectory`` for whole trajectories.
        runs: Number of spans.
        duration_ns: Total duration of the spans. Spans overlap and nest, so the total may exceed
            the duration of the step.
        failed: Number of spans that raised.
        tokens: Sum of the facts ``prompt_tokens`` and ``response_tokens`` of the spans.
    """

    name: str
    runs: Count
    duration_ns: Duration
    failed: Count = 0
    tokens: Count = 0

    @property
    def seconds(self) -> float:
        """Total duration of the spans (s)."""
        return self.duration_ns / 1e9

    def __add__(self, other: SpanTotal) -> SpanTotal:
        """Return the sum of two totals, under the name of the first."""
        runs, duration_ns = self.runs + other.runs, self.duration_ns + other.duration_ns
        failed, tokens = self.failed + other.failed, self.tokens + other.tokens
        return SpanTotal(self.name, runs, duration_ns, failed, tokens)


class GroupSum(msgspec.Struct, gc=False, array_like=True):
    """The trajectories of a group and a task that ended in one process.

    Attributes:
        group: Id of the group; empty for trajectories without one.
        task: Their task; empty if unknown.
        members: Number of the trajectories that are trained on.
        rewards: Their rewards, as far as known.
        times_ns: Duration of all trajectories by the reason why they taught nothing. It is empty
            for others, and for those of a group with equal rewards.
    """

    group: str
    task: str
    members: Count
    rewards: list[float]
    times_ns: dict[str, Duration]


BEGIN, END, INSIDE = 0, 1, 2
"""Whether a device was read at the begin or the end of a stage, or meanwhile."""


class DeviceReading(NamedTuple):
    """A row of :class:`DeviceReadings`; ``parts`` are of the order of ``device_use.PARTS``, and
    zeros if unknown.
    """

    at_ns: int
    stage: str
    edge: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    parts: tuple[int, ...]


class DeviceReadings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The readings of a process's device in a step.

    Attributes:
        device: Name of the device, the same in each process of its machine.
        pid: The process.
        total_bytes: Memory of the device; 0 if this, and what is free, is unknown.
        stages: Names of stages, one per line.
        rows: The readings as rows of 64-bit numbers, of which the second one is a line of
            ``stages``, and the last ones are the parts.
    """

    device: str
    pid: int
    total_bytes: Count
    stages: str
    rows: bytes

    def each(self) -> Iterator[DeviceReading]:
        """Yield the readings in order."""
        names = self.stages.split("\n")
        for at_ns, number, edge, free, allocated, reserved, peak, *parts in iter_unpack(
            "10q", self.rows
        ):
            yield DeviceReading(
                at_ns, names[number], edge, free, allocated, reserved, peak, tuple(parts)
            )


class RankUse(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """How one process spent one step: its stages, memory, spans and counters.

    Attributes:
        lane: Name of the process, as in manifests: ``controller``, ``actor_rank0``,
            ``rollout1_rank0``.
        role: Role of the process.
        rank: Rank of the process in the role.
        replica: Index of the replica, for a process that serves a rollout engine.
        stages: Names of the process's outermost stages in order of their first begin, one per line.
        runs: The executions of the stages, as rows of four 64-bit numbers: line of the stage in
            ``stages``, begin, end, and time in the stage (ns), on the clock of the loop's process.
            Executions without a gap between them are one row.
        peak_bytes: Peak memory at the end of the step, of the device or else of the host, since the
            begin of the process or a reset of torch's peak statistics.
        held_bytes: Memory of the same kind at the last reading in the step, after a stage.
        spans: Totals of the process's trajectories and spans, if there are any.
        collectives: The collectives that the process entered, if requested; removed once the
            processes are compared.
        counts: The last values of the process's counters, e.g. lengths of queues. Of the steps that
            are read from the process at once, only the last has them.
        late_ns: By stage, how long the other processes waited in collectives for this one to enter
            last; ``None`` if unknown.
        work: Sizes of the batches that the process got in the step, by outermost stage; ``None`` if
            unknown.
        host_use: The last reading of the process and of its machine; as ``counts``, of the last
            step only.
        groups: The groups whose last trajectory of the process ended in the step.
        device: The readings of its device; ``None`` if it has used none.
    """

    lane: str
    role: str
    rank: int = 0
    replica: int | None = None
    stages: str = ""
    runs: bytes = b""
    peak_bytes: int | None = None
    held_bytes: int | None = None
    spans: tuple[SpanTotal, ...] = ()
    collectives: Collectives | None = None
    counts: dict[str, float] | None = None
    late_ns: dict[str, int] | None = None
    work: dict[str, Work] | None = None
    host_use: tuple[ProcessUse, MachineUse] | None = None
    groups: tuple[GroupSum, ...] = ()
    device: DeviceReadings | None = None

    def each_run(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield the rows of ``runs``: name of the stage, begin, end, and time in it (ns)."""
        names = self.stages.split("\n")
        for number, begin_ns, end_ns, took_ns in iter_unpack("4q", self.runs):
            yield names[number], begin_ns, end_ns, took_ns

    @property
    def has_spans(self) -> bool:
        """Whether the process had trajectories, spans or requests in the step.

        Pauses of the garbage collector and parts of weight updates do not count.
        """
        return any(
            total.name != GC and not total.name.startswith(f"{WEIGHT_SYNC}/")
            for total in self.spans
        )


class ExposedStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exposed time of a stage: the part of the step's duration that the stage caused.

    Attributes:
        name: Name of the stage; empty for the time in no stage.
        exposed_ns: Exposed time of the stage. All exposed times add up to the step.
        role: Role of the processes that worked in the stage; by default the loop's role.
        leader: Lane of the slowest process in the stage; empty if unclear.
        lead_ns: Time of the leader in the stage minus the median of its peers.
        imbalance: Longest duration over the mean of all processes of the role; 1.0 for one process.
    """

    name: str
    exposed_ns: Duration
    role: str = "controller"
    leader: str = ""
    lead_ns: Duration = 0
    imbalance: float = 1.0

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers of the stage for trackers, by name."""
        numbers = {"exposed_s": self.exposed_ns / 1e9}
        if self.name:
            numbers["imbalance"] = self.imbalance
        return numbers


class RoleMemory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Memory of the processes of a role.

    Attributes:
        role: The role.
        processes: Number of processes that were read.
        lane: Name of the process with the highest peak.
        peak_bytes: Highest peak of a process.
        held_bytes: Highest memory of a process at the end of the step.
        kinds: Highest memory of a process on the host (bytes), by kind, e.g. ``shared``; of steps
            with a reading.
        no_cpu: Highest share of time in which a process was ready to run, and got no CPU; as
            ``kinds``.
    """

    role: str
    processes: Count = 1
    lane: str = ""
    peak_bytes: Count | None = None
    held_bytes: Count | None = None
    kinds: dict[str, Count] = {}
    no_cpu: float | None = None


class DeviceHolder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who holds memory of a device.

    Attributes:
        lane: The process; empty for all that no watched process's allocator holds: an engine, a
            neighbour, and what is not torch's, such as contexts and NCCL.
        held_bytes: What it holds.
        cached_bytes: The part of it that torch's allocator has, and no tensor.
        parts: Parts of what its tensors have, e.g. ``optimizer``, as far as known.
    """

    lane: str
    held_bytes: Count
    cached_bytes: Count = 0
    parts: dict[str, Count] = {}


class Overlap(msgspec.Struct, frozen=True):
    """Memory that two holders had at once, above the least that each one had in the step.

    Attributes:
        holder: The first holder, when it was most.
        other: Lane of the second one.
        size_bytes: How much both had.
        least_ns: Time between the first and the last reading at which both had half of it.
        most_ns: Time between the readings around these, at which they had less.
    """

    holder: DeviceHolder
    other: str
    size_bytes: Count
    least_ns: Duration
    most_ns: Duration


class HandOff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The moment of a step at which the least memory of a device was free.

    Attributes:
        lane: The process that read it.
        before: The last stage of the process; empty for none.
        after: Its next stage; the same one if it was in a stage.
        free_bytes: Free memory of the device.
        total_bytes: Memory of the device.
        holders: Who held it, the largest first.
        unread: Processes on the device that were not read then.
        overlap: What was held twice on the device in the step.
    """

    lane: str
    before: str = ""
    after: str = ""
    free_bytes: Count
    total_bytes: Count
    holders: list[DeviceHolder] = []
    unread: list[str] = []
    overlap: Overlap | None = None


class StageDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the device that the processes of a role had allocated in a stage, of the process
    with most.

    Attributes:
        role: The role.
        stage: The stage.
        begin_bytes: At its first begin; ``None`` if that was not read.
        end_bytes: At its last end; ``None`` if that was not read.
        peak_bytes: The peak, if the stage was the first to reach it; else the highest reading.
    """

    role: str
    stage: str
    begin_bytes: Count | None
    end_bytes: Count | None
    peak_bytes: Count


class Idle(msgspec.Struct, frozen=True):
    """Idle time of processes, i.e. time without an open stage, as a mean over the processes.

    Attributes:
        share: Idle time as a share of the step.
        cause: The stage of the loop or of other roles that ran for most of the idle time; empty if
            no stage did. For the rollout, also :data:`TRAINING` or :data:`NO_REQUESTS`.
        cause_share: The part of ``share`` in that stage.
    """

    share: float
    cause: str = ""
    cause_share: float = 0.0


class Saving(msgspec.Struct, frozen=True):
    """A change of a stage, and by how much it would shorten the step.

    Attributes:
        stage: The stage.
        change: ``half``: the stage takes half of its time; ``even``: each of its workers takes the
            mean time of all.
        saves_ns: Time by which the step would be shorter (ns).
    """

    stage: str
    change: Literal["half", "even"]
    saves_ns: Duration


class Hang(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step in which nothing progressed for too long.

    Attributes:
        stage: The stage that was open in the loop; empty: none.
        quiet_s: Seconds since something progressed.
        usual_s: Usual duration of the stage, or of a step; ``None``: unknown.
        lane: Name of the process for which the others wait.
        reason: Clause on this process, e.g. ``is in update_actor``.
        waiting: The other processes, each with the stage that it is in.
    """

    stage: str
    quiet_s: float
    usual_s: float | None = None
    lane: str = ""
    reason: str = ""
    waiting: list[str] = []


class StepSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The summary of a step; lines of the watch's log leave out the processes.

    Attributes:
        step: Number of the step.
        begin_ns: Begin of the step, on the clock of the loop's process.
        end_ns: End of the step; 0 before.
        policy_version: Version of the policy's weights, if the loop reports it.
        loop: The processes that run the loop: the controller, or every rank of an SPMD loop.
        workers: The other processes, e.g. of workers, as far as they were read.
        exposed: Exposed times, in order of the stages.
        memory: Memory by role.
        machines: Memory of the machines of the processes, of steps with a reading.
        devices: Memory of devices by role and stage.
        hand_off: When the least memory of a device was free; ``None`` without a reading.
        spans: Totals of trajectories and spans, the longest first.
        background: Names of stages that overlap the steps, such as generation in an asynchronous
            loop.
        captured: Name of the step folder of a captured step.
        trainer_idle: Idle time of the training processes; ``None`` if unknown.
        rollout_idle: Idle time of the rollout's replicas, or of the stage ``rollout``; ``None`` if
            unknown.
        helps: The change of one stage that would shorten the step most; ``None`` if unknown.
        samples: Number of trajectories that ended in the step, and were not cancelled; without
            trajectories, number of requests.
        tokens: Number of prompt and response tokens of these trajectories; 0 if unknown.
        taken: Number of samples on which the step trained, as the loop reports it; 0 if unknown.
        taken_tokens: Number of tokens of these samples; 0 if unknown.
        counts: The last values of counters, such as lengths of queues, each summed over the
            processes.
        work: Sum of the sizes of the batches of all processes, by stage, as far as known.
        lessons: Time (ns) by stage, task, and the reason why it taught nothing; an empty reason for
            time that taught. Of ``rollout``, trajectory-time; of other stages, that of processes.
        hang: The last hang in the step.
        noticed: The anomaly that the watch noticed in this step, or explained after this step.
        waits: Why a capture for a noticed anomaly waits, e.g. for the cooldown; else empty.
        is_start_up: Whether this is the time before the first step.
    """

    step: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
    begin_ns: Ns
    end_ns: Ns = 0
    policy_version: int | None = None
    loop: list[RankUse] = []
    workers: list[RankUse] = []
    exposed: list[ExposedStage] = []
    memory: list[RoleMemory] = []
    machines: list[MachineUse] = []
    devices: list[StageDevice] = []
    hand_off: HandOff | None = None
    spans: list[SpanTotal] = []
    background: tuple[str, ...] = ()
    captured: str = ""
    trainer_idle: Idle | None = None
    rollout_idle: Idle | None = None
    helps: Saving | None = None
    samples: Count = 0
    tokens: Count = 0
    taken: Count = 0
    taken_tokens: Count = 0
    counts: dict[str, float] = {}
    work: dict[str, Work] = {}
    lessons: dict[str, Lessons] = {}
    hang: Hang | None = None
    noticed: Trigger | None = None
    waits: str = ""
    is_start_up: bool = False

    @property
    def processes(self) -> list[RankUse]:
        """The processes of the loop, then those of workers."""
        return self.loop + self.workers

    @property
    def duration_ns(self) -> int:
        """Duration of the step; 0 if the clock was set back meanwhile."""
        return max(0, self.end_ns - self.begin_ns)

    @property
    def seconds(self) -> float:
        """Duration of the step (s)."""
        return self.duration_ns / 1e9

    @property
    def rates(self) -> dict[str, float]:
        """Samples and tokens per second that the rollout made and the training took in the step,
        as far as known.
        """
        made = {
            "samples_per_s": self.samples,
            "tokens_per_s": self.tokens,
            "samples_taken_per_s": self.taken,
            "tokens_taken_per_s": self.taken_tokens,
        }
        return {name: many / self.seconds for name, many in made.items() if many and self.seconds}

    @property
    def hangs(self) -> str:
        """A sentence on the hang of a step that has not ended; empty if there is none."""
        hang = self.hang
        if hang is None or self.end_ns:
            return ""
        usual = "" if hang.usual_s is None else f" (usually {duration(hang.usual_s)})"
        return (
            f"step {self.step} hangs: in {hang.stage or 'no stage'} nothing has progressed for "
            f"{duration(hang.quiet_s)}{usual}; it waits for {hang.lane}, which {hang.reason}; "
            f"the others: {', '.join(hang.waiting) or 'none'}"
        )

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed time by stage (s); the time in no stage has an empty name."""
        seconds: dict[str, float] = {}
        for stage in self.exposed:
            seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.exposed_ns / 1e9
        return seconds

    def add_up(self) -> None:
        """Set ``memory``, ``machines``, ``spans``, ``counts`` and ``work`` from the processes."""
        roles: dict[str, list[RankUse]] = {}
        readings: list[MachineUse] = []
        with_spans: list[RankUse] = []
        counts: dict[str, float] = {}
        works: dict[str, Work] = {}
        for use in self.processes:  # one loop, as a thousand processes take most of the time
            of_role = roles.setdefault(use.role, [])
            of_role.append(use)
            if use.spans:
                with_spans.append(use)
            if use.host_use is not None:
                readings.append(use.host_use[1])
            if use.counts:
                for name, value in use.counts.items():
                    counts[name] = counts.get(name, 0) + value
            if use.work:
                for name, work in use.work.items():
                    known = works.get(name)
                    works[name] = work if known is None else known + work
        self.memory = [_memory(role, uses) for role, uses in roles.items()]
        self.machines = [*{machine.host: machine for machine in readings}.values()]
        self.counts = counts
        self.work = works
        self.spans = _spans(with_spans)


def _memory(role: str, uses: Sequence[RankUse]) -> RoleMemory:
    """Return the memory of the processes of a role."""
    memory = RoleMemory(role=role, processes=len(uses))
    readings = []
    peak = held = 0
    for use in uses:
        if (use.peak_bytes or 0) > peak:
            peak, memory.lane = use.peak_bytes or 0, use.lane
        if (use.held_bytes or 0) > held:
            held = use.held_bytes or 0
        if use.host_use is not None:
            readings.append(use.host_use[0])
    memory.peak_bytes = peak or None
    memory.held_bytes = held or None
    if readings:
        for kind in KINDS:
            if size := max(map(attrgetter(kind), readings)):
                memory.kinds[kind] = size
        waits = [reading.no_cpu for reading in readings if reading.no_cpu is not None]
        memory.no_cpu = max(waits, default=None)
    return memory


def _spans(processes: Sequence[RankUse]) -> list[SpanTotal]:
    """Return the spans of processes, the longest first; at most :data:`MOST_SPANS`.

    If two roles have spans of one name, the name of the second role is appended. For example,
    ``reward`` of an agent loop is the wait for ``reward (reward)`` of a scoring process.
    """
    totals: dict[str, SpanTotal] = {}
    role_of: dict[str, str] = {}
    for process in processes:
        for total in process.spans:
            name = total.name
            if name not in (OTHERS, GC) and role_of.setdefault(name, process.role) != process.role:
                name = f"{name} ({process.role})"
                total = msgspec.structs.replace(total, name=name)
            totals[name] = totals[name] + total if name in totals else total
    longest = sorted(totals.values(), key=attrgetter("duration_ns"), reverse=True)
    if len(longest) <= MOST_SPANS:
        return longest
    kept = [total for total in longest[: MOST_SPANS - 1] if total.name != OTHERS]
    rest = sum((total for total in longest if total not in kept), SpanTotal(OTHERS, 0, 0))
    return sorted([*kept, rest], key=attrgetter("duration_ns"), reverse=True)
