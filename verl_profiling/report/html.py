"""Renders the report of a step as one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from verl_profiling.report.model import Finding, Report
from verl_profiling.report.page.colours import cause_key
from verl_profiling.report.page.document import document, figures_section, section, stacked, table
from verl_profiling.report.page.picture import picture
from verl_profiling.report.sentences import asked_sentences, figures, rollout_sentences, sentences
from verl_profiling.report.tables import TABLES, Cell
from verl_profiling.units import duration

_SCRIPTS = ("picture.js",)
_WHERE = 3


def render_html(report: Report) -> str:
    """Return the HTML page of a report."""
    parts = [f"policy version {report.policy_version}"] if report.policy_version is not None else []
    parts.append(f"{report.coverage.events:,} events{report.of_capture}")
    content = "".join(_sections(report))
    return document(page_title(report), " · ".join(parts), content, picture(report), _SCRIPTS)


def page_title(report: Report) -> str:
    """Return the title of a report's page."""
    return f"S{report.title[1:]}" if report.title.startswith("step ") else report.title


def summary(report: Report) -> str:
    """Return the main figures and the findings; the first finding is shown, the others are folded."""
    early = "The step ended early; this is what was recorded until then."
    items = [_sentence(finding, len(report.workers)) for finding in report.findings]
    first, *others = items or ["Nothing stands out: no finding is above its threshold."]
    more = "".join(f"<li>{item}</li>" for item in others)
    if others:
        more = f'<details><summary>{len(others)} more</summary><ol start="2">{more}</ol></details>'
    calm = "" if items else ' class="calm"'
    return (
        ("" if report.complete else f'<p class="early">{early}</p>')
        + figures_section(figures(report))
        + f'<section id="findings"{calm} aria-label="Findings"><p>{first}</p>{more}</section>'
    )


def _sentence(finding: Finding, lanes: int) -> str:
    """Return a finding with its advice; lanes missing from its text are listed, unless it is about all."""
    words = re.findall(r"\w+", finding.text)
    named = [name for name in finding.lanes if name not in words] if len(finding.lanes) < lanes else []
    listed = ", ".join(named[:_WHERE]) + (f" and {len(named) - _WHERE} more" if len(named) > _WHERE else "")
    where = f" <span>Where: {escape(listed)}.</span>" if listed else ""
    return f"{escape(finding.text)}{where} <span>Try: {escape(finding.advice)}.</span>"


def _sections(report: Report) -> Iterator[str]:
    if said := _listed(asked_sentences(report.asked), "p"):
        yield f'<section id="asked" aria-label="Who asked for the capture">{said}</section>'
    yield summary(report)
    before = {"stages": _picture(report), "rollout_time": _rollout(report), "stragglers": _tail(report)}
    for name, spec in TABLES.items():
        yield before.get(name, "")
        found = spec.rows_shown(report)
        headings, cells = spec.cells(found[: spec.most])
        keys = [spec.key(row) for row in found[: spec.most]] if spec.key else []
        bar = ""
        if name == "lost":
            total = sum(row.seconds for row in report.lost)
            bar = stacked((f"k-{row.cause}", row.seconds / (total or 1.0), row.cause) for row in report.lost)
        more = f"{len(found) - spec.most:,} more are in report.json and in the CSV."
        note = " ".join(filter(None, (spec.note_on(report), more if len(found) > spec.most else "")))
        yield section(spec.title, bar * bool(cells) + table(spec.title, headings, cells, keys), note)
    yield _reported(report)
    lines = [
        *sentences(report),
        *(f"missing: {sentence}" for sentence in report.coverage.missing),
        *(f"note: {note}" for note in report.notes),
    ]
    yield section("About this step", f"<ul>{_listed(lines, 'li')}</ul>")


def _listed(lines: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(line)}</{tag}>" for line in lines)


def _picture(report: Report) -> str:
    if not report.gantt and not report.workers:
        return ""
    command = escape(f"verl-profiling view {report.directory}")
    return section(
        "Lanes over time",
        '<div id="tools" class="tools"></div><div id="picture" class="picture"></div>'
        f'<p id="view" class="note" hidden>Every kernel on one timeline: run <code>{command}</code>; '
        "this page then links into it.</p>"
        "<noscript><p>A script draws the picture; the tables below need none.</p></noscript>",
    )


def _rollout(report: Report) -> str:
    """Return the section on the whole rollout, with a stacked bar for each breakdown by cause."""
    rollout = report.rollout
    if rollout is None:
        return ""
    last = rollout.last
    bars = (
        ("All trajectories", [row for row in rollout.causes if not row.validate]),
        (f"The last {last.trajectories:,} of {last.of:,}" if last else "", last.parts if last else []),
        ("Validation", [row for row in rollout.causes if row.validate]),
        ("The rollout on the wall clock", rollout.time),
    )
    content = f"<ul>{_listed(rollout_sentences(rollout), 'li')}</ul>"
    for title, parts in bars:
        if parts:
            whole = duration(sum(part.seconds for part in parts))
            most = ", ".join(f"{part.cause} {part.share:.0%}" for part in parts[:3])
            content += (
                f'<p class="bar"><b>{escape(title)}, {whole}</b> '
                f'<span class="note"><bdi>{escape(most)}</bdi></span></p>'
            )
            content += stacked((cause_key(part.cause), part.share, part.cause) for part in parts)
    return section("Rollout", content, "The causes of each bar add up to its time.")


def _tail(report: Report) -> str:
    if report.tail is None:
        return ""
    return section(
        "Rollout tail", '<div id="tail" class="chart"></div>', "What is done over time (dashed: the median)."
    )


def _reported(report: Report) -> str:
    """Return the section of the loop's metrics, folded by their prefix."""
    groups: dict[str, list[tuple[Cell, Cell]]] = {}
    for name, value in report.metrics.items():
        prefix = name.partition("/")[0] if "/" in name else "others"
        groups.setdefault(prefix, []).append((Cell(name, name), Cell(value, f"{value:,.6g}")))
    content = "".join(
        f"<details><summary><bdi>{escape(prefix)}</bdi> ({len(rows)})</summary>"
        f"{table(prefix, ('metric', 'value'), rows)}</details>"
        for prefix, rows in groups.items()
    )
    field = '<input id="filter" type="search" placeholder="filter" aria-label="filter metrics" hidden>'
    note = "What the training loop logged for the step."
    return section("Reported by the loop", content and field + content, note)
