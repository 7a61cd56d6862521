"""Moves the reports of the nsys tool into their step folders, and enters them into the manifests.

Exported reports (.sqlite) become traces, which merge and report read. Exits 1 when a report is
missing: Nsight Systems writes the last reports when the worker's process ends.

example: verl-profiling collect outputs/run --export && verl-profiling merge outputs/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_profiling.commands.common import add_json, local_path, option, show
from verl_profiling.errors import TraceFormatError
from verl_profiling.steps.nsys import collect


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path", type=local_path, metavar="PATH", help="run folder, or a step folder of it"
    )
    option(parser, "--export", "export each report first (needs nsys)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Collect the finished reports; return whether all are there."""
    path: Path = arguments.path
    if not path.is_dir():
        raise TraceFormatError(path, "no such folder")
    collected = collect(path, export=arguments.export)
    show(
        arguments,
        {"artifacts": [entry._asdict() for entry in collected]},
        (f"{entry.status:<10}  {entry.path}  {entry.reason}".rstrip() for entry in collected),
    )
    return all(entry.status == "ok" for entry in collected)
