"""The report as data: what ``--json`` prints and every face shows.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

import msgspec

__all__ = ["REPORT_SCHEMA_VERSION", "Clock", "Coverage", "Report", "StageRow", "WorkerRow"]

REPORT_SCHEMA_VERSION = 1


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the step, as the controller saw it (all its runs together).

    Attributes:
        name: The stage; ``(outside stages)`` for the rest of the step.
        runs: How often it ran.
        begin_us: Begin of its first run, after the begin of the step.
        duration_us: Time in it.
        share: Of the step.
        depth: 0 for an outermost stage; only those add up to the step.
    """

    name: str
    runs: int
    begin_us: float
    duration_us: float
    share: float
    depth: int = 0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane (a training rank, or a rank of a rollout engine) did with its time.

    ``docs/report.md`` defines each number; all but ``span_us`` are inside the span.

    Attributes:
        name: Name of the lane.
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        device: False for a CPU trace, where operators stand in for kernels.
        span_us: Time that it was observed.
        busy_us: Time in which anything ran.
        idle_us: ``span_us - busy_us``.
        compute_us: Time in which computing kernels ran.
        communication_us: Time in which communication kernels ran.
        exposed_communication_us: Communication with no computation at the same time.
        overlap_us: Computation and communication at the same time.
        memcpy_us: Time in which memory was copied or set.
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


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How well the clock of a host is known.

    Attributes:
        host: Host name.
        offset_us: Ahead of the controller by this much; corrected in all numbers.
        error_us: Bound of what may remain.
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
        missing: What is not there or not whole, as sentences.
    """

    expected: int
    read: int
    events: int
    missing: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one step.

    Attributes:
        schema_version: Version of this schema.
        directory: Folder of the step.
        step: Number of the step, if known.
        policy_version: Version of the weights, if the loop reports one.
        complete: False when the step was left early.
        span_us: Duration of the step, from ``on_step_begin`` to ``on_step_end``; without a
            manifest, from the first to the last event.
        stages: Step anatomy, in order of time.
        workers: One row per lane.
        clocks: Hosts whose clock is not the controller's.
        coverage: How much of what was expected is in here.
        metrics: What the loop reported for the step.
        notes: What the capture noted.
    """

    schema_version: int = REPORT_SCHEMA_VERSION
    directory: str
    step: int | None
    policy_version: int | None
    complete: bool
    span_us: float
    stages: list[StageRow]
    workers: list[WorkerRow]
    clocks: list[Clock]
    coverage: Coverage
    metrics: dict[str, float]
    notes: list[str]
