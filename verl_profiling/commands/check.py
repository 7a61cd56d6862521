"""Reads every artifact of the manifests, to the last byte.

Exits 1 when a file is missing, empty, truncated, unreadable or too large. Exits 1 also when a step
was left early or recorded no worker, when steps of schedule.steps never came or could not be
captured, and when the last step in the watch's log hangs.

example: verl-profiling check outputs/run && echo complete
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from verl_profiling.analysis import open_run
from verl_profiling.commands.common import add_json, add_paths, add_ray, show
from verl_profiling.manifest import AS_PLANNED
from verl_profiling.steps.check import CheckResult

DOCUMENTS = (CheckResult,)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_paths(parser)
    add_ray(parser)
    add_json(parser, "one document per path")


def run(arguments: argparse.Namespace) -> bool:
    """Check the artifacts under each path; return whether all are there and whole."""
    results = [open_run(path, ray=arguments.ray).check() for path in dict.fromkeys(arguments.paths)]
    count = bad = 0
    for result in results:
        where = f"{result.directory}/" if len(results) > 1 else ""
        show(arguments, result, _lines(result, where))
        for entry in result.artifacts:
            count += 1
            bad += entry.status not in AS_PLANNED
    if not arguments.json:
        print(f"{count} artifacts, " + (f"{bad} not ok" if bad else "all ok"))
    return all(result.ok for result in results)


def _lines(result: CheckResult, where: str) -> Iterator[str]:
    for entry in result.artifacts:
        events = f"  {entry.events:,} events" if entry.events is not None else ""
        yield f"{entry.status:<10}  {where}{entry.path}{events}  {entry.reason}".rstrip()
    yield from result.note.splitlines()
