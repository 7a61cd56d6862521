"""The shell of a page, which loads nothing, and its tables: readable and printable as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import msgspec

from verl_profiling.report.sentences import Figure
from verl_profiling.report.tables import Cell, without_middle

_LIBRARY = "d3.min.js"
_SHARED = ("common.js", "tables.js")
_TOP = 10
_LONGEST_NAME = 64
_INDENT = "\N{NO-BREAK SPACE}"


def document(title: str, subtitle: str, sections: str, data: Any, scripts: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: Heading of the page, as plain text.
        subtitle: The line beside the heading, as plain text.
        sections: Its content, as HTML.
        data: What its scripts draw.
        scripts: Names of the files in this folder that draw it, in the order in which they run.
    """
    program = "\n".join(_file(name) for name in (*_SHARED, *scripts))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)} · verl-profiling</title><link rel="icon" href="data:,">'
        f"<style>{_file('page.css')}</style></head><body>"
        f"<header><h1><bdi>{escape(title)}</bdi></h1><p>{escape(subtitle)}</p>"
        '<button id="theme" type="button" title="switch theme (t)">light / dark</button></header>'
        f'<main>{sections}</main><script type="application/json" id="data">{_embedded(data)}</script>'
        f'<script>{_file(_LIBRARY)}</script><script>"use strict";\n(() => {{\n{program}\n}})();</script>'
        "</body></html>\n"
    )


def figures_section(items: Iterable[Figure]) -> str:
    """Return the row of main figures."""
    shown = ""
    for title, value, line, key in items:
        number, _, unit = value.partition(" ") if value.endswith("-seconds") else (value, "", "")
        small = f" <small>{escape(unit)}</small>" if unit else ""
        mark = f'<i class="{escape(key)}"></i>' if key else ""
        shown += (
            f"<div><dt>{escape(title)}</dt><dd><strong>{escape(number)}{small}</strong>"
            f"<span>{mark}<bdi>{escape(line)}</bdi></span></dd></div>"
        )
    return f'<section id="figures" aria-label="Main figures"><dl>{shown}</dl></section>'


def section(title: str, content: str, note: str = "") -> str:
    """Return a section of the page, or nothing if it has no content."""
    if not content:
        return ""
    slug = title.lower().replace(" ", "-")
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section id="{slug}"><h2>{escape(title)}</h2>{remark}{content}</section>'


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], keys: Sequence[str] = ()
) -> str:
    """Return a table; without rows, nothing.

    Args:
        title: What a screen reader calls it.
        headings: Headings of the columns.
        rows: A cell for each column.
        keys: Classes of the colour key before each row's first cell.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col"><button type="button">{escape(h)}</button></th>' for h in headings)
    body = "".join(
        f"<tr>{''.join(_cells(row, keys[index] if keys else ''))}</tr>" for index, row in enumerate(rows)
    )
    top = button = ""
    if len(rows) > _TOP:
        top = f' data-top="{_TOP}"'
        button = f'<button class="fold" type="button" aria-expanded="false" hidden>all {len(rows)}</button>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table{top}><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{button}"
    )


def stacked(parts: Iterable[tuple[str, float, str]]) -> str:
    """Return a bar of parts side by side: the colour key, share and name of each."""
    bar = "".join(
        f'<i class="{escape(key)}" style="flex-grow: {100 * share:.3f}" '
        f'title="{escape(f"{name}: {share:.1%}")}"></i>'
        for key, share, name in parts
        if share >= 0.001
    )
    return f'<div class="stacked" aria-hidden="true">{bar}</div>' if bar else ""


def _cells(row: Sequence[Cell], key: str) -> Iterable[str]:
    for column, (value, text, link) in enumerate(row):
        mark = f'<i class="{escape(key)}"></i>' if key and not column else ""
        if value is None:
            yield '<td class="n" data-v="-1">&ndash;</td>'
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f'<td class="n" data-v="{value:g}">{mark}{_anchor(escape(text), link)}</td>'
        else:
            yield f"<td>{mark}{_anchor(_name(text), link)}</td>"


def linked(cell: Cell) -> str:
    """Return a name, as a link where it leads somewhere."""
    return _anchor(_name(cell.text), cell.link)


def _anchor(shown: str, address: str) -> str:
    return f'<a href="{escape(address)}">{shown}</a>' if address else shown


def _name(name: str) -> str:
    """Return a name; a long one is without its middle, and opens: kernels differ at their ends, too."""
    indent = _INDENT * (len(name) - len(name.lstrip(" ")))
    name = name.lstrip(" ")
    if len(name) <= _LONGEST_NAME:
        return f"<bdi>{indent}{escape(name)}</bdi>"
    short = escape(without_middle(name, _LONGEST_NAME))
    return f"<details><summary><bdi>{short}</bdi></summary><bdi>{escape(name)}</bdi></details>"


def _embedded(data: Any) -> str:
    """Return JSON in which no name can end the element that it stands in."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _file(name: str) -> str:
    return resources.files("verl_profiling.report.page").joinpath(name).read_text(encoding="utf-8")
