"""What the commands share: the path argument and the progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["add_path", "progress"]


def add_path(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names what to work on."""
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="step folder, run folder, trace, or folder of traces"
    )


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """Show a progress bar on standard error when that is a terminal; yields what advances it."""
    console = Console(stderr=True)
    count = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: object) -> None:
            bar.advance(task)

        yield advance
