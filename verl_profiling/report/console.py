"""The width of texts on a terminal, and the form of tables there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Largest number of columns of a text."""


def fitting_console(console: Console) -> Console:
    """Return a console for the same file with the width of the terminal, at most 100 columns."""
    width = WIDTH
    if console.is_terminal:
        width = min(console.width, WIDTH)
    return Console(file=console.file, width=width, highlight=False)


def table_of(title: str, headings: Sequence[str], texts: Collection[int] = ()) -> Table:
    """Return a table; the first column and the columns in ``texts`` are wrapped text, all others
    numbers.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        min_width=len(title),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for at, heading in enumerate(headings):
        is_number = bool(at) and at not in texts
        table.add_column(
            heading,
            overflow="ellipsis" if is_number else "fold",
            justify="right" if is_number else "left",
            no_wrap=is_number,
        )
    return table
