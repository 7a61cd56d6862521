"""Tables for the terminal: 80 to 100 columns wide, numbers never wrapped, long names shortened with ``…``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

_WIDTH = 100
_NAME = 44


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|min|h|d|kB|MB|GB|TB)\b)")
_KEPT = "\ue000"  # private-use character, at which rich does not wrap


class Sentence(Text):
    """A text that keeps a number and its unit on one line."""

    @classmethod
    def of(cls, markup: str) -> Sentence:
        """Return the sentence of some rich markup."""
        sentence = cls()
        sentence.append_text(Text.from_markup(markup))
        return sentence

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        """Return the lines of the text, each at most ``width`` columns."""
        kept = self.copy()
        kept.plain = _BEFORE_UNIT.sub(_KEPT, self.plain)
        lines = Text.wrap(kept, console, width, **options)
        for line in lines:
            line.plain = line.plain.replace(_KEPT, " ")
        return lines


def fitting_console(console: Console) -> Console:
    """Return a console for the same file, as wide as the terminal but at most 100 columns."""
    width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    return Console(file=console.file, width=width, highlight=False)


def shortened(name: str) -> str:
    """Return a name of at most 44 characters; the middle is cut, because kernel names differ at both ends."""
    if len(name) <= _NAME:
        return name
    head = _NAME * 2 // 3
    return f"{name[:head]}…{name[head + 1 - _NAME :]}"


def table_of(title: str, headings: Sequence[str], texts: Collection[int] = ()) -> Table:
    """Return a table; the first column and those in ``texts`` are wrapped text, all others numbers."""
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
