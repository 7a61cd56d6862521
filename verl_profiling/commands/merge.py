"""Merges everything recorded for a step into STEP/timeline.json.gz.

The controller's stages, the workers and the rollout engines are on one clock. A run folder gets one
timeline per step. Plain trace files and folders of them are sorted by step.

example: verl-profiling merge outputs/run/step_000012 --stages rollout --min-us 5
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from verl_profiling.analysis import CapturedStep, Progress
from verl_profiling.commands.common import (
    StepByStep,
    add_json,
    add_paths,
    add_ray,
    at_least_0,
    count,
    names,
    option,
    progress,
    show,
    size,
)
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import clear_leftovers
from verl_profiling.units import byte_size, listed, visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_paths(parser)
    add_ray(parser)
    option(
        parser,
        "-o --output OUTPUT",
        "file to write (only for a single step), uncompressed if its name ends with .json",
        Path,
    )
    option(
        parser,
        "--stages A,B",
        "keep only events during these stages of the loop",
        names,
        many=True,
    )
    option(parser, "--ranks 0,8-15", "keep only these ranks of each role, e.g. 0,8-15")
    time = at_least_0("a time in microseconds such as 5")
    option(parser, "--min-us US", "leave out shorter events", time, default=0.0)
    option(
        parser,
        "--max-bytes SIZE",
        "leave out the shortest events, up to this file size, e.g. 200M",
        size,
    )
    help = "draw the critical path as the first process; takes as long as a report"
    option(parser, "--critical-path", help)
    add_json(parser, "one document per step")
    option(parser, "-j --jobs JOBS", "processes to use (default: %(default)s)", count, default=2)


def run(arguments: argparse.Namespace) -> bool:
    """Merge every step under the paths; return whether nothing was missing."""
    work = StepByStep(arguments.paths, ray=arguments.ray)
    if arguments.output:
        if len(work.steps) > 1:
            titles = listed([step.inputs.title for step in work.steps])
            raise ConfigError(
                "--output", f"needs a single step, but there are {len(work.steps)}: {titles}"
            )
        clear_leftovers(arguments.output.parent)
    traces = sum(len(step.inputs.sources) + len(step.inputs.logs) for step in work.steps)
    with progress("merging", traces) as advance:
        for step in work.steps:
            with work.surviving():
                _merge(step, arguments, advance, work)
    return work.is_well


def _merge(
    step: CapturedStep, arguments: argparse.Namespace, advance: Progress, work: StepByStep
) -> None:
    """Merge one step, and print the result."""
    result = step.merge(
        arguments.output,
        stages=arguments.stages,
        ranks=arguments.ranks,
        min_us=arguments.min_us,
        max_bytes=arguments.max_bytes,
        critical_path=arguments.critical_path,
        jobs=arguments.jobs,
        on_progress=advance,
    )
    problems = list(result.problems)
    if arguments.max_bytes is not None and result.bytes > arguments.max_bytes:
        least = f"names and events of more than a second take {byte_size(result.bytes)}"
        limit = f"larger than --max-bytes {byte_size(arguments.max_bytes)}"
        problems.insert(0, f"{result.path}: {limit}: {least}")
    for problem in problems:
        work.problem(problem)
    for note in step.inputs.notes:
        print(f"note: {visible(note)}", file=sys.stderr)
    facts = {"title": step.inputs.title, "step": step.step, "notes": step.inputs.notes}
    document = {**facts, **msgspec.structs.asdict(result), "problems": problems}
    left_out = f", {result.left_out:,} left out" if result.left_out else ""
    content = f"{byte_size(result.bytes)}, {result.events:,} events{left_out}"
    show(arguments, document, [f"{result.path}  ({content})"])
