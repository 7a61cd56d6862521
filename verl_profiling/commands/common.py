"""What the commands share: the path argument, its steps one by one, and the progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verl_profiling.analysis import open_run
from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.errors import TraceFormatError
from verl_profiling.remote import is_url
from verl_profiling.visible import visible

__all__ = ["StepByStep", "add_path", "local_path", "progress", "warn"]


def local_path(text: str) -> Path:
    """Return the path that an argument is.

    Raises:
        argparse.ArgumentTypeError: It is a URL.
    """
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and the commands read folders: copy the step folder here first, e.g. with "
            f"`python -c \"import fsspec; fs, path = fsspec.url_to_fs('{text}'); fs.get(path, 'copy', "
            'recursive=True)"`'
        )
    return Path(text)


def add_path(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names what to work on."""
    parser.add_argument(
        "path", type=local_path, metavar="PATH", help="step folder, run folder, trace, or folder of traces"
    )


class StepByStep:
    """The steps under a path, of which the damage of one costs that one, and is said.

    Args:
        path: What the user named.

    Raises:
        TraceFormatError: There is nothing to analyse.

    Attributes:
        steps: The steps that can be read.
        exit_code: 0 while all is well.
    """

    def __init__(self, path: Path) -> None:
        self.steps, problems = open_run(path).steps_and_problems()
        self._failures: list[TraceFormatError] = []
        self.exit_code = EXIT_FINDING if problems else EXIT_OK
        for problem in problems:
            warn(problem)

    @property
    def traces(self) -> int:
        """Number of traces in all steps."""
        return sum(len(step.inputs.sources) for step in self.steps)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Let the work on one step fail, unless that fails with all of them.

        Raises:
            TraceFormatError: Nothing came of any step.
        """
        try:
            yield
        except TraceFormatError as error:
            self._failures.append(error)
            if len(self._failures) == len(self.steps):
                raise
            warn(str(error))
            self.exit_code = EXIT_FINDING


def warn(problem: str) -> None:
    """Say on standard error what did not work."""
    print(f"warning: {visible(problem)}", file=sys.stderr)


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
