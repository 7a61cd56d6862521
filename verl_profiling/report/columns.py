"""Tables for the terminal: from 80 to 100 columns, numbers in one piece, long names cut with a sign."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["fitting_console", "shortened", "table_of"]

_WIDTH = 100
_NAME = 44


def fitting_console(console: Console) -> Console:
    """Return a console for the same file, as wide as the terminal but at most 100 columns."""
    width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    return Console(file=console.file, width=width, highlight=False)


def shortened(name: str) -> str:
    """Return a name of at most 44 characters, without its middle: kernels differ at their ends, too."""
    if len(name) <= _NAME:
        return name
    head = _NAME * 2 // 3
    return f"{name[:head]}…{name[head + 1 - _NAME :]}"


def table_of(title: str, first: str, *headings: str) -> Table:
    """Return a table with a column for names, which wrap, and columns for numbers, which do not."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        min_width=len(title),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
