"""Renders the captured steps of a run side by side, as one self-contained HTML page with links to theirs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

from verl_profiling.report.history import (
    IN_NO_STAGE,
    axis_top,
    captures_so_far,
    excess,
    first_change,
    slowest,
    stage_seconds,
    unaimed,
)
from verl_profiling.report.html import page_title
from verl_profiling.report.lost import cause_name
from verl_profiling.report.model import Report
from verl_profiling.report.page.colours import stage_class
from verl_profiling.report.page.document import document, figures_section, linked, section, table
from verl_profiling.report.sentences import Figure
from verl_profiling.report.tables import Cell, named, timed
from verl_profiling.timeline.inputs import how_to_capture
from verl_profiling.units import duration
from verl_profiling.visible import visible
from verl_profiling.watch_log import LoggedSpans, LoggedStep

RUN_PAGE = "index.html"
_SCRIPTS = ("trend.js",)
_MOST_BARS = 600
_MOST_STAGES = 15
_MOST_CAPTURES = 1000
_MOST_SPANS = 10
_OTHERS = "(other stages)"


class _Step(NamedTuple):
    """A step as the page shows it: from the log of the watch, or from its capture."""

    title: str
    link: str
    seconds: float
    stages: Mapping[str, float]
    captured: str = ""
    spans: Sequence[LoggedSpans] = ()

    @property
    def cell(self) -> Cell:
        return named(self.title, self.link)


def runs_of(path: Path, folders: Iterable[Path]) -> dict[Path, list[int]]:
    """Return, for each folder at or below ``path`` that holds step folders, which of ``folders`` they are."""
    runs: dict[Path, list[int]] = {}
    for index, folder in enumerate(folders):
        if folder.resolve().parent.is_relative_to(path.resolve()):
            runs.setdefault(folder.parent, []).append(index)
    return runs


def render_run(
    directory: Path, pages: Sequence[Path], reports: Sequence[Report], watched: Sequence[LoggedStep] = ()
) -> str:
    """Return the page of a run.

    Args:
        directory: The run's folder, in which the page will be.
        pages: Page of each captured step, below the run's folder.
        reports: Report of each captured step, in order; there may be none.
        watched: What the watch has logged of the run, in order of the steps.
    """
    links = [quote(page.relative_to(directory).as_posix()) for page in pages]
    steps = [
        _Step(page_title(report), link, report.span_us / 1e6, stage_seconds(report))
        for report, link in zip(reports, links, strict=True)
    ]
    by_step = {report.step: link for report, link in zip(reports, links, strict=True)}
    ran = [
        _Step(f"Step {one.step}", by_step.get(one.step, ""), one.seconds, one.exposed_s) for one in watched
    ] or steps
    history = _bars(directory, watched, by_step)
    exposed = list(dict.fromkeys(name for bar in history for name in bar.stages))
    content = figures_section(_figures(reports, ran)) if ran else ""
    if steps:
        content += f'<section id="findings" aria-label="What changed">{_story(steps, reports, ran)}</section>'
    else:
        note = escape(visible(how_to_capture(directory)))
        content += f'<section id="findings" aria-label="Captures"><p>{note}</p></section>'
    content += _every_step(history, len(watched)) if history else ""
    content += "".join(_tables(steps, reports)) if steps else ""
    content += _watch_tables(history, exposed)
    bars = [
        {
            "name": step.title if report.step is None else str(report.step),
            "link": step.link,
            "stages": step.stages,
            "lost": report.lost_s,
        }
        for step, report in zip(steps, reports, strict=True)
    ]
    data: dict[str, Any] = {
        "steps": bars,
        "stages": {name: stage_class(name) for step in steps for name in step.stages},
        "lost": {name: f"k-{name}" for report in reports for name in report.lost_s},
        "exposed": {name: stage_class(name) for name in exposed},
        "watch": [
            {
                "name": bar.title,
                "link": bar.link,
                "captured": bar.captured,
                "watch": {name: round(seconds, 6) for name, seconds in bar.stages.items()},
            }
            for bar in history
        ],
    }
    drawn = {"watch": data["watch"], "stages": data["steps"], "lost": data["steps"]}
    data["axis"] = {kind: axis_top([sum(bar[kind].values()) for bar in bars]) for kind, bars in drawn.items()}
    count = f"{len(reports) or 'no'} captured step{'s' if len(reports) > 1 else ''}"
    return document(visible(directory.resolve().name), count, content, data, _SCRIPTS)


def _figures(reports: Sequence[Report], ran: Sequence[_Step]) -> Iterator[Figure]:
    took = [step.seconds for step in ran]
    spread = f"of {len(took):,} steps, from {duration(min(took))} to {duration(max(took))}"
    yield Figure("Step, median", duration(median(took)), spread)
    alike = [reports[index] for index in unaimed(reports)]
    busy = [share for report in alike if (share := report.working_share) is not None]
    if busy:
        spread = f"from {min(busy):.0%} to {max(busy):.0%}"
        whose = "Devices" if any(report.shares_devices for report in alike) else "Lanes"
        yield Figure(f"{whose} busy, median", f"{median(busy):.0%}", spread)
    lost = [sum(report.lost_s.values()) for report in alike]
    if any(lost):
        total = Counter[str]()
        for report in alike:
            total.update(report.lost_s)
        ((most, seconds),) = total.most_common(1)
        line = f"{seconds / sum(lost):.0%} {cause_name(most)}"
        yield Figure("Lost, median", alike[0].lane_seconds(median(lost)), line, f"k-{most}")
    index = slowest(took)
    over = took[index] - median(took)
    line = f"{duration(took[index])}, {duration(over, signed=True)} over the median"
    if took[0] > took[index]:
        line += f"; the first took {duration(took[0])}"
    yield Figure("Slowest", ran[index].title, line)


def _story(steps: Sequence[_Step], reports: Sequence[Report], ran: Sequence[_Step]) -> str:
    """Return what changed first, and what the slowest step has over the median."""
    alike = unaimed(reports)
    said = "No stage and no cause of lost time left its range."
    if len(alike) < 3:
        said = "What changed is said of three captured steps or more."
    if change := first_change([reports[at] for at in alike]):
        at, of_cause = alike[change.index], change.kind == "cause"
        unit = reports[at].lane_seconds if of_cause else duration
        what = f"lost time, {cause_name(change.name)}" if of_cause else change.name
        said = (
            f"Changed first: <bdi>{escape(what)}</bdi> in {linked(steps[at].cell)}, {unit(change.seconds)} "
            f"(median of {change.steps_before} before: {unit(change.before)})."
        )
    if apart := len(steps) - len(alike):
        captures = f"{apart} captures that were" if apart > 1 else "one capture that was"
        said += f" Left out, because what was recorded may differ: {captures} asked for."
    index = slowest([step.seconds for step in ran])
    found = excess([step.stages for step in ran], index) if len(ran) > 1 else None
    if found:
        name, seconds = found
        step = linked(named(ran[index].title, ran[index].link))
        said += (
            f"</p><p>Slowest: {step}; most of what it has over the median is in "
            f"<bdi>{escape(visible(name) or IN_NO_STAGE)}</bdi> ({duration(seconds, signed=True)})."
        )
    return f"<p>{said}</p>"


def _tables(steps: Sequence[_Step], reports: Sequence[Report]) -> Iterator[str]:
    whose = reports[0].whose
    note = f"{whose.title()}-seconds that are idle or wait for other ranks, by cause."
    yield section("Stages of each step", '<div id="stages" class="trend"></div>')
    if any(report.lost for report in reports):
        yield section("Lost time of each step", '<div id="lost" class="trend"></div>', note)
    headings = (
        "step",
        "took",
        "busy",
        f"lost {whose}-seconds",
        "most lost by",
        "slowest stage",
        "first finding",
    )
    rows = []
    for step, report in zip(steps, reports, strict=True):
        lost, stages = report.lost_s, step.stages
        busy = report.working_share
        row = [step.cell, timed(step.seconds), Cell(busy, "" if busy is None else f"{busy:.1%}")]
        row.append(timed(sum(lost.values())))
        row.append(named(cause_name(max(lost, key=lambda name: lost[name], default=""))))
        row.append(named(max(stages, key=lambda name: stages[name], default="")))
        row.append(named(report.findings[0].text, step.link) if report.findings else named(""))
        rows.append(row)
    yield section("Steps", table("Steps", headings, rows))
    cells = [step.cell for step in steps]
    yield _by_step("Stages by step", cells, [_times(step.stages) for step in steps])
    yield _by_step("Lost time by step", cells, [_times(report.lost_s) for report in reports], note=note)


def _times(seconds: Mapping[str, float]) -> dict[str, Cell]:
    return {name: timed(took) for name, took in seconds.items()}


def _by_step(
    title: str,
    steps: Sequence[Cell],
    rows: Sequence[Mapping[str, Cell]],
    names: Sequence[str] | None = None,
    note: str = "",
) -> str:
    """Return a table with a row for each step and a column for each name; by default for all in the rows."""
    if names is None:
        names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [step, *(row.get(name, Cell(None, "")) for name in names)]
        for step, row in zip(steps, rows, strict=True)
    ]
    return section(title, table(title, ("step", *map(visible, names)), cells if names else []), note)


def _bars(run: Path, steps: Sequence[LoggedStep], links: Mapping[int | None, str]) -> list[_Step]:
    """Return the logged steps that are shown.

    Args:
        run: The run's folder.
        steps: What was logged, in order of the steps.
        links: Address of the page of each captured step that has one.
    """
    asked = {capture.folder: capture.asked for capture in captures_so_far(run, _MOST_CAPTURES)[1]}
    totals = Counter[str]()
    for step in steps:
        totals.update(step.exposed_s)
    kept = {name for name, _ in totals.most_common(_MOST_STAGES)}
    bars = []
    for step in _shown(steps, {step.step for step in steps if step.captured in asked or step.step in links}):
        times = defaultdict[str, float](float)
        for name, exposed_s in step.exposed_s.items():
            times[(visible(name) or IN_NO_STAGE) if name in kept else _OTHERS] += exposed_s
        captured = asked.get(step.captured, "yes" if step.step in links else "")
        shown = (str(step.step), links.get(step.step, ""), step.seconds, times)
        bars.append(_Step(*shown, visible(captured), step.spans))
    return bars


def _every_step(bars: Sequence[_Step], total: int) -> str:
    """Return the section in which a script draws the steps that the watch has logged."""
    note = "Exposed time: by how much each stage moved the end of its step."
    if total > len(bars):
        note += (
            f" {len(bars):,} of {total:,} steps are shown: those that were captured, and the "
            "longest of every few in a row."
        )
    return section("Every step", '<div id="watch" class="trend"></div>', note)


def _watch_tables(bars: Sequence[_Step], stages: Sequence[str]) -> str:
    """Return the same in numbers, and what trajectories spent."""
    steps = [bar.cell for bar in bars]
    rows = [
        {"took": timed(bar.seconds), **_times(bar.stages), "captured": named(bar.captured)} for bar in bars
    ]
    sums = Counter[str]()
    for bar in bars:
        sums.update({spans.name: spans.seconds for spans in bar.spans})
    names = [name for name, _ in sums.most_common(_MOST_SPANS)]
    spent = [{spans.name: _spent(spans) for spans in bar.spans} for bar in bars]
    note = "All spans of a name together. They run side by side, so they may be longer than the step."
    exposed = _by_step("Exposed time by step", steps, rows, ["took", *stages, "captured"])
    return exposed + _by_step("Time of trajectories by step", steps, spent, names, note)


def _spent(spans: LoggedSpans) -> Cell:
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
