"""The section "Rollout" as data: what trajectories waited for, and what became of them.

All times are seconds; shares are fractions of 1.
"""

from __future__ import annotations

import msgspec

from verl_profiling.units import duration

__all__ = [
    "BlockRow",
    "CallRow",
    "CauseRow",
    "FailureRow",
    "FateRow",
    "GroupRow",
    "LastTrajectories",
    "PartRow",
    "Polling",
    "Rollout",
    "VersionRow",
]


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """What trajectories waited for, all together.

    Attributes:
        validate: They are of validation rollouts.
        cause: ``decode``, ``tool:search``, ``loop lag``, ...; ``docs/agents.md`` defines each.
        seconds: Trajectory-seconds; those of all causes add up to the time of all trajectories.
        share: Share of these.
        trajectories: Number of trajectories that have any of it.
    """

    validate: bool
    cause: str
    seconds: float
    share: float
    trajectories: int


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """What went on in a stretch of the rollout.

    Attributes:
        cause: As in :class:`CauseRow`; of time in which no trajectory ran, what its processes did, or
            ``controller: <stage>``, or ``requests of no trajectory``.
        seconds: Seconds of the wall clock.
        share: Share of the stretch.
    """

    cause: str
    seconds: float
    share: float


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
    """What blocked the event loop of a process.

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
        """What its last one waited for, and whether that one is done."""
        return self.last_cause if self.whole else f"{self.last_cause} (not done)"


class FateRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of trajectories, and what they cost.

    Attributes:
        validate: They are of validation rollouts.
        fate: ``done``, ``failed``, ``filtered``, ...
        trajectories: How many.
        seconds: Their time, added up.
        share: Share of the time of all trajectories, validation apart.
        response_tokens: Tokens that they generated, as far as the loop or the engine said.
        turns: Their turns, as far as the loop said.
        tool_calls: Their spans of tools.
    """

    validate: bool
    fate: str
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
        fate: ``failed`` or ``cancelled``; empty for all others as one.
        error: The error, in one line of at most 120 characters.
        trajectories: How many.
        example: Group and sample of one of them: ``group/sample``.
        span: Name of the last span of it that failed, else that was open at its end; empty without one.
    """

    validate: bool
    fate: str
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
    """What trajectories waited for in a step.

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
        fates: What became of trajectories.
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
    fates: list[FateRow]
    failures: list[FailureRow]
    versions: list[VersionRow]
    versioned: int
    partial: int
    polling: Polling | None = None

    @property
    def of_trajectories(self) -> str:
        """Its trajectories' time on the wall clock, as a phrase."""
        return f"the {duration(self.wall_s)} from the first trajectory's begin to the last one's end"
