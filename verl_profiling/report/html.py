"""Renders the report of a step as one self-contained HTML page;
the page of a run uses the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import msgspec

from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.numbers.report_columns import (
    PartRow,
    sum_of,
)
from verl_profiling.report.colours import cause_key
from verl_profiling.report.findings import calm
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.picture import picture
from verl_profiling.report.summary_text import (
    Figure,
    figures,
    request_sentences,
    rollout_sentences,
    sentences,
)
from verl_profiling.report.tables import (
    TABLES,
    Cell,
    Table,
    cells,
    named,
    unshown,
    without_middle,
)
from verl_profiling.units import duration, listed

_TOP = 10  # rows of a folded table, as in page.css
_LONGEST_NAME = 64
_INDENT = "\N{NO-BREAK SPACE}"


def document(
    title: str,
    subtitle: str,
    sections: str,
    data: dict[str, Any] | None = None,
    *,
    follows: bool = False,
) -> str:
    """Return a page that loads no other files, and is readable and printable without scripts.

    Args:
        title: Heading of the page, as plain text.
        subtitle: Line beside the heading, as plain text.
        sections: Content of the page, as HTML.
        data: Data of the picture; ``None`` for a page without a picture.
        follows: Whether the page fetches itself again and again, and shows what is new.
    """
    drawn = ""
    if follows:
        drawn = _script("follow.js")
    if data is not None:  # escaped: no name in it can end the script
        text = msgspec.json.encode(data).decode()
        text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        drawn = f'<script type="application/json" id="data">{text}</script>'
        drawn += f"<script>{_file('d3.min.js')}</script>{_script('picture.js')}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)} · verl-profiling</title><link rel="icon" href="data:,">'
        f"<style>{_file('page.css')}</style></head><body>"
        f"<header><h1><bdi>{escape(title)}</bdi></h1><p>{escape(subtitle)}</p>"
        '<button id="theme" type="button" title="switch theme">light / dark</button></header>'
        f"<main>{sections}</main>{_script('page.js')}{drawn}</body></html>\n"
    )


def _script(name: str) -> str:
    return f'<script>"use strict";\n(() => {{\n{_file(name)}\n}})();</script>'


def figures_section(items: Iterable[Figure]) -> str:
    """Return the row of main figures."""
    shown = ""
    for title, value, line, key in items:
        number, _, unit = value.partition(" ") if value.endswith("-seconds") else (value, "", "")
        small = ""
        if unit:
            small = f" <small>{escape(unit)}</small>"
        mark = ""
        if key:
            mark = f'<i class="{escape(key)}"></i>'
        shown += (
            f"<div><dt>{escape(title)}</dt><dd><strong>{escape(number)}{small}</strong>"
            f"<span>{mark}<bdi>{escape(line)}</bdi></span></dd></div>"
        )
    return f'<section id="figures" aria-label="Main figures"><dl>{shown}</dl></section>'


def section(title: str, content: str, note: str = "") -> str:
    """Return a section of the page, or ``""`` without content."""
    if not content:
        return ""
    slug = title.lower().replace(" ", "-")
    remark = ""
    if note:
        remark = f'<p class="note">{escape(note)}</p>'
    return f'<section id="{slug}"><h2>{escape(title)}</h2>{remark}{content}</section>'


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], keys: Sequence[str] = ()
) -> str:
    """Return a table as HTML, or ``""`` without rows.

    Args:
        title: Label of the table for screen readers.
        headings: Headings of the columns.
        rows: A cell for each column.
        keys: CSS class of the coloured square before each row's first cell.
    """
    if not rows:
        return ""
    head = "".join(
        f'<th scope="col"><button type="button">{escape(h)}</button></th>' for h in headings
    )
    body = ""
    for row, key in zip(rows, keys or [""] * len(rows), strict=True):
        body += f"<tr>{''.join(_cells(row, key))}</tr>"
    more = f'<label class="fold"><input type="checkbox"> all {len(rows)}</label>' * (
        len(rows) > _TOP
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
    )


def stacked(parts: Iterable[tuple[str, float, str]]) -> str:
    """Return a stacked bar; each part has the CSS class of its colour, a share and a name."""
    bar = "".join(
        f'<i class="{escape(key)}" style="flex-grow: {100 * share:.3f}" '
        f'title="{escape(f"{name}: {share:.1%}")}"></i>'
        for key, share, name in parts
        if share >= 0.001
    )
    if bar:
        return f'<div class="stacked" aria-hidden="true">{bar}</div>'
    return ""


def _cells(row: Sequence[Cell], key: str) -> Iterable[str]:
    mark = f'<i class="{escape(key)}"></i>' if key else ""
    for value, text, link in row:
        if value is None:
            yield '<td class="n" data-v="-1">&ndash;</td>'
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = _anchor(escape(text), link)
            yield f'<td class="n" data-v="{value:g}">{mark}{number}</td>'
        else:
            name = _name(text) if value else f'<bdi class="said">{escape(text)}</bdi>'
            yield f"<td>{mark}{_anchor(name, link)}</td>"
        mark = ""


def _anchor(shown: str, address: str) -> str:
    if address:
        return f'<a href="{escape(address)}">{shown}</a>'
    return shown


def _name(name: str) -> str:
    """Return a name as HTML; the middle of a long name is folded,
    because kernels differ at both ends.
    """
    indent = _INDENT * (len(name) - len(name.lstrip(" ")))
    name = name.lstrip(" ")
    if len(name) <= _LONGEST_NAME:
        return f"<bdi>{indent}{escape(name)}</bdi>"
    short = escape(without_middle(name, _LONGEST_NAME))
    return f"<details><summary><bdi>{short}</bdi></summary><bdi>{escape(name)}</bdi></details>"


@cache
def _file(name: str) -> str:
    return (resources.files("verl_profiling.report") / "page" / name).read_text(encoding="utf-8")


def render_html(report: Report) -> str:
    """Return the HTML page of a report."""
    subtitle = f"{report.coverage.events:,} events{report.of_capture}"
    if report.policy_version is not None:
        subtitle = f"policy version {report.policy_version} · {subtitle}"
    drawn = None
    if report.gantt or report.workers:
        drawn = picture(report)
    return document(page_title(report), subtitle, "".join(_sections(report)), drawn)


def page_title(report: Report) -> str:
    """Return the title of a report's page."""
    if report.title.startswith("step "):
        return f"S{report.title[1:]}"
    return report.title


def summary(report: Report) -> str:
    """Return the main figures and the findings; all findings but the first are folded."""
    early = "The step ended early; this report covers the recorded part."
    items = [_sentence(finding, len(report.workers)) for finding in report.findings]
    first, *others = [*filter(None, [calm(report)]), *items]
    more = "".join(f"<li>{item}</li>" for item in others)
    if others:
        more = f'<details><summary>{len(others)} more</summary><ol start="2">{more}</ol></details>'
    green = ""
    if calm(report):
        green = ' class="calm"'
    return (
        ("" if report.complete else f'<p class="early">{early}</p>')
        + figures_section(figures(report))
        + f'<section id="findings"{green} aria-label="Findings"><p>{first}</p>{more}</section>'
    )


def _sentence(finding: Finding, lanes: int) -> str:
    """Return a finding with its advice, and with the lanes that its text does not name, unless it
    is about all lanes.
    """
    words = re.findall(r"\w+", finding.text)
    where = [name for name in finding.lanes if name not in words]
    sentence = escape(finding.text)
    if where and len(finding.lanes) < lanes:
        sentence += f" <span>Where: {escape(listed(where))}.</span>"
    if finding.advice:
        sentence += f" <span>Try: {escape(finding.advice)}.</span>"
    return sentence


def _sections(report: Report) -> Iterator[str]:
    said = _listed(request_sentences(report.capture_request), "p")
    if said:
        yield f'<section id="request" aria-label="Request for the capture">{said}</section>'
    yield summary(report)
    before = {"stages": _picture(report), "rollout_time": _rollout(report)}
    for name, spec in TABLES.items():
        yield before.get(name, "") + _table(report, spec)
    rows = [(named(name), Cell(value, f"{value:,.6g}")) for name, value in report.metrics.items()]
    reported = table("metrics", ("metric", "value"), rows)
    yield section("Reported by the loop", reported, "What the training loop logged for the step.")
    about = [*sentences(report), *unshown(report)]
    about += [f"missing: {sentence}" for sentence in report.coverage.missing]
    about += [f"note: {note}" for note in report.notes]
    yield section("About this step", f"<ul>{_listed(about, 'li')}</ul>")


def _table(report: Report, spec: Table) -> str:
    """Return the section of a table; the table ``lost`` has a stacked bar above it."""
    shown = spec.rows_shown(report)
    rows = shown[: spec.most]
    headings, lines = cells(rows)
    keys = list(map(spec.key, rows)) if spec.key else []
    content = table(spec.title, headings, lines, keys)
    if content and spec.name == "lost":
        total = sum_of(report.lost, "seconds") or 1.0
        bar = stacked(
            (f"k-{row.cause}", row.seconds / total, cause_name(row.cause)) for row in report.lost
        )
        content = bar + content
    where = " are in report.json and in the CSV"
    return section(spec.title, content, spec.note_on(report, len(shown) - spec.most, where))


def _listed(lines: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(line)}</{tag}>" for line in lines)


def _picture(report: Report) -> str:
    if not report.gantt and not report.workers:
        return ""
    command = escape(f"verl-profiling view {report.directory}")
    return section(
        "Lanes over time",
        '<div id="tools" class="tools"></div><div id="picture" class="picture"></div>'
        '<p id="view" class="note" hidden>Every kernel on one timeline: run '
        f"<code>{command}</code>; "
        "this page then links into it.</p>"
        "<noscript><p>A script draws the picture; the tables below need none.</p></noscript>",
    )


def _rollout(report: Report) -> str:
    """Return the section on the rollout, with stacked bars by cause: of all trajectories, of the
    last, ...
    """
    rollout = report.rollout
    if rollout is None:
        return ""
    bars: dict[str, Sequence[PartRow]] = {
        "All trajectories": [row for row in rollout.causes if not row.validate]
    }
    last = rollout.last
    if last:
        bars[f"The last {last.trajectories:,} of {last.of:,}"] = last.parts
    bars["Validation"] = [row for row in rollout.causes if row.validate]
    bars["The rollout on the wall clock"] = rollout.time
    content = f"<ul>{_listed(rollout_sentences(rollout), 'li')}</ul>"
    for title, parts in bars.items():
        if parts:
            whole = duration(sum_of(parts, "seconds"))
            most = ", ".join(f"{part.cause} {part.share:.0%}" for part in parts[:3])
            content += (
                f'<p class="bar"><b>{escape(title)}, {whole}</b> '
                f'<span class="note"><bdi>{escape(most)}</bdi></span></p>'
            )
            content += stacked((cause_key(part.cause), part.share, part.cause) for part in parts)
    return section("Rollout", content, "The causes of each bar add up to its time.")


class NotebookReport(Report, frozen=True, kw_only=True):
    """A report that a notebook shows as its page, in a sandboxed frame."""

    def _repr_html_(self) -> str:
        page = render_html(self)
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="{escape(repr(self))}" '
            'style="width: 100%; height: 720px; border: 0"></iframe>'
        )
