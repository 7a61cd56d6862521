"""The report as data, which ``--json`` prints and all other output formats show.

All times are microseconds (``_us``) unless a name says otherwise; shares are fractions of 1. Rows
of tables are in :mod:`~verl_profiling.numbers.report_columns`.
"""

from __future__ import annotations

import msgspec

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, HostClock
from verl_profiling.numbers import report_columns
from verl_profiling.numbers.report_columns import (
    GanttSpan,
    RequestedCapture,
    Rollout,
    Tail,
    Throughput,
)
from verl_profiling.predict.engine_fit import Knee
from verl_profiling.steps.read import Coverage
from verl_profiling.steps.trajectory_columns import GENERATE, REQUEST_PARTS
from verl_profiling.units import duration, step_list, three_digits

REPORT_SCHEMA_VERSION = 1


class Finding(msgspec.Struct, frozen=True):
    """One finding: a sentence on lost time.

    Attributes:
        rule: Name of the rule, e.g. ``straggler``; ``docs/report.md`` gives its threshold.
        text: A sentence with its number.
        advice: Suggested remedy; ``""`` if there is none, or if it is one of ``what_would_help``.
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one step.

    Attributes:
        schema_version: Version of the names and meanings of these fields.
        directory: Folder of the step.
        step: Number of the step, if known.
        policy_version: Version of the weights, if the loop reports one.
        complete: ``False`` if the step ended early.
        span_us: Duration of the step, from ``on_step_begin`` to ``on_step_end``; without a
            manifest, from the first to the last event.
        stages: Stages, in order of time.
        workers: One row per lane.
        engines: One row per lane of a rollout engine.
        tail: Wait of the rollout for its last replicas; ``None`` if unknown.
        stragglers: One row per stage and role with several workers.
        work: The work given to workers by stage, and to engines by requests, as far as it is known.
        achieved: Operations and bytes per second by lane and stage, as far as the model's shape and
            the work are known.
        unknown_limits: Sentences on what is missing for ``achieved``.
        useless_training: Training on sequences that taught nothing, by stage and reason, as far as
            advantages or masks are known.
        collectives: The collectives with the longest waits.
        links: Bytes and bandwidth of collectives by group and size, and of pairs of NPUs.
        kernels: All kernels (operators, in a CPU trace), those with most self time first.
        lost: Lane-seconds that are idle or wait for other ranks, by cause, largest first,
            ``unexplained`` last; lanes that share a device count once.
        throughput: Tokens per time, if their number is known.
        knee: How many requests a replica should get; ``None`` if unknown, or if the step hardly
            waits for the rollout.
        gantt: Runs of the stages of the loop and of workers.
        trajectory_gantt: What each trajectory waited for; with more than 64, the last one of each
            group.
        findings: At most five findings.
        clocks: Measured clock offsets of hosts other than the controller's, which all numbers
            correct.
        coverage: Which of the expected traces were read.
        metrics: The loop's metrics of the step.
        notes: Notes of the capture, at most a hundred of them.
        measures: Numbers that workers recorded, such as the peak memory of their stages.
        costs: Cost of the capture for each worker.
        captured: Whether the step has a manifest. Plain traces have no manifest, and so no known
            stages and workers.
        name: Title of plain traces, shown after the step's number: the file or folder.
        services: What trajectories and requests share, with running and waiting calls over time.
        replicas: Totals of the requests of each replica, one row per replica.
        rollout: Time of trajectories by cause; ``None`` if no trajectories were recorded.
        around_the_step: Time of the loop around the step: pauses of the capture, and stages such as
            ``validate``.
        devices: One row per device; lanes that share a device are one row.
        timeline_begin_ns: Begin of the step in its merged timeline (ns); ``None`` without a
            manifest.
        capture_request: The request for the capture; ``None`` if the schedule chose the step.
        suspects: The suspects of a requested capture, compared with their peers.
        counters: Counters of processes that record trajectories, such as the queue of verl's
            rollouter.
        watched: The watch's summary of the step, as in its log.
        what_would_help: Predicted effects of single changes, the largest first.
        critical_path: The chain of work that made the step as long as it was, in order of time; the
            durations add up to ``span_us``.
        unmatched_us: Communication whose waits are unknown, summed over lanes: calls that match no
            call of other ranks, and CUDA graphs that are one event each.
        capture_steps: All steps of the continuous capture, if the step is one of several.
            ``measures``, ``costs``, events in ``coverage`` and some notes are of the whole capture.
    """

    schema_version: int = REPORT_SCHEMA_VERSION
    directory: str
    step: int | None
    policy_version: int | None = None
    complete: bool = True
    span_us: float
    stages: list[report_columns.StageRow]
    workers: list[report_columns.WorkerRow]
    engines: list[report_columns.EngineRow]
    tail: Tail | None
    stragglers: list[report_columns.StragglerRow]
    work: list[report_columns.WorkRow] = []
    achieved: list[report_columns.AchievedRow] = []
    unknown_limits: list[str] = []
    useless_training: list[report_columns.UselessRow] = []
    collectives: list[report_columns.CollectiveRow]
    links: list[report_columns.LinkRow] = []
    kernels: list[report_columns.KernelRow]
    lost: list[report_columns.LostRow]
    throughput: Throughput | None
    knee: Knee | None = None
    gantt: list[GanttSpan]
    trajectory_gantt: list[GanttSpan] = []
    findings: list[Finding]
    clocks: list[HostClock] = []
    coverage: Coverage
    metrics: dict[str, float] = {}
    notes: list[str]
    measures: list[report_columns.MeasureRow] = []
    costs: list[report_columns.CostRow] = []
    captured: bool = True
    services: list[report_columns.ServiceRow] = []
    replicas: list[report_columns.ReplicaRow] = []
    rollout: Rollout | None = None
    around_the_step: list[report_columns.AroundRow] = []
    devices: list[report_columns.DeviceRow]
    timeline_begin_ns: int | None = None
    name: str = ""
    capture_request: RequestedCapture | None = None
    suspects: list[report_columns.SuspectRow] = []
    counters: list[report_columns.CounterRow] = []
    watched: StepSummary | None = None
    what_would_help: list[report_columns.HelpRow] = []
    critical_path: list[report_columns.PathRow] = []
    unmatched_us: float = 0.0
    capture_steps: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<report of {self.title}: {duration(self.span_us / 1e6)}, {len(self.workers)} lanes, "
            f"{len(self.findings)} findings>"
        )

    @property
    def title(self) -> str:
        """``step 12``, or the name of the file or folder."""
        step = ""
        if self.step is not None:
            step = f"step {self.step}"
        return ", ".join(filter(None, (step, self.name)))

    @property
    def of_capture(self) -> str:
        """Remark for numbers that belong to the whole capture; empty for a capture of one step."""
        if self.capture_steps:
            return f" (of the whole capture, {step_list(self.capture_steps)})"
        return ""

    @property
    def pause_us(self) -> float:
        """Time before and after the step in which the loop waited for the capture
        to start or stop.
        """
        pauses = (CAPTURE_START, CAPTURE_STOP)
        return sum(row.duration_us for row in self.around_the_step if row.name in pauses)

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
    def noticed(self) -> bool:
        """Whether the watch requested the capture."""
        return self.capture_request is not None and bool(self.capture_request.sign)

    @property
    def suspected_cause(self) -> str:
        """The cause of the trajectories' time that the watch suspects, such as a tool; empty if it
        suspects none. Parts of the engine's work are none.
        """
        if self.capture_request is None or self.rollout is None or not self.noticed:
            return ""
        suspects = {*self.capture_request.suspects, self.capture_request.span}
        suspects -= {*REQUEST_PARTS, GENERATE}
        causes = [row.cause for row in self.rollout.causes if not row.validate]
        return next((cause for cause in causes if cause in suspects), "")

    @property
    def observed_us(self) -> float:
        """Observed time of all devices; 1 if there is none, so that shares of it are 0."""
        return report_columns.sum_of(self.devices, "span_us") or 1.0

    @property
    def observed_share(self) -> float:
        """Share of the devices' time in the step that was recorded; 1 without a manifest."""
        whole_us = self.span_us * len(self.devices)
        if self.captured and whole_us:
            return self.observed_us / whole_us
        return 1.0

    @property
    def working_share(self) -> float | None:
        """Share of the observed time in which devices were busy, without waits for other ranks."""
        if not any(row.span_us for row in self.devices):
            return None
        return sum(row.busy_us - row.waiting_us for row in self.devices) / self.observed_us

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
        """Owner of total times: ``device`` (as in device-seconds) if lanes share one, else
        ``lane``.
        """
        if self.shares_devices:
            return "device"
        return "lane"
