"""The report as data, which ``--json`` prints and all other output formats show.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1. Rows
of tables are in :mod:`~verl_profiling.report.columns`.
"""

from __future__ import annotations

from html import escape
from importlib import import_module

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, HostClock
from verl_profiling.report import columns
from verl_profiling.step_summary import StepSummary
from verl_profiling.units import duration, step_list, three_digits

OTHER_RANKS = "waiting_for_other_ranks"
"""The cause of the lost time in which a collective waits for other ranks;
the device is busy then.
"""

REPORT_SCHEMA_VERSION = 1


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


class Finding(msgspec.Struct, frozen=True):
    """One finding: a sentence on lost time.

    Attributes:
        rule: Name of the rule; ``docs/report.md`` gives its threshold.
        text: A sentence with its number.
        advice: Suggested remedy, if there is one that no prediction has; else ``""``.
        seconds: Lane-seconds at stake, by which findings are sorted. Findings on missing data come
            first, findings on the capture's own cost last.
        lanes: The lane at fault, if known; else the lanes that lost time, sorted by lost time.
        share: Share of time to compare with the rule's threshold; 1 for rules without a threshold.
    """

    rule: str
    text: str
    advice: str = ""
    seconds: float = 0.0
    lanes: list[str] = []
    share: float = 1.0


class Coverage(msgspec.Struct, kw_only=True):
    """Completeness of the report.

    Attributes:
        expected: Artifacts that the capture should have written.
        read: Number of readable traces.
        events: Events in these traces.
        missing: Sentences on missing and damaged data.
        lanes: Lanes with missing or damaged data.
        unrecorded: Lanes with a device that was in use, but has no events in the traces.
        has_stacks: Whether Python frames were recorded.
    """

    expected: int = 0
    read: int = 0
    events: int = 0
    missing: list[str]
    lanes: list[str] = []
    unrecorded: list[str] = []
    has_stacks: bool = False


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
        stages: Stages, in order of time.
        workers: One row per lane.
        engines: One row per lane of a rollout engine.
        tail: Tail of the rollout.
        stragglers: One row per stage and role with several workers.
        collectives: The collectives with the longest waits.
        kernels: All kernels (operators, in a CPU trace), those with most self time first.
        lost: Lane-seconds that are idle or wait for other ranks, by cause, largest first,
            ``unexplained`` last; lanes that share a device count once.
        throughput: Tokens per time, if their number is known.
        gantt: Runs of stages.
        findings: At most five findings.
        clocks: Measured clock offsets of hosts other than the controller's, which all numbers
            correct.
        coverage: Completeness of the report.
        metrics: The loop's metrics of the step.
        notes: Notes of the capture, at most a hundred of them.
        measures: Numbers that workers recorded, such as the peak memory of their stages.
        costs: Cost of the capture for each worker.
        captured: Whether the step has a manifest. Plain traces have no manifest, and so no known
            stages and workers.
        name: Title of plain traces, shown after the step's number: the file or folder.
        running: Requests running over time, one row per replica.
        replicas: Totals of the requests of each replica, one row per replica.
        rollout: Time of trajectories by cause; ``None`` if no trajectories were recorded.
        outside: Time of the loop around the step: pauses of the capture, and stages such as
            ``validate``.
        devices: One row per device; lanes that share a device are one row.
        timeline_begin_ns: Begin of the step in its merged timeline (ns); ``None`` without a
            manifest.
        asked: The request for the capture; ``None`` if the schedule chose the step.
        suspects: The suspects of a requested capture, compared with their peers.
        counters: Counters of processes that record trajectories, such as the queue of verl's
            rollouter.
        watched: The watch's summary of the step, as in its log.
        what_would_help: Predicted effects of single changes, the largest first.
        critical_path: The chain of work that made the step as long as it was, in order of time; the
            durations add up to ``span_us``.
        unmatched_us: Communication without known calls of other ranks, and graphs that are one
            event each, summed over lanes (unknown waits).
        capture_steps: All steps of the continuous capture, if the step is one of several.
            ``measures``, ``costs``, events in ``coverage`` and some notes are of the whole capture.
    """

    schema_version: int = REPORT_SCHEMA_VERSION
    directory: str
    step: int | None
    policy_version: int | None = None
    complete: bool = True
    span_us: float
    stages: list[columns.StageRow]
    workers: list[columns.WorkerRow]
    engines: list[columns.EngineRow]
    tail: Tail | None
    stragglers: list[columns.StragglerRow]
    collectives: list[columns.CollectiveRow]
    kernels: list[columns.KernelRow]
    lost: list[columns.LostRow]
    throughput: Throughput | None
    gantt: list[GanttSpan]
    findings: list[Finding]
    clocks: list[HostClock] = []
    coverage: Coverage
    metrics: dict[str, float] = {}
    notes: list[str]
    measures: list[columns.MeasureRow] = []
    costs: list[columns.CostRow] = []
    captured: bool = True
    running: list[columns.RunningRow] = []
    replicas: list[columns.ReplicaRow] = []
    rollout: Rollout | None = None
    outside: list[columns.OutsideRow] = []
    devices: list[columns.DeviceRow]
    timeline_begin_ns: int | None = None
    name: str = ""
    asked: Asked | None = None
    suspects: list[columns.SuspectRow] = []
    counters: list[columns.CounterRow] = []
    watched: StepSummary | None = None
    what_would_help: list[columns.HelpRow] = []
    critical_path: list[columns.PathRow] = []
    unmatched_us: float = 0.0
    capture_steps: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<report of {self.title}: {duration(self.span_us / 1e6)}, {len(self.workers)} lanes, "
            f"{len(self.findings)} findings>"
        )

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a sandboxed frame."""
        page: str = import_module("verl_profiling.report.html").render_html(
            self
        )  # which knows this module
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="{escape(repr(self))}" '
            'style="width: 100%; height: 720px; border: 0"></iframe>'
        )

    @property
    def title(self) -> str:
        """``step 12``, or the name of the file or folder."""
        step = f"step {self.step}" if self.step is not None else ""
        return ", ".join(filter(None, (step, self.name)))

    @property
    def of_capture(self) -> str:
        """Remark for numbers that belong to the whole capture; empty for a capture of one step."""
        return (
            f" (of the whole capture, {step_list(self.capture_steps)})"
            if self.capture_steps
            else ""
        )

    @property
    def pause_us(self) -> float:
        """Time before and after the step in which the loop waited for the capture
        to start or stop.
        """
        return sum(
            row.duration_us for row in self.outside if row.name in (CAPTURE_START, CAPTURE_STOP)
        )

    @property
    def on_devices(self) -> bool:
        """Whether the work of a device was recorded;
        otherwise operators are counted in place of kernels.
        """
        return any(row.device for row in self.workers)

    @property
    def shares_devices(self) -> bool:
        """Whether some lanes share a device."""
        return any(len(row.lanes) > 1 for row in self.devices)

    @property
    def observed_share(self) -> float:
        """Share of the devices' time in the step that was recorded; 1 without a manifest."""
        whole_us = self.span_us * len(self.devices)
        observed_us = sum(row.span_us for row in self.devices)
        return observed_us / whole_us if self.captured and whole_us else 1.0

    @property
    def working_share(self) -> float | None:
        """Share of the observed time in which devices were busy, without waits for other ranks."""
        observed = sum(row.span_us for row in self.devices)
        working = sum(row.busy_us - row.waiting_us for row in self.devices)
        return working / observed if observed else None

    @property
    def lost_s(self) -> dict[str, float]:
        """Lost lane-seconds by cause."""
        return {row.cause: row.seconds for row in self.lost}

    def lane_seconds(self, seconds: float) -> str:
        """Return lane-seconds as text, e.g. ``4.34 lane-seconds``;
        device-seconds if lanes share devices.
        """
        return f"{three_digits(seconds)} {self.whose}-seconds"

    @property
    def whose(self) -> str:
        """Unit of total times: ``device`` if some lanes share a device, else ``lane``."""
        return "device" if self.shares_devices else "lane"
