"""Steps of a run: figures that they share, steps that differ, the log of its watch, and its captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, ManifestState
from verl_profiling.report.model import Report
from verl_profiling.run_files import named_file
from verl_profiling.step_summary import ExposedStage
from verl_profiling.timeline.inputs import step_folders
from verl_profiling.units import duration
from verl_profiling.watch_log import LoggedStep

_BARS = "▁▂▃▄▅▆▇█"
_BEYOND = "▲"
_FAR = 3.0
"""Times the 90th percentile from which on a value lies beyond the axis."""


class Shift:
    """When a stage or a cause of lost time left the range that it had in the steps before.

    Attributes:
        FEWEST: Steps before, of which a range is known.
        OF_ITSELF: Share of its median before by which it changed.
        OF_THE_STEP: The same, as a share of the step (for a cause, of all devices' time).
    """

    FEWEST = 2
    OF_ITSELF = 0.1
    OF_THE_STEP = 0.02


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, or a cause of lost time, that left the range it had in all captured steps before.

    Attributes:
        index: Which of the captured steps it is.
        kind: What changed.
        name: Name of the stage or cause.
        seconds: How long it took in this step.
        before: Median of the steps before (s).
        steps_before: Number of these.
    """

    index: int
    kind: Literal["stage", "cause"]
    name: str
    seconds: float
    before: float
    steps_before: int


def stage_seconds(report: Report) -> dict[str, float]:
    """Return the time of each outermost stage of the controller, and of the rest of the step."""
    return {row.name: row.duration_us / 1e6 for row in report.stages if row.depth == 0}


def unaimed(reports: Sequence[Report]) -> list[int]:
    """Return the indices of steps captured by the schedule; requested captures may record other things."""
    return [
        at for at, report in enumerate(reports) if report.asked is None or report.asked.kind == "schedule"
    ]


def slowest(seconds: Sequence[float]) -> int:
    """Return the index of the longest step; the first step is ignored if it is an outlier (warm-up)."""
    warms_up = seconds[0] > axis_top(seconds)
    return max(range(warms_up, len(seconds)), key=lambda index: seconds[index])


def excess(stages: Sequence[Mapping[str, float]], index: int) -> tuple[str, float] | None:
    """Return the stage of a step that took longest over its median in all steps, and how much longer (s)."""
    usual = {name: median(row.get(name, 0.0) for row in stages) for name in stages[index]}
    over = {name: took - usual[name] for name, took in stages[index].items()}
    name = max(over, key=lambda name: over[name], default=None)
    return None if name is None or over[name] <= 0 else (name, over[name])


def first_change(reports: Sequence[Report]) -> Change | None:
    """Return the largest change of the first step in which a stage or a cause left its range.

    The range is that of at least two steps, and half as much on either side. A change is larger than a
    tenth of the median before and than 2 % of the step (for a cause, of all devices' time). Stages count
    before causes: lost time is what follows from them.
    """
    for index in range(Shift.FEWEST, len(reports)):
        span_s = reports[index].span_us / 1e6
        lanes_s = sum(row.span_us for row in reports[index].devices) / 1e6
        stages = _left_its_range([stage_seconds(report) for report in reports[: index + 1]], span_s)
        causes = _left_its_range([report.lost_s for report in reports[: index + 1]], lanes_s)
        kind: Literal["stage", "cause"] = "stage" if stages else "cause"
        for name, seconds, before in stages or causes:
            return Change(
                index=index, kind=kind, name=name, seconds=seconds, before=before, steps_before=index
            )
    return None


def _left_its_range(rows: list[dict[str, float]], whole_s: float) -> list[tuple[str, float, float]]:
    """Return name, time and median before of what left its range in the last row, largest change first."""
    *before, last = rows
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        took, past = last.get(name, 0.0), [row.get(name, 0.0) for row in before]
        usual = median(past)
        margin = (max(past) - min(past)) / 2
        outside = not min(past) - margin <= took <= max(past) + margin
        if outside and abs(took - usual) > max(Shift.OF_ITSELF * usual, Shift.OF_THE_STEP * whole_s):
            found.append((name, took, usual))
    return sorted(found, key=lambda row: -abs(row[1] - row[2]))


def axis_top(values: Sequence[float]) -> float:
    """Return the largest value that is no outlier, such as a first step that warms up."""
    usual = sorted(values)[int(0.9 * (len(values) - 1))] if len(values) > 2 else 0.0
    return max((value for value in values if value <= _FAR * usual or usual <= 0), default=0.0)


def sparkline(values: Sequence[float], most: int) -> str:
    """Return one character for each of the last values, as high as the value on the axis; a sign beyond it.

    Args:
        values: Numbers of at least 0.
        most: How many are shown.
    """
    shown = values[-most:]
    top = axis_top(shown)
    return "".join(
        _BEYOND if value > top else _BARS[round(max(value, 0.0) / (top or 1.0) * (len(_BARS) - 1))]
        for value in shown
    )


_UNREADABLE = (OSError, TraceFormatError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_MOST_BYTES = 64 << 20

IN_NO_STAGE = "(in no stage)"
"""Name of the time of a step outside all stages."""


class WatchHistory:
    """The summaries of a run, in order of its steps.

    Of a step that was logged again, the last line counts. Where a run was resumed from an earlier step, the
    steps that it runs again replace those that its start before had run.

    Args:
        most: Number of steps to keep; ``None`` for all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._steps: dict[int, LoggedStep] = {}

    def add(self, lines: Iterable[LoggedStep]) -> None:
        """Add lines of the log, in the order in which they were logged."""
        for line in lines:
            while self._steps and self._is_of_a_start_before(line):
                self._steps.popitem()
            if line.step in self._steps or not self._steps or line.step > next(reversed(self._steps)):
                self._steps[line.step] = line
            if self._most is not None and len(self._steps) > self._most:
                del self._steps[next(iter(self._steps))]

    @property
    def steps(self) -> list[LoggedStep]:
        """The kept steps."""
        return list(self._steps.values())

    def _is_of_a_start_before(self, line: LoggedStep) -> bool:
        """Return whether the last step is one that the run comes to again."""
        last, kept = next(reversed(self._steps.items()))
        return last > line.step and kept.begin_ns < line.begin_ns


def main_rows(step: LoggedStep) -> dict[str, ExposedStage]:
    """Return, by name of the stage, the row of a step that is exposed longest."""
    rows: dict[str, ExposedStage] = {}
    for row in step.exposed:
        if row.name not in rows or row.exposed_ns > rows[row.name].exposed_ns:
            rows[row.name] = row
    return rows


def watch_sentence(steps: Sequence[LoggedStep]) -> str:
    """Return a sentence on the steps of a run, of which there is at least one."""
    took = [step.seconds for step in steps]
    index = slowest(took)
    first = f"step {steps[0].step} with {duration(took[0])}, then " if took[0] > took[index] else ""
    which = (
        f"{len(steps):,} steps logged, {steps[0].step} to {steps[-1].step}" if steps[1:] else "1 step logged"
    )
    longest = f"longest {first}step {steps[index].step} with {duration(took[index])}"
    found = excess([step.exposed_s for step in steps], index)
    why = f" ({found[0] or IN_NO_STAGE} {duration(found[1], signed=True)})" if found else ""
    return f"{which}; median {duration(median(took))}, {longest}{why}"


class _Head(msgspec.Struct, frozen=True):
    state: ManifestState = "written"
    trigger: Trigger = Trigger()


class CaptureSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """One step folder.

    Attributes:
        folder: Name of the folder.
        trigger: Request for the capture; ``None`` if the manifest cannot be read.
        goes_on: Whether the capture is still open.
    """

    folder: str
    trigger: Trigger | None = None
    goes_on: bool = False

    @property
    def asked(self) -> str:
        """Who asked for it, and why, as words."""
        if self.trigger is None:
            return "no manifest yet"
        by = (
            f" by {self.trigger.by}" if self.trigger.by and self.trigger.by not in self.trigger.reason else ""
        )
        reason = f": {self.trigger.reason}" if self.trigger.reason else ""
        return f"{self.trigger.kind}{by}{reason}{' (goes on)' if self.goes_on else ''}"


def captures_so_far(run: Path, most: int) -> tuple[int, list[CaptureSoFar]]:
    """Return how many step folders a run has, and the latest of them, in order.

    Args:
        run: The run's folder.
        most: How many of the latest are looked into.
    """
    try:
        folders = step_folders(run)
    except OSError:
        return 0, []
    return len(folders), [_capture(folder) for folder in folders[-most:]]


def _capture(folder: Path) -> CaptureSoFar:
    try:
        path = named_file(folder, MANIFEST_NAME)
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            head = msgspec.json.decode(path.read_bytes(), type=_Head)
            goes_on = head.state == "begun"
            return CaptureSoFar(folder=folder.name, trigger=head.trigger, goes_on=goes_on)
    except _UNREADABLE:
        pass
    return CaptureSoFar(folder=folder.name)
