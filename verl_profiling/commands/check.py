"""``verl-profiling check``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from verl_profiling.analysis import open_run
from verl_profiling.commands import EXIT_FINDING, EXIT_OK, add_json, print_json
from verl_profiling.commands.common import add_paths, add_ray
from verl_profiling.steps.check import CheckResult
from verl_profiling.units import visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Reads every artifact of the manifests, to the last byte. Exits 1 when one is "
        "missing, empty, "
        "truncated, unreadable or too large, when a step was left early or recorded no "
        "worker, and when "
        "listed steps never came or could not be captured, or when the last step of the "
        "watch hangs."
    )
    parser.epilog = "example: verl-profiling check outputs/run && echo complete"
    add_paths(parser)
    add_ray(parser)
    add_json(parser, "one document per path")


def run(arguments: argparse.Namespace) -> int:
    """Check the artifacts under each path."""
    results = [open_run(path, ray=arguments.ray).check() for path in dict.fromkeys(arguments.paths)]
    if arguments.json:
        for result in results:
            print_json(result)
    else:
        _print_all(results)
    return EXIT_OK if all(result.ok for result in results) else EXIT_FINDING


def _print_all(results: Sequence[CheckResult]) -> None:
    for result in results:
        _print(result, where=f"{visible(result.directory)}/" if len(results) > 1 else "")
        if result.note:
            print(result.note)
    artifacts = [entry for result in results for entry in result.artifacts]
    bad = sum(entry.status not in ("ok", "skipped") for entry in artifacts)
    print(f"{len(artifacts)} artifacts, " + (f"{bad} not ok" if bad else "all ok"))


def _print(result: CheckResult, where: str) -> None:
    for entry in result.artifacts:
        events = f"  {entry.events:,} events" if entry.events is not None else ""
        reason = f"  {entry.reason}" if entry.reason else ""
        print(f"{entry.status:<10}  {where}{entry.path}{events}{reason}")
