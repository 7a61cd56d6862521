"""``verl-profiling check``."""

from __future__ import annotations

import argparse

import msgspec

from verl_profiling.analysis import open_run
from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.commands.common import add_limits, add_path, limits_of

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Reads every artifact that the manifests name, to the last byte. Exits 1 when one is missing, empty, "
        "truncated, unreadable or too large, and when a step recorded no worker at all."
    )
    parser.epilog = "example: verl-profiling check outputs/run && echo complete"
    add_path(parser)
    add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check what is under the path."""
    result = open_run(arguments.path, limits_of(arguments)).check()
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
