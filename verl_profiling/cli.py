"""The command line, ``verl-profiling``: the list of its commands, and its errors.

A new command is a line of :data:`COMMANDS`, and a module of its name in
:mod:`verl_profiling.commands`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

import verl_profiling
from verl_profiling.commands import EXIT_BAD_INPUT, EXIT_OK
from verl_profiling.errors import ProfilingError, choices_hint
from verl_profiling.units import visible

COMMANDS = {
    "merge": "write one timeline of a step, to open in Perfetto",
    "report": "show the use of a step's time: stages, workers, idle time by cause",
    "view": "open a step's timeline and report in the browser",
    "top": "show a running job, live: steps, stages, slow processes, captures so far",
    "diff": "compare two steps or two runs",
    "what-if": "show the critical path of a step, and predict the step after changes",
    "collect": "fetch reports that Nsight Systems finished after the run",
    "export": "send a step's stages and trajectories to an OpenTelemetry endpoint",
    "check": "verify that every expected artifact exists and is complete",
    "plan": "print what a configuration would capture, and in how many files",
    "trigger": "request a capture of the next step of a running job",
    "doctor": "show the tools that work on this machine",
}
"""Purpose of each command, in the order of ``--help``."""

_EPILOG = """\
exit codes: 0 success; 1 success with a problem (a damaged artifact, a slower step, or an
unreadable step among several); 2 wrong usage, or unreadable input. The reason is one line
on standard error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog="verl-profiling",
        description="One timeline and one report for every profiled step of RL post-training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"verl-profiling {verl_profiling.__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    subparsers = {}
    for name, summary in COMMANDS.items():
        subparsers[name] = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name in argv[:1]:
            _module(name).configure(subparsers[name])
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        return _fail(_unknown_argument(unknown[0], subparsers[arguments.command]))
    gc.set_threshold(100_000, 50, 100)  # commands make millions of objects, and hardly a cycle
    try:
        code: int = _module(arguments.command).run(arguments)
        sys.stdout.flush()
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


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    options = parser.format_usage().replace("[", " ").split()
    choices = choices_hint(argument, {word.rstrip("]") for word in options if word[:1] == "-"})
    return f"{parser.prog}: unknown argument {argument}; {choices}"


def _module(command: str) -> Any:
    return importlib.import_module(f"verl_profiling.commands.{command.replace('-', '_')}")


def _fail(message: str) -> int:
    print(f"verl-profiling: error: {visible(message)}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
