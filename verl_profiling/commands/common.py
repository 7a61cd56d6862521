"""Common parts of the commands: options, parsers of values, output, and steps with warnings."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.files.opener import clear_leftovers
from verl_profiling.files.remote import is_url
from verl_profiling.typed_values import Size, value_of
from verl_profiling.units import visible

if TYPE_CHECKING:  # they are imported where steps are read: `top` reads none
    from verl_profiling.analysis import CapturedStep
    from verl_profiling.report.model import Report


def option(
    parser: argparse._ActionsContainer,
    usage: str,
    help: str,
    read: Callable[[str], Any] = str,
    *,
    many: bool = False,
    **more: Any,
) -> None:
    """Add an option to a parser.

    Args:
        parser: The parser.
        usage: Names of the option and of its value: ``--json`` (a switch), ``-o --output FILE``,
            ``--ray [ADDRESS]`` (the value may be left out).
        help: Description of the option.
        read: Function that parses the value.
        many: Whether ``read`` returns several values; the option is repeatable, and collects them.
        more: Further arguments of ``add_argument``.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    if value := usage.removeprefix(" ".join(names)).strip():
        if value.startswith("["):
            more["nargs"] = "?"
        if many:
            more |= {"action": "extend", "default": []}
        parser.add_argument(*names, metavar=value.strip("[]"), type=read, help=help, **more)
    else:
        parser.add_argument(*names, action="store_true", help=help, **more)


def add_json(parser: argparse.ArgumentParser, documents: str = "one document") -> None:
    """Add the option ``--json``.

    Args:
        parser: The parser.
        documents: How many documents the command prints, for the help: ``one document per step``.
    """
    option(parser, "--json", f"print JSON, {documents} (see docs/commands.md)")


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


def names(text: str) -> list[str]:
    r"""Parse a list of names, e.g. ``rollout,reward``; a comma of a name is written ``\,``.

    Raises:
        ArgumentTypeError: A name is empty.
    """
    parts = re.split(r"(?<!\\),", text)
    listed = [part.replace("\\,", ",").strip() for part in parts]
    if not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as A,B")
    return listed


def local_path(text: str) -> Path:
    """Parse an argument as a local path.

    Raises:
        argparse.ArgumentTypeError: The argument is a URL.
    """
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and the commands read folders: copy the step folder here "
            "first, e.g. with "
            f"`python -c \"import fsspec; fs, path = fsspec.url_to_fs('{text}'); "
            "fs.get(path, 'copy', "
            'recursive=True)"`'
        )
    return Path(text)


def size(text: str) -> int:
    """Parse a size in bytes, e.g. ``200M`` or ``1.5G``.

    Raises:
        ArgumentTypeError: The text is not a size.
    """
    with suppress(ConfigError):
        size: int = value_of(Size, text, "size")
        if size:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 200M")


def count(text: str) -> int:
    """Parse an integer of at least 1.

    Raises:
        ArgumentTypeError: The text is not such an integer.
    """
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def at_least_0(kind: str) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least 0.

    Args:
        kind: Description of the number for the error, e.g. ``a time in seconds such as 2``.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
        return value

    return read


def percentage(text: str) -> float:
    """Parse a percentage, e.g. ``5%`` or ``5``.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    return at_least_0("a percentage such as 5%")(text.removesuffix("%"))


def print_json(document: object) -> None:
    """Print a document as one line of JSON."""
    try:
        text = msgspec.json.encode(document, enc_hook=str).decode()
    except UnicodeEncodeError:  # a path that is no UTF-8; json writes its bytes as escapes
        text = json.dumps(msgspec.to_builtins(document, enc_hook=str))
    print(text, flush=True)


def show(arguments: argparse.Namespace, document: object, lines: Iterable[str]) -> None:
    """Print a result: as one JSON document with ``--json``, else as lines of text."""
    if arguments.json:
        print_json(document)
        return
    for line in lines:
        print(visible(line), flush=True)


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

    done_of_all = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), done_of_all, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task)
