"""How the commands work: steps one by one, with warnings and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verl_profiling.analysis import CapturedStep, open_steps
from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.run_files import clear_leftovers
from verl_profiling.timeline.content import Limits
from verl_profiling.visible import visible


class StepByStep:
    """The steps under a path, of which the damage of one costs that one, and is said.

    Args:
        paths: What the user named.
        limits: How much of each trace is read.
        communication: Regular expressions of kernels that communicate, besides those that are known.

    Raises:
        TraceFormatError: There is nothing to analyse.

    Attributes:
        steps: The captures that can be read, of one step each unless they are continuous.
        exit_code: 0 while all is well.
    """

    def __init__(self, paths: Sequence[Path], limits: Limits, communication: Sequence[str] = ()) -> None:
        self.steps, problems = open_steps(paths, limits, communication)
        self._failures: list[TraceFormatError] = []
        self.exit_code = EXIT_FINDING if problems else EXIT_OK
        left = {step.directory for step in self.steps}
        for problem in (*problems, *(sentence for folder in left for sentence in clear_leftovers(folder))):
            warn(problem)

    @property
    def each(self) -> list[CapturedStep]:
        """The steps one by one, those of a continuous capture too."""
        return [step for capture in self.steps for step in capture.by_step()]

    @property
    def traces(self) -> int:
        """Number of traces and logs in all captures."""
        return sum(len(step.inputs.sources) + len(step.inputs.logs) for step in self.steps)

    def output_for_one(self, output: Path | None) -> None:
        """Check that there is one step where its result goes to one file or folder.

        Raises:
            ConfigError: There are several.
        """
        if output and len(self.steps) > 1:
            titles = ", ".join([*(step.inputs.title for step in self.steps[:3]), "..."][: len(self.steps)])
            raise ConfigError("--output", f"needs a single step, but there are {len(self.steps)}: {titles}")

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

    def problem(self, sentence: str) -> None:
        """Say what is wrong with a step, and exit with 1."""
        warn(sentence)
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
