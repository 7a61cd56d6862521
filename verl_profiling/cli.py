"""The command line, ``verl-profiling``: its arguments, its errors, and its exit codes.

The commands are in :mod:`verl_profiling.commands`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

import verl_profiling
from verl_profiling.commands import (
    BETWEEN_SIDES,
    COMMANDS,
    EXIT_BAD_INPUT,
    EXIT_FINDING,
    EXIT_OK,
    module_of,
)
from verl_profiling.errors import ProfilingError, choices_hint
from verl_profiling.units import visible

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
            _configure(subparsers[name], module_of(name))
    if argv[:1] and argv[0] in subparsers:  # its options may stand between its paths
        given = argparse.Namespace(command=argv[0])
        arguments, unknown = subparsers[argv[0]].parse_known_intermixed_args(argv[1:], given)
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


def _with_sides(argv: list[str]) -> list[str]:
    """Return the arguments, with a path in place of the ``--`` of ``diff``."""
    if argv[:1] != ["diff"]:
        return argv
    return [str(BETWEEN_SIDES) if word == "--" else word for word in argv]


def _configure(parser: argparse.ArgumentParser, module: Any) -> None:
    parser.description, _, parser.epilog = (module.__doc__ or "").rpartition("\n\n")
    module.configure(parser)


def _fail(message: str) -> int:
    print(f"verl-profiling: error: {visible(message)}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
