"""The command line, ``verl-profiling``: one thin subcommand per feature.

A subcommand is a function that adds its parser and names, with ``set_defaults(run=...)``,
the function that does the work and returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import verl_profiling
from verl_profiling.errors import ProfilingError
from verl_profiling.report.build import build_report
from verl_profiling.report.check import check
from verl_profiling.report.terminal import print_report
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import merge
from verl_profiling.timeline.sources import Source

__all__ = ["EXIT_BAD_INPUT", "EXIT_FINDING", "EXIT_OK", "main"]

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2

_EPILOG = """\
exit codes: 0 fine; 1 it worked and found what you asked it to look for (a damaged artifact);
2 wrong usage, or input that cannot be used. The reason is one line on standard error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="verl-profiling",
        description="One timeline and one report for every profiled step of RL post-training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl-profiling {verl_profiling.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (_add_merge, _add_report, _add_check):
        add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ProfilingError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `verl-profiling report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("interrupted")
    return code


def _add_merge(commands: _Commands) -> None:
    parser = _command(
        commands,
        "merge",
        "write one timeline of a step, to open in Perfetto",
        "Merges everything recorded for a step into STEP_DIR/timeline.json.gz: the controller's stages, "
        "the workers and the rollout engines, on one clock. For a run folder, one timeline per step. Takes "
        "plain trace files and folders of them as well.",
        "example: verl-profiling merge outputs/run/step_000012",
    )
    parser.add_argument("-o", "--output", type=Path, help="file to write (only for a single step)")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes to use (default: %(default)s)")
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    steps = find_steps(arguments.path)
    if arguments.output and len(steps) > 1:
        return _fail(f"--output needs a single step, but {arguments.path} holds {len(steps)}")
    with _progress("merging", sum(len(step.sources) for step in steps)) as advance:
        for step in steps:
            output = arguments.output
            if output is None and len(steps) > 1 and step.manifest is None:
                output = step.directory / f"timeline.step_{step.step or 0:06d}.json.gz"
            result = merge(step, output, jobs=arguments.jobs, on_progress=advance)
            for problem in result.problems:
                print(f"warning: {problem}", file=sys.stderr)
            print(f"{result.path}  ({result.bytes / 1e6:.1f} MB, {result.events:,} events)")
    return EXIT_OK


def _add_report(commands: _Commands) -> None:
    parser = _command(
        commands,
        "report",
        "say where the time of a step went",
        "Prints the step's anatomy, what each worker and each rollout engine did, and what is missing. "
        "Takes a step folder, a run folder, or plain traces.",
        "example: verl-profiling report outputs/run/step_000012 --json | jq .workers",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one document per step")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    steps = find_steps(arguments.path)
    with _progress("reading", sum(len(step.sources) for step in steps)) as advance:
        reports = [build_report(step, advance) for step in steps]
    for report in reports:
        if arguments.json:
            print(msgspec.json.encode(report).decode())
        else:
            print_report(report, Console())
    return EXIT_OK


def _add_check(commands: _Commands) -> None:
    parser = _command(
        commands,
        "check",
        "verify that every expected artifact is there and whole",
        "Reads every artifact that the manifests name, to the last byte. Exits 1 when one is missing, "
        "empty, truncated or unreadable.",
        "example: verl-profiling check outputs/run && echo complete",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    result = check(arguments.path)
    if arguments.json:
        print(msgspec.json.encode(result).decode())
    else:
        for entry in result.artifacts:
            events = f"  {entry.events:,} events" if entry.events is not None else ""
            reason = f"  {entry.reason}" if entry.reason else ""
            print(f"{entry.fate:<10}  {entry.path}{events}{reason}")
        bad = sum(entry.fate not in ("ok", "skipped") for entry in result.artifacts)
        print(f"{len(result.artifacts)} artifacts, " + (f"{bad} not ok" if bad else "all ok"))
    return EXIT_OK if result.ok else EXIT_FINDING


def _command(
    commands: _Commands, name: str, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a subcommand that works on a path."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=example,
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="step folder, run folder, trace, or folder of traces"
    )
    return parser


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Source], None]]:
    """Show a progress bar on standard error when that is a terminal."""
    console = Console(stderr=True)
    count = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def advance(source: Source) -> None:
            progress.advance(task)

        yield advance


def _fail(message: str) -> int:
    print(f"verl-profiling: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
