"""Renders the captured steps of a run side by side, as one self-contained HTML page with links to theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

from verl_profiling.report.html import page_title
from verl_profiling.report.model import Report
from verl_profiling.report.page.colours import stage_class
from verl_profiling.report.page.document import document, figures_section
from verl_profiling.report.page.tables import section, table
from verl_profiling.report.sentences import Figure
from verl_profiling.report.sparkline import axis_top
from verl_profiling.report.tables import Cell, named, timed
from verl_profiling.report.trend import (
    Change,
    excess,
    first_change,
    slowest,
    stage_seconds,
    unaimed,
)
from verl_profiling.report.uncaptured import how_to_capture
from verl_profiling.report.watch_history import IN_NO_STAGE
from verl_profiling.report.watch_picture import WatchPicture, watch_picture
from verl_profiling.units import duration
from verl_profiling.visible import visible
from verl_profiling.watch_log import LoggedStep

__all__ = ["RUN_PAGE", "render_run", "runs_of"]

RUN_PAGE = "index.html"
_SCRIPTS = ("trend.js",)


class _Ran(NamedTuple):
    """A step as the figures count it: from the watch where there was one, else from its capture."""

    title: str
    link: str
    seconds: float
    stages: dict[str, float]


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
    count = f"{len(reports) or 'no'} captured step{'s' if len(reports) > 1 else ''}"
    by_step = {
        report.step: link for report, link in zip(reports, links, strict=True) if report.step is not None
    }
    history = watch_picture(directory, watched, by_step) if watched else None
    ran = [
        _Ran(f"Step {step.step}", by_step.get(step.step, ""), step.seconds, step.exposed_s)
        for step in watched
    ] or [
        _Ran(page_title(report), link, report.span_us / 1e6, stage_seconds(report))
        for report, link in zip(reports, links, strict=True)
    ]
    sections = "".join(
        _sections(reports, links, ran, history) if reports else _uncaptured(directory, ran, history)
    )
    data = {**_data(reports, links), **(history.data() if history else {})}
    drawn = {"watch": data.get("watch", []), "stages": data["steps"], "lost": data["steps"]}
    data["axis"] = {kind: axis_top([sum(bar[kind].values()) for bar in bars]) for kind, bars in drawn.items()}
    return document(visible(directory.resolve().name), count, sections, data, _SCRIPTS)


def _sections(
    reports: Sequence[Report], links: Sequence[str], ran: Sequence[_Ran], history: WatchPicture | None
) -> Iterator[str]:
    yield figures_section(_figures(reports, ran))
    yield f'<section id="findings" aria-label="What changed">{_story(reports, links, ran)}</section>'
    if history:
        yield history.picture()
    yield section("Stages of each step", '<div id="stages" class="trend"></div>')
    note = f"{reports[0].whose.title()}-seconds that are idle or wait for other ranks, by cause."
    if any(report.lost for report in reports):
        yield section("Lost time of each step", '<div id="lost" class="trend"></div>', note)
    yield section("Steps", table("Steps", *_steps(reports, links)))
    for title, of, seconds in (
        ("Stages by step", "", map(stage_seconds, reports)),
        ("Lost time by step", note, (report.lost_s for report in reports)),
    ):
        yield section(title, _by_step(title, reports, links, seconds), of)
    if history:
        yield history.table()


def _uncaptured(run: Path, ran: Sequence[_Ran], history: WatchPicture | None) -> Iterator[str]:
    """Yield what there is of a run without a captured step."""
    if ran:
        yield figures_section(_figures([], ran))
    note = escape(visible(how_to_capture(run)))
    yield f'<section id="findings" aria-label="Captures"><p>{note}</p></section>'
    if history:
        yield history.picture()
        yield history.table()


def _figures(reports: Sequence[Report], ran: Sequence[_Ran]) -> Iterator[Figure]:
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
        causes = [report.lost_s for report in alike]
        total = {name: sum(row.get(name, 0.0) for row in causes) for row in causes for name in row}
        most = max(total, key=lambda name: total[name])
        line = f"{total[most] / sum(lost):.0%} {most.replace('_', ' ')}"
        yield Figure("Lost, median", alike[0].lane_seconds(median(lost)), line, f"k-{most}")
    index = slowest(took)
    over = took[index] - median(took)
    line = f"{duration(took[index])}, {duration(over, signed=True)} over the median"
    if took[0] > took[index]:
        line += f"; the first took {duration(took[0])}"
    yield Figure("Slowest", ran[index].title, line)


def _story(reports: Sequence[Report], links: Sequence[str], ran: Sequence[_Ran]) -> str:
    alike = unaimed(reports)
    change = first_change([reports[index] for index in alike])
    if change is None:
        first = "No stage and no cause of lost time left its range."
        if len(alike) < 3:
            first = "What changed is said of three captured steps or more."
    else:
        changed = alike[change.index]
        first = _changed(change, reports[changed], _anchor(page_title(reports[changed]), links[changed]))
    if apart := len(reports) - len(alike):
        captures = f"{apart} captures that were" if apart > 1 else "one capture that was"
        first += f" Left out, because what was recorded may differ: {captures} asked for."
    index = slowest([step.seconds for step in ran])
    found = excess([step.stages for step in ran], index) if len(ran) > 1 else None
    second = ""
    if found:
        name, seconds = found
        second = (
            f"<p>Slowest: {_anchor(ran[index].title, ran[index].link)}; most of what it has over the median "
            f"is in <bdi>{escape(visible(name) or IN_NO_STAGE)}</bdi> ({duration(seconds, signed=True)}).</p>"
        )
    return f"<p>{first}</p>{second}"


def _changed(change: Change, report: Report, link: str) -> str:
    what, took, before = change.name, duration(change.seconds), duration(change.before)
    if change.kind == "cause":
        what = f"lost time, {change.name.replace('_', ' ')}"
        took, before = report.lane_seconds(change.seconds), report.lane_seconds(change.before)
    return (
        f"Changed first: <bdi>{escape(what)}</bdi> in {link}, {took} "
        f"(median of {change.steps_before} before: {before})."
    )


def _anchor(title: str, link: str) -> str:
    shown = f"<bdi>{escape(title)}</bdi>"
    return f'<a href="{escape(link)}">{shown}</a>' if link else shown


def _steps(reports: Sequence[Report], links: Sequence[str]) -> tuple[tuple[str, ...], list[list[Cell]]]:
    lost_unit = f"lost {reports[0].whose}-seconds"
    headings = ("step", "took", "busy", lost_unit, "most lost by", "slowest stage", "first finding")
    rows = []
    for report, link in zip(reports, links, strict=True):
        lost, stages, busy = report.lost_s, stage_seconds(report), report.working_share
        cause = max(lost, key=lambda name: lost[name], default="")
        stage = max(stages, key=lambda name: stages[name], default="")
        rows.append(
            [
                named(page_title(report), link),
                timed(report.span_us / 1e6),
                Cell(busy, "" if busy is None else f"{busy:.1%}"),
                timed(sum(lost.values())),
                named(cause.replace("_", " ")),
                named(stage),
                named(report.findings[0].text, link) if report.findings else named(""),
            ]
        )
    return headings, rows


def _by_step(
    title: str, reports: Sequence[Report], links: Sequence[str], times: Iterable[dict[str, float]]
) -> str:
    """Return a table with a row for each step and a column for each name."""
    found = list(times)
    names = list(dict.fromkeys(name for row in found for name in row))
    rows = [
        [named(page_title(report), link), *(timed(row.get(name)) for name in names)]
        for report, link, row in zip(reports, links, found, strict=True)
    ]
    return table(title, ("step", *names), rows) if names else ""


def _data(reports: Sequence[Report], links: Sequence[str]) -> dict[str, Any]:
    stages, causes = list(map(stage_seconds, reports)), [report.lost_s for report in reports]
    return {
        "steps": [
            {
                "name": str(report.step) if report.step is not None else page_title(report),
                "link": link,
                "stages": stages[index],
                "lost": causes[index],
            }
            for index, (report, link) in enumerate(zip(reports, links, strict=True))
        ],
        "stages": {name: stage_class(name) for row in stages for name in row},
        "lost": {name: f"k-{name}" for row in causes for name in row},
    }
