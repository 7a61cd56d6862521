"""Compares two steps, two runs or two report.json files.

The comparison is by stage, cause of idle time, worker and kernel. With several steps on a side it
compares medians; with several on both sides it shows how much steps vary anyway (the noise).

example: verl-profiling diff outputs/main outputs/branch --fail-above 5%
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from verl_profiling.analysis import saved_report
from verl_profiling.commands import add_json, local_path, option, percentage, print_json
from verl_profiling.commands.common import StepByStep, add_communication, warn, watched
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.predict.explain import explain
from verl_profiling.predict.step_graph import Graph
from verl_profiling.report.diff import LEAST_S, Change, Diff, compare, print_diff
from verl_profiling.report.model import Report
from verl_profiling.steps.inputs import how_to_capture, is_uncaptured, the_run
from verl_profiling.units import duration, visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for side in ("before", "after"):
        parser.add_argument(
            side,
            type=local_path,
            metavar=side.upper(),
            help="step folder, run folder or report.json",
        )
    add_communication(parser)
    add_json(parser)
    help = (
        "exit 1 if the step or a stage got slower by more than this share and by more "
        "than the known noise"
    )
    option(parser, "--fail-above PERCENT", help, percentage)


def run(arguments: argparse.Namespace) -> bool:
    """Compare both sides; return whether all data is there, and nothing is slower than allowed."""
    before, after = (_side(path, arguments) for path in (arguments.before, arguments.after))
    for side, other, path in ((before, after, arguments.before), (after, before, arguments.after)):
        if not (side.reports or (side.logged and other.logged)):
            raise TraceFormatError(path, how_to_capture(path))
    diff = compare(
        before.reports, after.reports, (before.logged, after.logged), _explained(before, after)
    )
    is_well = before.is_well and after.is_well
    verdict = ""
    if arguments.fail_above is not None:
        slower = diff.slower_than(arguments.fail_above / 100)
        verdict = _verdict(diff, slower, arguments.fail_above)
        is_well = is_well and not slower
    if arguments.json:
        sentences = {"basis": diff.basis, "explained": diff.explained, "verdict": verdict}
        print_json({**msgspec.structs.asdict(diff), **sentences})
    else:
        print_diff(diff, Console())
    if verdict:
        print(verdict, file=sys.stderr if arguments.json else sys.stdout)
    return is_well


def _verdict(diff: Diff, slower: list[Change], percent: float) -> str:
    """Return a sentence with the slower stages, their changes, the largest cause,
    and the compared steps.
    """
    stages = ", ".join(map(_named, slower)) or "nothing"
    causes = [
        change
        for change in diff.changes
        if change.kind in ("lost", "trajectory") and change.stands_out and change.change_s > 0
    ]
    if slower and causes:
        stages += f"; most by {_named(max(causes, key=lambda cause: cause.change_s))}"
    limit = f"more than {percent:.3g}% and {duration(LEAST_S)}"
    return f"slower by {limit}: {stages} ({diff.basis})"


def _named(change: Change) -> str:
    share = f", {change.change_share:+.0%}" if change.change_share is not None else ""
    return visible(f"{change.shown_name} ({duration(change.change_s, signed=True)}{share})")


class _Side(NamedTuple):
    """One side of the comparison: reports and graphs of its steps, and the steps in its watch log.

    ``is_well`` tells whether no data is missing.
    """

    reports: list[Report]
    graphs: list[Graph]
    logged: list[StepSummary]
    is_well: bool = True


def _side(path: Path, arguments: argparse.Namespace) -> _Side:
    """Read one side of the comparison. It has graphs if each of its steps has a graph, unlike
    plain traces and saved reports.
    """
    if (saved := saved_report(path)) is not None:
        return _Side([saved], [], [])
    if is_uncaptured(path):
        return _Side([], [], watched(path)[0])
    work = StepByStep([path], arguments.communication)
    steps = work.reports(keep_graphs=True)
    graphs = [step.graph for step, _ in steps if step.manifest and step.graph]
    run = the_run(path)
    logged = watched(run)[0] if run.is_dir() else []
    if len(graphs) < len(steps):
        graphs = []
    return _Side([report for _, report in steps], graphs, logged, work.is_well)


def _explained(before: _Side, after: _Side) -> dict[str, tuple[float, float]]:
    """Return the part of the change (s) that each cause explains, and its noise (s); empty without
    graphs.

    An error becomes a warning.
    """
    if not (before.graphs and after.graphs):
        return {}
    try:
        return explain(before.graphs, after.graphs)
    except Exception as error:
        warn(f"the change cannot be explained: {type(error).__name__}: {error}")
        return {}
