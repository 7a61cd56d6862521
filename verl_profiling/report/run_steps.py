"""The steps and captures of a run, as bars and tables of its page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import IN_NO_STAGE
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.report.colours import stage_class
from verl_profiling.report.health import Event
from verl_profiling.report.html import page_title, section, table
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import axis_top, most_helpful
from verl_profiling.report.tables import Cell, named, said, timed
from verl_profiling.report.watch_frame import CaptureHead, stage_seconds
from verl_profiling.units import duration, visible

CAPTURED, NOTICED, HUNG = "▼", "●", "■"
"""Signs above a bar."""

_BEYOND = "▲"
_MEANINGS = {CAPTURED: "captured", NOTICED: "noticed", HUNG: "hung", _BEYOND: "beyond the axis"}
_MOST_LABELS = 12
_MOST_LINES = 3  # times in the title of a bar; a table has all
_FLEX = 1e6  # CSS leaves a part of a bar empty where the factors add up to less than 1
_THINNEST = 0.01  # thinnest part of a bar that is drawn, as a share of the axis: two pixels
LATEST = 60
"""Steps with a bar and a row of their own, in a longer run."""

_MOST_STAGES = 12


class Bar(NamedTuple):
    """A step, or the mean of several.

    Attributes:
        title: Its name, e.g. ``Step 12``.
        seconds: Its duration (s).
        stages: Seconds by name.
        link: Address of its page; empty for none.
        marks: Signs above the bar, each with its text.
    """

    title: str
    seconds: float
    stages: Mapping[str, float]
    link: str = ""
    marks: Mapping[str, str] = MappingProxyType({})


def merged(bars: Sequence[Bar], most: int) -> Sequence[Bar]:
    """Return at most ``most`` bars: of a longer run, the means of successive steps."""
    width = -(-len(bars) // most)
    if width < 2:
        return bars
    return [_mean(bars[first : first + width]) for first in range(0, len(bars), width)]


def _mean(bars: Sequence[Bar]) -> Bar:
    stages = defaultdict[str, float](float)
    marks: dict[str, str] = {}
    link = ""
    for bar in bars:
        for name, seconds in bar.stages.items():
            stages[name] += seconds / len(bars)
        marks |= bar.marks
        link = bar.link or link
    last = bars[-1].title.removeprefix("Step ")
    seconds = sum(bar.seconds for bar in bars) / len(bars)
    return Bar(f"{bars[0].title} to {last}, mean", seconds, stages, link, marks)


def bars_section(
    title: str,
    bars: Sequence[Bar],
    note: str = "",
    key: Callable[[str], str] = stage_class,
    shown: Callable[[str], str] = str,
) -> str:
    """Return a section with a stacked bar of stages for each step.

    The title of a bar has the longest stages, and captured steps are links.

    Args:
        title: Title of the section.
        bars: The steps.
        note: Sentence below the title.
        key: Function that returns the colour class of a stage.
        shown: Function that returns the shown name of a stage.
    """
    names = list(dict.fromkeys(chain.from_iterable(bar.stages for bar in bars)))
    totals = [sum(bar.stages.values()) for bar in bars]
    top = axis_top(totals) or 1.0
    every = -(-len(bars) // _MOST_LABELS)
    drawn = ""
    signs = set[str]()
    for index, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        marks = dict(bar.marks)
        if total > 1.001 * top:  # sums of floats differ in their last digits
            marks[_BEYOND] = ""
        signs.update(marks)
        content = f"<u>{''.join(marks)}</u>" if marks else ""
        for name in names:
            if bar.stages.get(name, 0.0) > _THINNEST * top:
                flex = f"flex:{_FLEX * bar.stages[name]:.3g}"
                content += f'<i class="{escape(key(name))}" style="{flex}"></i>'
        if not index % every:
            label = bar.title.removeprefix("Step ").partition(" ")[0]
            content += f"<b>{escape(visible(label))}</b>"
        tag, link = ("a", f' href="{escape(bar.link)}"') if bar.link else ("div", "")
        drawn += (
            f'<{tag} class="step"{link} title="{escape(_title(bar, total, shown))}" '
            f'style="height:{min(total / top, 1):.2%}">{content}</{tag}>'
        )
    legend = ""
    for name in names:
        text = escape(visible(shown(name)))
        legend += f'<li><i class="{escape(key(name))}"></i><bdi>{text}</bdi></li>'
    for sign, meaning in _MEANINGS.items():
        if sign in signs:
            legend += f"<li>{sign} {meaning}</li>"
    axis = f'<span>{duration(top)}</span><span style="bottom:50%">{duration(top / 2)}</span>'
    chart = f'<ul class="legend">{legend}</ul><div class="trend">{axis}{drawn}</div>'
    return section(title, chart, note)


def _title(bar: Bar, total: float, shown: Callable[[str], str]) -> str:
    """Return the time of a step, its marks, and its longest stages."""
    parts = [f"{bar.title[:1].lower()}{bar.title[1:]}: {duration(total)}"]
    parts += filter(None, bar.marks.values())
    longest = sorted(bar.stages.items(), key=lambda stage: -stage[1])[:_MOST_LINES]
    parts += [f"{shown(name)} {duration(took)}" for name, took in longest if took > 0]
    return visible(", ".join(parts))


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
