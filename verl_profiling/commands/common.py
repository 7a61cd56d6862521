"""Common parts of the commands that read runs and steps: options, and reading with warnings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiling.commands import local_path, option
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import clear_leftovers
from verl_profiling.units import visible

if TYPE_CHECKING:  # they are imported where steps are read: `top` reads none
    from verl_profiling.analysis import CapturedStep
    from verl_profiling.report.model import Report


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ``PATH``, one or several."""
    parser.add_argument(
        "paths",
        type=local_path,
        nargs="+",
        metavar="PATH",
        help="step folder, run folder, trace, or folder of traces; several traces or folders of "
        "them are one capture",
    )


def add_communication(parser: argparse.ArgumentParser) -> None:
    """Add the option for further communication kernels."""
    help = "regular expression of further communication kernels; repeatable"
    option(parser, "--communication PATTERN", help, lambda pattern: [pattern], many=True)


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--ray``."""
    help = (
        "read each trace on the node of a Ray cluster that has it; without an address, in the "
        "cluster that runs here"
    )
    option(parser, "--ray [ADDRESS]", help, const="auto")


class StepByStep:
    """The steps under some paths; a damaged step is skipped with a warning.

    Args:
        paths: The paths on the command line.
        communication: Regular expressions; kernels whose names match count as communication, too.
        ray: Address of the Ray cluster that reads the traces; ``None`` for this host.

    Raises:
        TraceFormatError: There is nothing to analyse.

    Attributes:
        steps: The readable captures. Only a continuous capture has several steps.
        each: The steps of these captures, one object per step.
        is_well: Whether there was no warning, and no data is missing.
    """

    def __init__(
        self, paths: Sequence[Path], communication: Sequence[str] = (), ray: str | None = None
    ) -> None:
        from verl_profiling.analysis import open_steps

        self.steps, problems = open_steps(paths, communication=communication, ray=ray)
        self.each = [step for capture in self.steps for step in capture.by_step()]
        self._failures: list[TraceFormatError] = []
        self.is_well = True
        for problem in problems:
            self.problem(problem)
        for folder in {step.directory for step in self.steps}:
            clear_leftovers(folder)

    def reports(self, *, keep_graphs: bool = False) -> list[tuple[CapturedStep, Report]]:
        """Return each step with its report; a continuous capture is split into its steps.

        Args:
            keep_graphs: Whether each step keeps its :attr:`~CapturedStep.graph`.
        """
        reports = []
        with self.reading() as advance:
            for step in self.each:
                with self.surviving():
                    reports.append((step, step.report(advance, keep_graph=keep_graphs)))
                    if reports[-1][1].coverage.missing:
                        self.is_well = False
        return reports

    def reading(self) -> AbstractContextManager[Callable[[object], None]]:
        """Show how many traces of all steps are read; yield the function to call after each."""
        return progress("reading", sum(len(step.inputs.sources) for step in self.each))

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Convert a trace error of one step into a warning.

        Raises:
            TraceFormatError: Every step has failed.
        """
        try:
            yield
        except TraceFormatError as error:
            self._failures.append(error)
            if len(self._failures) == len(self.steps):
                raise
            self.problem(str(error))

    def problem(self, sentence: str) -> None:
        """Print a warning about a step, for which the command exits with 1."""
        warn(sentence)
        self.is_well = False


def warn(problem: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {visible(problem)}", file=sys.stderr)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """Show a progress bar on standard error if it is a terminal; yield the function that advances
    the bar.

    Args:
        what: The work, as one word, e.g. ``reading``.
        total: Number of calls of the function until the work is done.
    """
    from rich.console import Console  # `check` prints no table

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    # without a bar, it would be a fifth of the imports of a command
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    count = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task)
