"""The subcommands of ``verl-profiling``: their list, one module each, and their options.

A new command is a line of :data:`COMMANDS`, and a module of its name. The help of a command is the
docstring of its module; the last paragraph is an example. The module has ``configure(parser)``,
which adds the options, and ``run(arguments)``, which runs the command and returns whether all is
well (exit code 0, else 1). It may have ``DOCUMENTS``, the types of what ``--json`` prints, and
``TEXTS``, the names of texts beside their fields. A module is imported only when its command is
used, so that ``--help`` is quick and ``merge`` loads no numerical library.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import ConfigError
from verl_profiling.files.remote import is_url
from verl_profiling.typed_values import Size, value_of
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


def module_of(command: str) -> Any:
    """Return the module of a command."""
    return import_module(f"verl_profiling.commands.{command.replace('-', '_')}")


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
    option(parser, "--json", f"print JSON, {documents} (see docs/automation.md)")


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
