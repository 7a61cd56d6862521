"""The steps and captures of a run, as bars and tables of its page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import IN_NO_STAGE
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.report.health import Event
from verl_profiling.report.html import page_title, section, table
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import most_helpful
from verl_profiling.report.step_bars import CAPTURED, HUNG, NOTICED, Bar, bars_section
from verl_profiling.report.tables import Cell, named, said, timed
from verl_profiling.report.watch_frame import CaptureHead, stage_seconds
from verl_profiling.units import visible

LATEST = 60
"""Steps with a bar and a row of their own, in a longer run."""

_MOST_STAGES = 12


class RunCapture(msgspec.Struct, frozen=True):
    """A capture on the page of its run.

    Attributes:
        name: Name of the step folder.
        head: Who requested it, and why.
        link: Address of its report's page; empty if there is none yet.
        timeline: Address that opens its timeline; empty if nothing serves it.
        report: Its report, if it is read; its texts are visible.
        problem: Why there is no report.
    """

    name: str
    head: CaptureHead
    link: str = ""
    timeline: str = ""
    report: Report | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        """Title of the step."""
        return page_title(self.report) if self.report else f"Step {self.head.step}"

    @property
    def first_finding(self) -> str:
        """The first finding of its report, with its advice."""
        if self.report is None:
            return self.problem
        if not self.report.findings:
            return "nothing unusual"
        finding = self.report.findings[0]
        return f"{finding.text} Try: {finding.advice}." if finding.advice else finding.text

    @property
    def bar(self) -> Bar:
        """The stages of its report."""
        assert self.report is not None
        return Bar(self.title, self.report.span_us / 1e6, stage_seconds(self.report), self.link)


def capture_of(event: Event, captures: Sequence[RunCapture]) -> RunCapture | None:
    """Return the capture that shows an event: that of its notice, else the last one that was made
    since its begin, of the same stage and process; ``None`` without one.
    """
    if event.kind == "hang":
        return None
    shows = None
    for capture in captures:
        if capture.head.trigger.noticed == event.step:
            return capture
        if event.lasts is not False and _is_of(event, capture.head):
            shows = capture
    return shows


def _is_of(event: Event, head: CaptureHead) -> bool:
    """Return whether a capture since the begin of an event is of its stage and processes."""
    captured, noticed = head.trigger, event.trigger
    if head.step is None or head.step < event.since:
        return False
    if captured.stage not in ("", noticed.stage):
        return False
    is_of_all = not captured.suspects or not noticed.suspects
    return is_of_all or not {*captured.suspects}.isdisjoint(noticed.suspects)


def logged_bars(
    steps: Sequence[StepSummary], captures: Sequence[RunCapture], found: Sequence[Event]
) -> list[Bar]:
    """Return a bar for each step in the log of the watch."""
    totals = Counter[str]()
    for step in steps:
        totals.update(step.exposed_s)
    kept = {name: name or IN_NO_STAGE for name, _ in totals.most_common(_MOST_STAGES)}
    of_folder = {capture.name: capture for capture in captures}
    marks = defaultdict[int, dict[str, str]](dict)
    for event in found:
        marks[event.step][HUNG if event.kind == "hang" else NOTICED] = event.kind
    bars = []
    for step in steps:
        stages = defaultdict[str, float](float)
        for name, seconds in step.exposed_s.items():
            stages[kept.get(name, "(other stages)")] += seconds
        link = ""
        if step.captured:
            capture = of_folder.get(step.captured)
            why = capture.head.in_words() if capture else "yes"
            link = capture.link if capture else ""
            marks[step.step][CAPTURED] = f"captured: {why}"
        bars.append(Bar(f"Step {step.step}", step.seconds, stages, link, marks.get(step.step, {})))
    return bars


def latest_steps(steps: Sequence[StepSummary], bars: Sequence[Bar]) -> str:
    """Return a table of the last steps, the latest first."""
    rows = []
    for step, bar in zip(reversed(steps), reversed(bars), strict=True):
        row = {"step": named(bar.title, bar.link), "took": timed(step.seconds)}
        row |= {name: timed(seconds) for name, seconds in bar.stages.items()}
        for side, idle in (("trainer", step.trainer_idle), ("rollout", step.rollout_idle)):
            if idle is not None:
                row[f"{side} waits"] = Cell(idle.share, f"{idle.share:.0%}")
        for name, rate in step.rates.items():
            row[name.replace("_per_s", "/s").replace("_", " ")] = Cell(rate, f"{rate:,.3g}")
        if step.helps is not None:
            row["would help"] = said(most_helpful(step.helps, step).partition(": ")[2])
        if bar.marks:
            row["noted"] = said("; ".join(bar.marks.values()))
        rows.append(row)
    return _by_step("The latest steps, the last first", rows)


def captured_steps(captures: Sequence[RunCapture]) -> str:
    """Return the section of the captures, and the lost time of each."""
    rows = []
    lost = []
    for capture in captures:
        row = {"step": named(capture.title, capture.link)}
        row["requested"] = said(capture.head.in_words())
        report = capture.report
        if report is not None:
            bar = capture.bar
            lost.append(bar._replace(stages=report.lost_s))
            busy = report.working_share
            row["took"] = timed(bar.seconds)
            row["busy"] = Cell(busy, "" if busy is None else f"{busy:.1%}")
            row[f"lost {report.whose}-seconds"] = timed(sum(report.lost_s.values()))
            row["most lost by"] = named(cause_name(_largest(report.lost_s)))
            row["slowest stage"] = named(_largest(bar.stages))
        row["first finding"] = said(capture.first_finding, capture.link)
        if capture.timeline:
            row["timeline"] = named("open", capture.timeline)
        rows.append(row)
    note = "Idle, or waiting for other ranks, by cause."
    content = _by_step("Captures", rows[::-1])
    if any(bar.stages for bar in lost):
        title, causes = "Lost time of each captured step", lambda name: f"k-{name}"
        content += bars_section(title, lost[-LATEST:], note, causes, cause_name)
    return content


def _largest(seconds: Mapping[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name], default="")


def _by_step(title: str, rows: Sequence[Mapping[str, Cell]]) -> str:
    """Return a section with a table, and a column for each name in the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, Cell(None, "")) for name in names] for row in rows]
    return section(title, table(title, [*map(visible, names)], cells))
