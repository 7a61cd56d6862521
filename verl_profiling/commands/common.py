"""Common parts of the commands that read runs and steps: options, and reading with warnings."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verl_profiling.analysis import CapturedStep, open_steps
from verl_profiling.commands import local_path, option
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import clear_leftovers
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import WATCH_LOG, latest_step, read_watch_log
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.report.model import Report
from verl_profiling.report.watch_frame import (
    RunView,
    captures_so_far,
    logged_steps,
    thresholds_of,
    varying_stages,
)
from verl_profiling.steps.load import Load, load_of
from verl_profiling.steps.start_up import start_up_of
from verl_profiling.units import duration, visible

_CAPTURES = 5  # the most captures that a view of a run names
_RECENT = 1000  # steps by which stages are judged to vary: longer takes seconds


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


def load_of_step(step: CapturedStep) -> Load:
    """Return the load of a captured step.

    Raises:
        TraceFormatError: The step has no manifest, or no request that can be replayed.
    """
    if step.manifest is None:
        raise TraceFormatError(step.directory, "has no manifest, so its requests are unknown")
    load = load_of(step.manifest, step.inputs)
    if not load.requests:
        reason = load.said_left_out or "set rollout.requests, and give the engine to its mixin"
        raise TraceFormatError(step.directory, f"has no request that can be replayed: {reason}")
    return load


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


def watched(run: Path) -> tuple[list[StepSummary], str]:
    """Return the steps in the watch log of a run, and a sentence on a step that hangs.

    Warn if the log is unreadable.
    """
    try:
        lines = read_watch_log(run)
    except TraceFormatError as error:
        warn(str(error))
        return [], ""
    return logged_steps(lines), "".join(line.hangs for line in latest_step(lines))


def run_view(
    run: Path, info: RunInfo | None, steps: Sequence[StepSummary], hangs: str, note: str = ""
) -> RunView:
    """Return the present state of a run, for ``top``, ``report`` and the pages of a run.

    Args:
        run: The run's folder.
        info: The content of its ``run.json``; ``None`` without a readable file.
        steps: The steps in its watch log.
        hangs: A sentence on the step that hangs; empty if no step does.
        note: Advice for the user, e.g. on how to capture a step.
    """
    over = "" if info is None else info.over
    is_gone = info is not None and bool(over) and info.end_ns is None
    captures, latest = captures_so_far(run, _CAPTURES)
    return RunView(
        run=run,
        state=_state(run, info, over, hangs),
        hangs=hangs,
        is_over=bool(over),
        is_well=not hangs and not is_gone,
        watch=steps,
        varying=varying_stages(steps[-_RECENT:], thresholds_of(info)),
        captures=captures,
        latest=latest,
        note=note,
        start_up=start_up_of(run),
    )


def _state(run: Path, info: RunInfo | None, over: str, hangs: str) -> str:
    """Return the state of the job, and when its watch logged last, as text."""
    logged = "no step logged yet"
    with suppress(OSError):  # the log does not exist, or was just rotated
        quiet_s = time.time() - (run / WATCH_LOG).stat().st_mtime
        subject = "hang" if hangs else "last step"
        logged = f"{subject} logged {duration(max(round(quiet_s), 0))} ago"
    if info is None:
        return f"has no {RUN_NAME}; {logged}"
    return f"{over}; {logged}" if over else f"{info.process}, {logged}"


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
    console = Console(stderr=True)
    count = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), count, TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task)
