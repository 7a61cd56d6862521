"""``verl-profiling collect``."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_profiling.commands import EXIT_FINDING, EXIT_OK, add_json, local_path, option, print_json
from verl_profiling.errors import TraceFormatError
from verl_profiling.steps.nsys import collect
from verl_profiling.units import visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Moves the reports of the nsys tool into their step folders, and enters them into "
        "the manifests. "
        "Exported reports (.sqlite) become traces, which merge and report read. Exits 1 when "
        "something is "
        "missing: Nsight Systems writes the last reports when the worker's process ends."
    )
    parser.epilog = (
        "example: verl-profiling collect outputs/run --export && verl-profiling merge outputs/run"
    )
    parser.add_argument(
        "path", type=local_path, metavar="PATH", help="run folder, or a step folder of it"
    )
    option(parser, "--export", "export each report first (needs nsys)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Collect the finished reports."""
    path: Path = arguments.path
    if not path.is_dir():
        raise TraceFormatError(path, "no such folder")
    collected = collect(path, export=arguments.export)
    if arguments.json:
        print_json({"artifacts": collected})
    else:
        for entry in collected:
            reason = f"  {entry.reason}" if entry.reason else ""
            print(visible(f"{entry.status:<10}  {entry.path}{reason}"))
    return EXIT_OK if all(entry.status == "ok" for entry in collected) else EXIT_FINDING
