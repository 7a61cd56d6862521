"""``verl-profiling recover``."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.report.recovery import recover
from verl_profiling.visible import visible

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Completes the manifests of captures that began and were never written, because the process of the "
        "loop was killed: verifies what was expected, takes in what else is in the folder, and enters what "
        "became of it. Leaves a capture alone whose process still runs on this host. May be repeated. Exits "
        "1 when an artifact is not whole, and when a step was left as it is."
    )
    parser.epilog = "example: verl-profiling recover outputs/run && verl-profiling merge outputs/run"
    parser.add_argument("path", type=Path, metavar="PATH", help="run folder, or a step folder of it")
    parser.add_argument("--force", action="store_true", help="also while the process that records is alive")


def run(arguments: argparse.Namespace) -> int:
    """Recover every step under the path."""
    steps = recover(arguments.path, force=arguments.force)
    for step in steps:
        whole, expected = step.artifacts
        found = step.reason or f"{whole} of {expected} artifacts"
        print(visible(f"{step.outcome:<10}  {step.path}  {found}"))
    fine = all(step.outcome != "refused" and step.artifacts[0] == step.artifacts[1] for step in steps)
    return EXIT_OK if fine else EXIT_FINDING
