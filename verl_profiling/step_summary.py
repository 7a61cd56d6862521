"""The summary of a step: seconds per process and outermost stage."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

import msgspec

from verl_profiling.manifest import MAX_NS, Count, Ns

Period = tuple[Ns, Ns]
"""Begin and end."""

Collectives = dict[str, dict[int, int]]
"""When a process entered collectives (unix ns), by process group and sequence number."""

Duration = Annotated[int, msgspec.Meta(ge=0, le=MAX_NS)]
"""Nanoseconds; the bounds hold for what is read from a file."""

OTHERS = "(others)"
"""Name of the sum of all stages or spans beyond the maximum number of names."""

ROLLOUT, TRAINING, NO_REQUESTS = "rollout", "training", "no requests"
"""Causes of idle time: generation, for training processes; the other two, for the rollout."""

MOST_SPANS = 64
"""Maximum number of span names in a summary."""


class StageUse(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One outermost stage of one process in one step.

    Attributes:
        name: Its name.
        duration_ns: How long the process was in it, all of its runs together.
        runs: How often it ran.
        begin_ns: When its first run began, on the clock of the loop's process.
        periods: Begin and end of its runs where there were several, in order. Runs that touch are one; the
            last period has all that did not get one of their own. Empty: not known.
        late_ns: How late the process was to the collectives in it, added up; ``None`` if unknown.
    """

    name: str
    duration_ns: int
    runs: int = 1
    begin_ns: Ns = 0
    periods: tuple[Period, ...] = ()
    late_ns: int | None = None


class SpanTotal(msgspec.Struct, frozen=True, omit_defaults=True):
    """All spans of one name that ended in one step.

    Attributes:
        name: Their name; ``trajectory`` for the trajectories themselves.
        runs: How many they were.
        duration_ns: How long they took, added up. They run side by side and inside of each other, so this
            may be more than the step took.
        failed: How many of them an exception ended.
    """

    name: str
    runs: Count
    duration_ns: Duration
    failed: Count = 0

    @property
    def seconds(self) -> float:
        """How long they took, added up (s)."""
        return self.duration_ns / 1e9

    def __add__(self, other: SpanTotal) -> SpanTotal:
        """Return the sum of both, under the name of this one."""
        runs, duration_ns = self.runs + other.runs, self.duration_ns + other.duration_ns
        return SpanTotal(self.name, runs, duration_ns, self.failed + other.failed)


class RankUse(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """The seconds of one process in one step.

    Attributes:
        lane: Name of the process, as in manifests: ``controller``, ``actor_rank0``, ``rollout1_rank0``.
        role: Its role.
        rank: Its rank in that role.
        replica: Index of the replica, if it serves a rollout engine.
        stages: Its outermost stages, in order of their first begin.
        peak_bytes: The most memory that it has had by the step's end, of its device, or of the host where it
            has none: since it began, or since the program reset torch's mark.
        held_bytes: What it had of that memory at the end of the last stage of the step after which it was
            read.
        spans: What its trajectories and their spans add up to, if it runs trajectories.
        collectives: The collectives that it entered, until those of all ranks are compared.
    """

    lane: str
    role: str
    rank: int = 0
    replica: int | None = None
    stages: list[StageUse] = []
    peak_bytes: int | None = None
    held_bytes: int | None = None
    spans: list[SpanTotal] = []
    collectives: Collectives = {}


class ExposedStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much longer a step took because of one stage of its loop.

    Attributes:
        name: Name of the stage; empty for the time that lies in none.
        exposed_ns: By how much it moved the step's end. Exposed times add up to the step.
        role: Role whose processes worked in it; that of the loop where no others did.
        leader: Lane that was in it longest, or furthest along after it; empty where none is clear.
        lead_ns: By how much the leader was in it longer than the median of its peers.
        imbalance: Longest duration over the mean of all processes of the role; 1.0 for one process.
    """

    name: str
    exposed_ns: Duration
    role: str = "controller"
    leader: str = ""
    lead_ns: Duration = 0
    imbalance: float = 1.0


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of the processes of a role.

    Attributes:
        role: The role.
        processes: How many of them were read.
        lane: The process whose peak was highest.
        peak_bytes: That peak.
        held_bytes: The most that any of them held at the end of the step.
    """

    role: str
    processes: Count = 1
    lane: str = ""
    peak_bytes: Count | None = None
    held_bytes: Count | None = None


class Idle(msgspec.Struct, frozen=True):
    """Time in which processes had nothing open, as a mean over them.

    Attributes:
        share: Its share of the step.
        cause: The stage, of the loop or of other roles, in which most of it lies; empty for none. One of the
            rollout is also :data:`TRAINING` or :data:`NO_REQUESTS`.
        cause_share: The part of ``share`` that lies in it.
    """

    share: float
    cause: str = ""
    cause_share: float = 0.0


class StepSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step and where its time went; in the watch's log without the processes.

    Attributes:
        step: Number of the step.
        begin_ns: When it began, on the clock of the loop's process.
        end_ns: When it ended; 0 until then.
        policy_version: Version of the weights, if the loop reports one.
        loop: The processes that run the loop: the controller, or every rank of an SPMD loop.
        workers: The processes that were called from it, as far as they were read.
        earlier: The workers of the step before, whose runs may have lasted into this one.
        exposed: Where the step's time went, in order of the stages.
        memory: Memory by role.
        spans: What the trajectories and their spans add up to, the longest first.
        beside: Names of stages of the loop that run beside its steps, as generation in an asynchronous loop.
        captured: Name of its step folder, if it was captured.
        trainer_idle: Idle time of the training processes; ``None`` if unknown.
        rollout_idle: Idle time of the rollout's replicas, or of the stage ``rollout``; likewise.
        samples: How many trajectories ended in the step; without trajectories, requests.
    """

    step: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
    begin_ns: Ns
    end_ns: Ns = 0
    policy_version: int | None = None
    loop: list[RankUse] = []
    workers: list[RankUse] = []
    earlier: list[RankUse] = []
    exposed: list[ExposedStage] = []
    memory: list[RoleMemory] = []
    spans: list[SpanTotal] = []
    beside: tuple[str, ...] = ()
    captured: str = ""
    trainer_idle: Idle | None = None
    rollout_idle: Idle | None = None
    samples: Count = 0

    @property
    def duration_ns(self) -> int:
        """How long the step took; 0 if the clock was set back in it."""
        return max(0, self.end_ns - self.begin_ns)

    @property
    def seconds(self) -> float:
        """How long the step took (s)."""
        return self.duration_ns / 1e9

    @property
    def samples_per_s(self) -> float:
        """How many samples were made per second of the step."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed time by stage (s); the time in no stage has an empty name."""
        found: dict[str, float] = {}
        for stage in self.exposed:
            found[stage.name] = found.get(stage.name, 0.0) + stage.exposed_ns / 1e9
        return found

    def add_up(self) -> None:
        """Set ``memory`` and ``spans`` to the sums over the processes."""
        roles: dict[str, list[RankUse]] = {}
        for process in (*self.loop, *self.workers):
            roles.setdefault(process.role, []).append(process)
        self.memory = [_memory(role, processes) for role, processes in roles.items()]
        self.spans = _spans([*self.loop, *self.workers])


def _memory(role: str, processes: Sequence[RankUse]) -> RoleMemory:
    most = max(processes, key=lambda process: process.peak_bytes or 0)
    held = [process.held_bytes for process in processes if process.held_bytes is not None]
    return RoleMemory(
        role=role,
        processes=len(processes),
        lane=most.lane if most.peak_bytes is not None else "",
        peak_bytes=most.peak_bytes,
        held_bytes=max(held, default=None),
    )


def _spans(processes: Sequence[RankUse]) -> list[SpanTotal]:
    """Return the spans of all processes, the longest first; at most :data:`MOST_SPANS`.

    Where two roles have spans of one name, those of the second are named after it, too: an agent loop's
    ``reward`` is the wait for the ``reward (reward)`` of the process that scores.
    """
    found: dict[str, SpanTotal] = {}
    role_of: dict[str, str] = {}
    for process in processes:
        for total in process.spans:
            name = total.name
            if name != OTHERS and role_of.setdefault(name, process.role) != process.role:
                name = f"{name} ({process.role})"
                total = msgspec.structs.replace(total, name=name)
            found[name] = found[name] + total if name in found else total
    longest = sorted(found.values(), key=attrgetter("duration_ns"), reverse=True)
    if len(longest) <= MOST_SPANS:
        return longest
    kept = [total for total in longest[: MOST_SPANS - 1] if total.name != OTHERS]
    rest = sum((total for total in longest if total not in kept), SpanTotal(OTHERS, 0, 0))
    return sorted([*kept, rest], key=attrgetter("duration_ns"), reverse=True)
