"""Every step of a run on its page: exposed time by stage, with the captures marked in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

from verl_profiling.report.captures_so_far import CapturesSoFar
from verl_profiling.report.page.colours import stage_class
from verl_profiling.report.page.document import section, table
from verl_profiling.report.tables import Cell, named, timed
from verl_profiling.report.watch_history import IN_NO_STAGE
from verl_profiling.units import duration
from verl_profiling.visible import visible
from verl_profiling.watch_log import LoggedSpans, LoggedStep

_MOST_BARS = 600
_MOST_STAGES = 15
_MOST_CAPTURES = 1000
_MOST_SPANS = 10
_OTHERS = "(other stages)"


class _Bar(NamedTuple):
    step: LoggedStep
    seconds: dict[str, float]
    captured: str
    link: str


class WatchPicture(NamedTuple):
    """The watch's part of the page.

    Attributes:
        bars: The steps that are shown.
        stages: Their stages, in order.
        total: How many steps there are.
    """

    bars: list[_Bar]
    stages: list[str]
    total: int

    def picture(self) -> str:
        """Return the section that is drawn."""
        note = "Exposed time: by how much each stage moved the end of its step."
        if self.total > len(self.bars):
            note += (
                f" {len(self.bars):,} of {self.total:,} steps are shown: those that were captured, and the "
                "longest of every few in a row."
            )
        return section("Every step", '<div id="watch" class="trend"></div>', note)

    def table(self) -> str:
        """Return the section that says the same in numbers."""
        title = "Exposed time by step"
        rows = [
            [
                named(str(bar.step.step), bar.link),
                timed(bar.step.seconds),
                *(timed(bar.seconds.get(name)) for name in self.stages),
                named(bar.captured),
            ]
            for bar in self.bars
        ]
        headings = ("step", "took", *self.stages, "captured")
        return section(title, table(title, headings, rows)) + self._spans()

    def _spans(self) -> str:
        """Return the table of what trajectories spent; empty if nothing is known of any."""
        sums: dict[str, float] = {}
        for bar in self.bars:
            for spans in bar.step.spans:
                sums[spans.name] = sums.get(spans.name, 0.0) + spans.seconds
        names = nlargest(_MOST_SPANS, sums, key=lambda name: sums[name])
        if not names:
            return ""
        title = "Time of trajectories by step"
        rows = []
        for bar in self.bars:
            of_step = {spans.name: spans for spans in bar.step.spans}
            step = named(str(bar.step.step), bar.link)
            rows.append([step, *(_spent(of_step.get(name)) for name in names)])
        note = "All spans of a name together. They run side by side, so they may be longer than the step."
        return section(title, table(title, ("step", *map(visible, names)), rows), note)

    def data(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {
            "watch": [
                {
                    "name": str(bar.step.step),
                    "link": bar.link,
                    "captured": bar.captured,
                    "watch": {name: round(seconds, 6) for name, seconds in bar.seconds.items()},
                }
                for bar in self.bars
            ],
            "exposed": {name: stage_class(name) for name in self.stages},
        }


def watch_picture(run: Path, steps: Sequence[LoggedStep], links: Mapping[int, str]) -> WatchPicture:
    """Return what the page of a run shows of its watch.

    Args:
        run: The run's folder.
        steps: What was logged, in order of the steps.
        links: Address of the page of each captured step that has one.
    """
    asked = {capture.folder: capture.asked for capture in CapturesSoFar(run, _MOST_CAPTURES).look()[1]}
    totals: dict[str, float] = {}
    for step in steps:
        for name, seconds in step.exposed_s.items():
            totals[name] = totals.get(name, 0.0) + seconds
    kept = set(nlargest(_MOST_STAGES, totals, key=lambda name: totals[name]))
    bars = []
    for step in _shown(steps, {step.step for step in steps if step.captured in asked or step.step in links}):
        times: dict[str, float] = {}
        for name, exposed_s in step.exposed_s.items():
            shown = (visible(name) or IN_NO_STAGE) if name in kept else _OTHERS
            times[shown] = times.get(shown, 0.0) + exposed_s
        captured = asked.get(step.captured, "yes" if step.step in links else "")
        bars.append(_Bar(step, times, visible(captured), links.get(step.step, "")))
    return WatchPicture(bars, list(dict.fromkeys(name for bar in bars for name in bar.seconds)), len(steps))


def _spent(spans: LoggedSpans | None) -> Cell:
    if spans is None:
        return Cell(None, "")
    failed = f", {spans.failed:,} failed" if spans.failed else ""
    calls = "call" if spans.runs == 1 else "calls"
    return Cell(spans.seconds, f"{duration(spans.seconds)} in {spans.runs:,} {calls}{failed}")


def _shown(steps: Sequence[LoggedStep], captured: set[int]) -> list[LoggedStep]:
    """Return the captured steps, and of each group of the others in a row the longest."""
    if len(steps) <= _MOST_BARS:
        return list(steps)
    width = -(-len(steps) // _MOST_BARS)
    shown = []
    for begin in range(0, len(steps), width):
        group = steps[begin : begin + width]
        others = [step for step in group if step.step not in captured]
        longest = max(others, key=lambda step: step.seconds, default=None)
        shown += [step for step in group if step is longest or step.step in captured]
    return shown
