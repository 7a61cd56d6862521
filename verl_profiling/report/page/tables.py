"""Tables of a page: readable and printable as they are; the script sorts, folds and filters them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

from verl_profiling.units import byte_size, duration

__all__ = ["Cell", "Link", "Shown", "count", "number", "percent", "section", "size", "table", "time"]

_TOP = 10
_LONGEST_NAME = 64


class Shown(NamedTuple):
    """A number: as it is shown, and as it is sorted.

    Attributes:
        text: The number with its unit.
        value: The number in the unit of its column.
    """

    text: str
    value: float


class Link(NamedTuple):
    """A name that leads to another page.

    Attributes:
        text: The name.
        address: Address of the page, quoted.
    """

    text: str
    address: str


Cell: TypeAlias = str | Shown | Link | None
"""A name, a number, a link, or nothing."""


def time(seconds: float | None) -> Cell:
    """Return a time in the unit that fits."""
    return None if seconds is None else Shown(duration(seconds), seconds)


def percent(share: float) -> Cell:
    """Return a share in percent."""
    return Shown(f"{share:.1%}", share)


def count(items: int) -> Cell:
    """Return a number of things."""
    return Shown(f"{items:,}", items)


def size(size_bytes: float) -> Cell:
    """Return a number of bytes in the unit that fits."""
    return Shown(byte_size(round(size_bytes)), size_bytes)


def number(value: float) -> Cell:
    """Return any other number, with six digits."""
    return Shown(f"{value:,.6g}", value)


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


def _cells(row: Sequence[Cell], key: str) -> Iterable[str]:
    for column, cell in enumerate(row):
        mark = f'<i class="{escape(key)}"></i>' if key and not column else ""
        if cell is None:
            yield '<td class="n" data-v="-1">&ndash;</td>'
        elif isinstance(cell, Shown):
            yield f'<td class="n" data-v="{cell.value:g}">{escape(cell.text)}</td>'
        elif isinstance(cell, Link):
            yield f'<td><a href="{escape(cell.address)}"><bdi>{escape(cell.text)}</bdi></a></td>'
        else:
            yield f"<td>{mark}{_name(cell)}</td>"


def _name(name: str) -> str:
    """Return a name; a long one is without its middle, and opens: kernels differ at their ends, too."""
    if len(name) <= _LONGEST_NAME:
        return f"<bdi>{escape(name)}</bdi>"
    head = _LONGEST_NAME * 2 // 3
    short = f"{name[:head]}…{name[head + 1 - _LONGEST_NAME :]}"
    return f"<details><summary><bdi>{escape(short)}</bdi></summary><bdi>{escape(name)}</bdi></details>"
