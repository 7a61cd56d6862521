"""Arguments shared by several commands, and their parsers."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from verl_profiling.remote import is_url
from verl_profiling.timeline.content import Limits

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def local_path(text: str) -> Path:
    """Parse an argument as a local path.

    Raises:
        argparse.ArgumentTypeError: The argument is a URL.
    """
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and the commands read folders: copy the step folder here first, e.g. with "
            f"`python -c \"import fsspec; fs, path = fsspec.url_to_fs('{text}'); fs.get(path, 'copy', "
            'recursive=True)"`'
        )
    return Path(text)


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ``PATH``, one or several."""
    parser.add_argument(
        "paths",
        type=local_path,
        nargs="+",
        metavar="PATH",
        help="step folder, run folder, trace, or folder of traces; several traces or folders of them are one "
        "capture",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit how much of a trace is read."""
    group = parser.add_argument_group(
        "limits", "Reading a trace ends where it reaches one; what was read is kept, and the exit code is 1."
    )
    group.add_argument(
        "--max-content",
        type=size,
        default=Limits().content_bytes,
        metavar="SIZE",
        help=f"bytes of its content, uncompressed (default: {Limits().content_bytes >> 30} GiB)",
    )
    group.add_argument(
        "--max-memory",
        type=size,
        metavar="SIZE",
        help="memory of this process, e.g. 8G (default: three quarters of what is free)",
    )


def add_communication(parser: argparse.ArgumentParser) -> None:
    """Add the option for further communication kernels."""
    parser.add_argument(
        "--communication",
        action="append",
        default=[],
        metavar="PATTERN",
        help="regular expression of kernels that communicate, besides those that are known; repeatable",
    )


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Return the limits given on the command line."""
    return Limits(content_bytes=arguments.max_content, memory_bytes=arguments.max_memory)


def size(text: str) -> int:
    """Parse a size in bytes, e.g. ``200M`` or ``1.5G``.

    Raises:
        ArgumentTypeError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 200M")
    return size


def count(text: str) -> int:
    """Parse an integer of at least 1.

    Raises:
        ArgumentTypeError: The text is not such an integer.
    """
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
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
