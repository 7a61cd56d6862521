"""The numbers that trackers get: TensorBoard, and those of a training framework.

Event files are written with tensorboard's own writer, so torch is not needed. All points of a run
go into one TensorBoard run, under ``profiling/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_profiling.errors import ConfigError
from verl_profiling.event_file import EventFile
from verl_profiling.report.model import Report
from verl_profiling.report.rollout.outcomes import KEPT


def write_tensorboard(reports: Sequence[Report], logdir: Path) -> None:
    """Write one point per report; a report without a step is written as step 0.

    Raises:
        ConfigError: Several reports have no step, so their points would fall together.
        ToolUnavailableError: tensorboard is missing.
    """
    if sum(report.step is None for report in reports) > 1:
        titles = "; ".join(report.title for report in reports if report.step is None)
        raise ConfigError("--tensorboard", f"needs steps with numbers, or one recording; there are: {titles}")
    file = EventFile(logdir, "--tensorboard")
    for report in reports:
        file.add(report.step or 0, {f"profiling/{name}": value for name, value in scalars(report)})
    file.close()


def scalars(report: Report) -> Iterator[tuple[str, float]]:
    """Yield a report's main numbers by name, for any tracker of scalars; ``profiled`` marks its step."""
    yield "profiled", 1.0
    yield "step_s", report.span_us / 1e6
    for stage in report.stages:
        yield f"stage/{stage.name.strip('()').replace(' ', '_')}_s", stage.duration_us / 1e6
    span = sum(row.span_us for row in report.counted) or 1.0
    yield "busy_share", sum(row.busy_us for row in report.counted) / span
    yield "exposed_communication_share", sum(row.exposed_communication_us for row in report.counted) / span
    for lost in report.lost:
        yield f"lost/{lost.cause}_s", lost.seconds
    yield "weight_sync_share", report.weight_sync_share
    if report.tail:
        yield "rollout/tail_ratio", report.tail.ratio
        yield "rollout/tail_share", report.tail.tail_share
    yield from _of_trajectories(report)
    if report.throughput:
        yield "tokens_per_s", report.throughput.tokens_per_s
    yield from _about_the_capture(report)


def _of_trajectories(report: Report) -> Iterator[tuple[str, float]]:
    """Yield what training trajectories waited for, and what one follows of rollouts over time."""
    rollout = report.rollout
    if rollout is None:
        return
    yield "trajectories/count", float(rollout.trajectories)
    for row in rollout.causes:
        if not row.validate:
            yield f"trajectories/{row.cause.replace(' ', '_')}_s", row.seconds
    yield "trajectories/explained_share", rollout.explained
    if rollout.last:
        yield "trajectories/last_share", rollout.last.share
    yield "trajectories/group_waited_s", rollout.group_waited_s
    if rollout.versioned:
        yield "trajectories/partial_share", rollout.partial / rollout.versioned
    lost = sum(row.share for row in rollout.fates if not row.validate and row.fate not in KEPT)
    yield "trajectories/for_nothing_share", lost


def _about_the_capture(report: Report) -> Iterator[tuple[str, float]]:
    """Yield the largest peaks over the workers, what the capture cost, and what clocks did."""
    peaks: dict[str, float] = {}
    for row in report.measures:
        name = f"peak/{row.stage}/{row.name}" if row.stage else f"peak/{row.name}"
        peaks[name] = max(row.value, peaks.get(name, row.value))
    yield from peaks.items()
    if report.outside:
        yield "pause_s", report.pause_us / 1e6
    for one in report.outside:
        if not one.is_pause:
            yield f"outside/{one.name}_s", one.duration_us / 1e6
    if report.costs:
        yield "capture/added_s", report.capture_us / 1e6
        yield "capture/longest_start_s", max(row.start_s for row in report.costs)
        yield "capture/longest_stop_s", max(row.stop_s for row in report.costs)
        yield "capture/longest_export_s", max(row.export_s for row in report.costs)
        yield "capture/bytes", float(sum(row.bytes for row in report.costs))
    if report.anchors:
        yield "clock/largest_set_us", max(abs(row.set_us) for row in report.anchors)
    if report.clocks:
        yield "clock/largest_error_us", max(clock.error_us for clock in report.clocks)
