"""Renders the page of a run: its captured steps side by side,
with links to the pages of the steps.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.report.colours import stage_class
from verl_profiling.report.html import document, figures_section, page_title, section, table
from verl_profiling.report.model import Report
from verl_profiling.report.sentences import Figure, axis_top, waits
from verl_profiling.report.tables import Cell, named, timed
from verl_profiling.report.watch_frame import (
    IN_NO_STAGE,
    captures_so_far,
    excess,
    noticed_in,
    slowest,
)
from verl_profiling.steps.deaths import Attempt
from verl_profiling.steps.inputs import how_to_capture
from verl_profiling.units import duration, local_time, visible, visible_text_of

RUN_PAGE = "index.html"
_MOST_BARS = 600
_MOST_LABELS = 12
_MOST_LINES = 3  # times in the title of a bar; a table has all
_FLEX = 1e6  # CSS leaves a part of a bar empty where the factors add up to less than 1
_THINNEST = 0.01  # thinnest part of a bar that is drawn, as a share of the axis: two pixels
_MOST_STAGES = 15
_MOST_CAPTURES = 1000


class _Step(NamedTuple):
    """A step on the page, from the log of the watch or from a capture.

    ``stages`` are seconds by name; ``captured`` says who requested the step's capture.
    """

    title: str
    link: str
    seconds: float
    stages: Mapping[str, float]
    captured: str = ""


def render_run(
    directory: Path,
    pages: Sequence[Path],
    reports: Sequence[Report],
    watched: Sequence[StepSummary] = (),
    hangs: str = "",
    attempts: Sequence[Attempt] = (),
) -> str:
    """Return the page of a run.

    Args:
        directory: The run's folder, in which the page will be written.
        pages: Page of each captured step, below the run's folder.
        reports: Reports of the captured steps, in order; may be empty.
        watched: Step summaries in the log of the watch, in order.
        hangs: A sentence on the step that hangs, or on a run that ended badly; empty if none.
        attempts: All starts of the run, if there are several.
    """
    reports = list(map(visible_text_of, reports))
    links = [quote(page.relative_to(directory).as_posix()) for page in pages]
    steps = [
        _Step(page_title(report), link, report.span_us / 1e6, stage_seconds(report))
        for report, link in zip(reports, links, strict=True)
    ]
    by_step = {report.step: link for report, link in zip(reports, links, strict=True)}
    logged = _logged(directory, watched, by_step)
    ran = logged or steps
    content = (
        f'<section id="hang" aria-label="Hang"><p>{escape(visible(hangs))}</p></section>'
        * bool(hangs)
    )
    content += _attempts(directory, attempts)
    if ran:
        content += figures_section(_figures(ran))
    if not steps:
        note = escape(visible(how_to_capture(directory)))
        content += f'<section id="findings" aria-label="Captures"><p>{note}</p></section>'
    if logged:
        said = [f"Step {watched[-1].step}: {one}." for one in waits(watched[-1])]
        note = " ".join(
            ["Exposed time: the part of the step's duration that each stage caused.", *said]
        )
        title = "Every step"
        if logged[_MOST_BARS:]:
            title = f"The last {_MOST_BARS} steps"
        content += _trend(title, logged[-_MOST_BARS:], note)
    content += _noticed(watched, reports, links)
    if steps:
        content += "".join(_tables(steps, reports))
    count = f"{len(reports) or 'no'} captured step{'s' if len(reports) > 1 else ''}"
    return document(visible(directory.resolve().name), count, content)


def _noticed(
    watched: Sequence[StepSummary], reports: Sequence[Report], links: Sequence[str]
) -> str:
    """Return a table of the anomalies that the watch noticed,
    with the capture or the reason for none.
    """
    captures = {}
    for report, link in zip(reports, links, strict=True):
        if report.capture_request is not None:
            captures[report.capture_request.noticed] = named(page_title(report), link)
    rows = []
    for anomaly, why in noticed_in(watched):
        outcome = named(f"not captured: {why}" if why else "not captured")
        capture = captures.get(anomaly.noticed, outcome)
        step = named(f"Step {anomaly.noticed}")
        rows.append([step, named(anomaly.sign), named(anomaly.reason), capture])
    note = "What the watch noticed, whether it was captured or not."
    shown = table("Noticed", ("step", "sign", "reason", "capture"), rows)
    if rows:
        return section("Noticed", shown, note)
    return ""


def _attempts(directory: Path, attempts: Sequence[Attempt]) -> str:
    """Return a table of all starts of a run: when, which steps, and how each ended."""
    rows = []
    for attempt in attempts:
        name = attempt.folder.resolve().name
        link = ""
        if attempt.folder != directory:
            link = quote(os.path.relpath(attempt.folder / RUN_PAGE, directory))
        steps = "none" if attempt.steps is None else "{} to {}".format(*attempt.steps)
        begun = local_time(attempt.info.begin_ns)
        rows.append([named(name, link), named(begun), named(steps), named(attempt.end)])
    return section("Attempts", table("Attempts", ("start", "begun", "steps", "end"), rows))


def _figures(ran: Sequence[_Step]) -> Iterator[Figure]:
    took = [step.seconds for step in ran]
    spread = f"of {len(took):,} steps, from {duration(min(took))} to {duration(max(took))}"
    yield Figure("Step, median", duration(median(took)), spread)
    index = slowest(took)
    over = took[index] - median(took)
    line = f"{duration(took[index])}, {duration(over, signed=True)} over the median"
    if len(ran) > 1 and (found := excess([step.stages for step in ran], index)):
        line += f", most in {found[0]} ({duration(found[1], signed=True)})"
    if took[0] > took[index]:
        line += f"; the first took {duration(took[0])}"
    yield Figure("Slowest", ran[index].title, line)


def stage_seconds(report: Report) -> dict[str, float]:
    """Return the time of each outermost stage of the controller, and of the rest of the step."""
    return {row.name: row.duration_us / 1e6 for row in report.stages if row.depth == 0}


def _tables(steps: Sequence[_Step], reports: Sequence[Report]) -> Iterator[str]:
    whose = reports[0].whose
    note = f"{whose.title()}-seconds that are idle or wait for other ranks, by cause."
    yield _trend("Stages of each step", steps)
    if any(report.lost for report in reports):
        lost = [step._replace(stages=one.lost_s) for step, one in zip(steps, reports, strict=True)]
        yield _trend(
            "Lost time of each step",
            lost,
            note,
            lambda name: f"k-{name}",
            cause_name,
        )
    rows = []
    for step, report in zip(steps, reports, strict=True):
        busy = report.working_share
        first = ""
        if report.findings:
            first = report.findings[0].text
        row = {
            "took": timed(step.seconds),
            "busy": Cell(busy, "" if busy is None else f"{busy:.1%}"),
            f"lost {whose}-seconds": timed(sum(report.lost_s.values())),
            "most lost by": named(cause_name(_largest(report.lost_s))),
            "slowest stage": named(_largest(step.stages)),
            "first finding": named(first, step.link if first else ""),
        }
        rows.append(row)
    yield section("Steps", _by_step("Steps", steps, rows))


def _largest(seconds: Mapping[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name], default="")


def _trend(
    title: str,
    steps: Sequence[_Step],
    note: str = "",
    key: Callable[[str], str] = stage_class,
    shown: Callable[[str], str] = str,
) -> str:
    """Return a section with a stacked bar of stages for each step, and a table of the times.

    The title of a bar has the longest stages, and captured steps are links.

    Args:
        title: Title of the section.
        steps: The steps.
        note: Sentence below the title.
        key: Function that returns the colour class of a stage.
        shown: Function that returns the shown name of a stage.
    """
    names = list(dict.fromkeys(chain.from_iterable(step.stages for step in steps)))
    totals = [sum(step.stages.values()) for step in steps]
    top = axis_top(totals) or 1.0
    every = -(-len(steps) // _MOST_LABELS)
    bars = ""
    marks = dict[str, str]()
    rows = []
    for index, (step, total) in enumerate(zip(steps, totals, strict=True)):
        mark = _mark(step, total, top)
        marks |= mark
        stacked = ""
        for name in names:
            if step.stages.get(name, 0.0) > _THINNEST * top:
                flex = f"flex:{_FLEX * step.stages[name]:.3g}"
                stacked += f'<i class="{escape(key(name))}" style="{flex}"></i>'
        label = "" if index % every else f"<b>{escape(step.title.removeprefix('Step '))}</b>"
        drawn = "".join(f"<u>{sign}</u>" for sign in mark) + stacked + label
        tag, link = ("a", f' href="{escape(step.link)}"') if step.link else ("div", "")
        bars += (
            f'<{tag} class="step"{link} title="{escape(_bar_title(step, total, shown))}" '
            f'style="height:{min(total / top, 1):.2%}">{drawn}</{tag}>'
        )
        row = {"took": timed(step.seconds)}
        row |= {shown(name): timed(step.stages.get(name)) for name in names}
        if step.captured:
            row["captured"] = named(step.captured)
        rows.append(row)
    legend = ""
    for name in names:
        legend += f'<li><i class="{escape(key(name))}"></i><bdi>{escape(shown(name))}</bdi></li>'
    for sign, meaning in marks.items():
        legend += f"<li>{sign} {meaning}</li>"
    axis = f'<span>{duration(top)}</span><span style="bottom:50%">{duration(top / 2)}</span>'
    trend = f'<ul class="legend">{legend}</ul><div class="trend">{axis}{bars}</div>'
    return section(title, trend + _by_step(title, steps, rows), note)


def _mark(step: _Step, total: float, top: float) -> dict[str, str]:
    """Return the sign above a bar with its meaning, if it has one."""
    if step.captured:
        return {"▼": "captured"}
    # sums of floats differ in their last digits
    if total > 1.001 * top:
        return {"▲": "beyond the axis"}
    return {}


def _bar_title(step: _Step, total: float, shown: Callable[[str], str]) -> str:
    """Return the time of a step, who requested its capture, and its longest stages."""
    parts = [f"{step.title[:1].lower()}{step.title[1:]}: {duration(total)}"]
    if step.captured:
        parts.append(f"captured: {step.captured}")
    longest = sorted(step.stages.items(), key=lambda stage: -stage[1])[:_MOST_LINES]
    parts += [f"{shown(name)} {duration(took)}" for name, took in longest if took > 0]
    return ", ".join(parts)


def _by_step(title: str, steps: Sequence[_Step], rows: Sequence[Mapping[str, Cell]]) -> str:
    """Return a table with a row for each step and a column for each name in the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [named(step.title, step.link), *(row.get(name, Cell(None, "")) for name in names)]
        for step, row in zip(steps, rows, strict=True)
    ]
    if not names:
        return ""
    return table(title, ("step", *map(visible, names)), cells)


def _logged(
    run: Path, steps: Sequence[StepSummary], links: Mapping[int | None, str]
) -> list[_Step]:
    """Return the steps in the log of the watch.

    Args:
        run: The run's folder.
        steps: The step summaries of the log, in order.
        links: Links to the pages of captured steps.
    """
    _, requesters = captures_so_far(run, _MOST_CAPTURES)
    totals = Counter[str]()
    for step in steps:
        totals.update(step.exposed_s)
    kept = {name: visible(name) or IN_NO_STAGE for name, _ in totals.most_common(_MOST_STAGES)}
    logged = []
    for step in steps:
        stages = defaultdict[str, float](float)
        for name, seconds in step.exposed_s.items():
            stages[kept.get(name, "(other stages)")] += seconds
        link = links.get(step.step, "")
        captured = visible(requesters.get(step.captured, "yes" if link else ""))
        logged.append(_Step(f"Step {step.step}", link, step.seconds, stages, captured))
    return logged
