"""The command line, ``verl-profiling``: its commands, its errors, and its exit codes.

A new command is a line of :data:`COMMANDS`, and a module of its name in ``commands/``. The help of
a command is the docstring of its module; the last paragraph is an example. The module has
``configure(parser)``, which adds the options, and ``run(arguments)``, which runs the command and
returns whether all is well (exit code 0, else 1). It may have ``DOCUMENTS``, the types of what
``--json`` prints, and ``TEXTS``, the names of texts beside their fields. A module is imported only
when its command is used, so that ``--help`` is quick and ``merge`` loads no numerical library.
Options and output that commands have in common are in :mod:`verl_profiling.commands.common`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import verl_profiling
from verl_profiling.errors import ProfilingError, choices_hint
from verl_profiling.units import visible

COMMANDS = {
    "demo": "train a tiny policy here, capture a step, and show its report",
    "merge": "write one timeline of a step, to open in Perfetto",
    "report": "show the use of a step's time: stages, workers, idle time by cause",
    "view": "open the page of a run, or a step's timeline and report, in the browser",
    "top": "show a running job, live: steps, stages, slow processes, captures so far",
    "diff": "compare two steps or runs, or several runs a side",
    "what-if": "show the critical path of a step, and predict the step after changes",
    "replay": "send the requests of a captured step to an engine again, without the trainer",
    "collect": "fetch reports that Nsight Systems finished after the run",
    "export": "send a step to an OpenTelemetry endpoint, or its requests to a file",
    "check": "verify that every expected artifact exists and is complete",
    "plan": "print what a configuration would capture, and in how many files",
    "trigger": "request a capture of the next step of a running job",
    "schema": "print the JSON schema of a command's document",
    "doctor": "show the tools that work on this machine",
}
"""Purpose of each command, in the order of ``--help``."""

BETWEEN_SIDES = Path("\0")
"""The argument ``--`` of ``diff``, which argparse would drop; no file has this name."""

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2

_EPILOG = """\
exit codes: 0 success; 1 success with a problem (a damaged artifact, a slower step, or an
unreadable step among several); 2 wrong usage, or unreadable input. The reason is one line
on standard error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    argv = _with_sides(list(sys.argv[1:] if argv is None else argv))
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
            used, module = subparsers[name], module_of(name)
            used.description, _, used.epilog = module.__doc__.rpartition("\n\n")
            module.configure(used)
    if argv[:1] and argv[0] in subparsers:  # its options may stand between its paths
        arguments, unknown = subparsers[argv[0]].parse_known_intermixed_args(
            argv[1:], argparse.Namespace(command=argv[0])
        )
    else:
        arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        used = subparsers[arguments.command]
        hint = choices_hint(unknown[0], used._option_string_actions)
        return _fail(f"{used.prog}: unknown argument {unknown[0]}; {hint}")
    gc.set_threshold(100_000, 50, 100)  # commands make millions of objects, and hardly a cycle
    try:
        is_well: bool = module_of(arguments.command).run(arguments)
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
    return EXIT_OK if is_well else EXIT_FINDING


def module_of(command: str) -> Any:
    """Return the module of a command."""
    return import_module(f"verl_profiling.commands.{command.replace('-', '_')}")


def _with_sides(argv: list[str]) -> list[str]:
    """Return the arguments, with a path in place of the ``--`` of ``diff``."""
    if argv[:1] != ["diff"]:
        return argv
    return [str(BETWEEN_SIDES) if word == "--" else word for word in argv]


def _fail(message: str) -> int:
    print(f"verl-profiling: error: {visible(message)}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
