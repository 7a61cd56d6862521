"""The shell of a page: one file with its style, its scripts and its data, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import msgspec

from verl_profiling.report.sentences import Figure

_LIBRARY = "d3.min.js"
_SHARED = ("common.js", "tables.js")


def document(title: str, subtitle: str, sections: str, data: Any, scripts: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: Its heading, as plain text.
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


def _embedded(data: Any) -> str:
    """Return JSON in which no name can end the element that it stands in."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _file(name: str) -> str:
    return resources.files("verl_profiling.report.page").joinpath(name).read_text(encoding="utf-8")
