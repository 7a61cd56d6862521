"""The latest steps and captures of a run, from its watch log and its step folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, ManifestState
from verl_profiling.report.trend import excess, slowest
from verl_profiling.run_files import named_file
from verl_profiling.timeline.inputs import step_folders
from verl_profiling.units import duration
from verl_profiling.watch_log import LoggedStage, LoggedStep

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


def main_rows(step: LoggedStep) -> dict[str, LoggedStage]:
    """Return, by name of the stage, the row of a step that is exposed longest."""
    rows: dict[str, LoggedStage] = {}
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
