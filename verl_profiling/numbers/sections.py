"""Parts of the report that are no tables.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.numbers import columns
from verl_profiling.units import duration

OTHER_RANKS = "waiting_for_other_ranks"
"""The cause of the lost time in which a collective waits for other ranks;
the device is busy then.
"""


class Asked(Trigger, frozen=True, kw_only=True):
    """The request of a capture: the fields of a ``Trigger``, and the rank that was last in
    collectives.

    Attributes:
        when: Begin of the capture as a date and time, on the clock of the loop's host.
        last: Rank for which the others mostly waited in the collectives of the trigger's stage, or
            ``""``.
        waited_s: Total time for which the others waited for ``last`` (s).
        only: Stages of a capture that is limited to a stage, those of the loop and of its workers.
    """

    when: str = ""
    last: str = ""
    waited_s: float = 0.0
    only: list[str] = []


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
    """The time in which the rollout waits for its last replicas.

    Attributes:
        replicas: Number of observed replicas.
        median_finish_us: Median end of a replica, relative to the begin of the rollout.
        last_finish_us: End of the last replica, relative to the begin of the rollout.
        ratio: ``last_finish_us / median_finish_us``.
        tail_share: Share of the step between the median finish and the last.
        requests: Number of requests, if the engine reported them.
        latency_s: Latency of the requests, from sending to the complete response.
        response_tokens: Lengths of the responses.
        last_replica: Index of the replica that ended last.
        last_tokens: Length of the response that ended last; 0 if unknown.
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
    last_tokens: int = 0


class LastTrajectories(msgspec.Struct, frozen=True, kw_only=True):
    """The tail of the rollout, in which only the last training trajectories ran.

    Attributes:
        trajectories: Number of trajectories in the tail.
        of: Number of all training trajectories.
        seconds: Duration of the tail, up to the end of the last trajectory.
        share: Share of the time from the first trajectory's begin to the last one's end.
        parts: Duration of the tail by cause; an instant is divided equally among the running
            trajectories.
    """

    trajectories: int
    of: int
    seconds: float
    share: float
    parts: list[columns.PartRow]


class Polling(msgspec.Struct, frozen=True, kw_only=True):
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


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
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
    causes: list[columns.CauseRow]
    time: list[columns.PartRow]
    explained: float
    last: LastTrajectories | None
    calls: list[columns.CallRow]
    blocks: list[columns.BlockRow]
    groups: list[columns.GroupRow]
    groups_seen: int
    group_waited_s: float
    group_spread_p50_s: float
    group_spread_max_s: float
    statuses: list[columns.StatusRow]
    failures: list[columns.FailureRow]
    versions: list[columns.VersionRow]
    versioned: int
    partial: int
    polling: Polling | None = None

    @property
    def of_trajectories(self) -> str:
        """``wall_s`` as text, with the begin and end that it counts from."""
        return (
            f"the {duration(self.wall_s)} from the first trajectory's begin to the last one's end"
        )


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per time.

    Attributes:
        tokens: Tokens of the step.
        source: Source of the number of tokens.
        tokens_per_s: Tokens per second of the step.
        tokens_per_s_per_device: The same, divided by the number of devices.
    """

    tokens: float
    source: str
    tokens_per_s: float
    tokens_per_s_per_device: float


class GanttSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a stage on one worker.

    Attributes:
        lane: Name of the worker, or ``controller``.
        name: The stage.
        begin_us: Begin, relative to the begin of the step.
        end_us: End, relative to the begin of the step.
        depth: 0 for an outermost stage.
        row: Row inside the lane, from 0. Concurrent stages are in different rows; a nested stage is
            in the row of its parent.
    """

    lane: str
    name: str
    begin_us: float
    end_us: float
    depth: int
    row: int = 0
