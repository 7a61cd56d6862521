"""``verl-profiling split``."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_profiling.commands.arguments import add_limits, add_paths, limits_of
from verl_profiling.commands.common import StepByStep, progress

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Cuts the traces of an e2e capture at the stages that each worker ran, into the files that discrete "
        "mode would have written. They go to STEP_DIR/split, a step folder of its own."
    )
    parser.epilog = "example: verl-profiling split outputs/run/step_000012"
    add_paths(parser)
    add_limits(parser)
    parser.add_argument("-o", "--output", type=Path, help="folder to write (only for a single step)")


def run(arguments: argparse.Namespace) -> int:
    """Cut every step under the path."""
    work = StepByStep(arguments.paths, limits_of(arguments))
    work.output_for_one(arguments.output)
    written: list[Path] = []
    with progress("cutting", work.traces) as advance:
        for step in work.steps:
            with work.surviving():
                written += step.split(arguments.output, advance, work.problem)
    for path in written:
        print(path)
    return work.exit_code
