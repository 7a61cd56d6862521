"""Compares two steps, two runs or two report.json files, or several runs a side.

The comparison is by stage, cause of idle time, worker and kernel. Two starts of one configuration
differ, so several runs a side tell small changes from noise: diff RUN_A... -- RUN_B...

example: verl-profiling diff outputs/main outputs/branch --fail-above 5%
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from verl_profiling.analysis import saved_report
from verl_profiling.cli import BETWEEN_SIDES
from verl_profiling.commands.common import (
    StepByStep,
    add_communication,
    add_json,
    local_path,
    option,
    percentage,
    print_json,
    warn,
)
from verl_profiling.commands.live_run import watched
from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.files.run_files import known_run
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.manifest import RunInfo
from verl_profiling.predict.explain import explain
from verl_profiling.predict.step_graph import Graph
from verl_profiling.report.diff import LEAST_S, Change, Diff, compare, print_diff
from verl_profiling.report.model import Report
from verl_profiling.report.verdict import differences
from verl_profiling.steps.inputs import how_to_capture, is_step, is_uncaptured, the_run
from verl_profiling.steps.start_up import StartUp, start_up_of
from verl_profiling.steps.step import Source
from verl_profiling.steps.trace import Trace
from verl_profiling.units import duration, visible

DOCUMENTS = (Diff,)
TEXTS = ("basis", "explained", "verdict")
# Kineto's number of the innermost operator, which its kernels have as well
_EXTERNAL = re.compile(rb'"External id"\s*:\s*"?(\d+)')
_OPERATOR = "cpu_op"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=local_path,
        metavar="PATH",
        help="step folder, run folder or report.json, of A and then of B; -- divides several",
    )
    add_communication(parser)
    add_json(parser)
    help = "exit 1 if the step or a stage got slower by more than this share and than the noise"
    option(parser, "--fail-above PERCENT", help, percentage)


def run(arguments: argparse.Namespace) -> bool:
    """Compare both sides; return whether all data is there, and nothing is slower than allowed."""
    paths = _divided(arguments.paths)
    before, after = ([_run_at(path, arguments) for path in side] for side in paths)
    runs = [*before, *after]
    is_logged = all(run.logged for run in runs)
    for run in runs:
        if not (run.reports or is_logged):
            raise TraceFormatError(run.path, how_to_capture(run.path))
    logs = ([run.logged for run in before], [run.logged for run in after])
    diff = compare(
        _joined(before, "reports"),
        _joined(after, "reports"),
        logs,
        _explained(before, after),
        differences(_joined(before, "infos"), _joined(after, "infos")),
        _renamed(before, after),
        (_joined(before, "starts"), _joined(after, "starts")),
    )
    is_well = all(run.is_well for run in runs)
    verdict = ""
    if arguments.fail_above is not None:
        slower = diff.slower_than(arguments.fail_above / 100)
        verdict = _verdict(diff, slower, arguments.fail_above)
        is_well = is_well and not slower
    if arguments.json:
        sentences = {
            "basis": diff.basis,
            "contradicted": diff.contradicted,
            "explained": diff.explained,
            "started": diff.started,
            "verdict": verdict,
        }
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
    runs = diff.between_runs
    basis = runs.sentence if runs else diff.basis
    if runs and runs.more_runs is not None and slower:  # too few runs for a verdict on stages
        basis = f"of the whole step: {basis}"
    return f"slower by {limit}: {stages} ({basis})"


def _named(change: Change) -> str:
    share = f", {change.change_share:+.0%}" if change.change_share is not None else ""
    return visible(f"{change.shown_name} ({duration(change.change_s, signed=True)}{share})")


def _divided(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return the paths of both sides.

    Raises:
        ConfigError: It is unclear which paths are of which side.
    """
    if BETWEEN_SIDES not in paths and len(paths) == 2:
        return paths[:1], paths[1:]
    place = paths.index(BETWEEN_SIDES) if paths.count(BETWEEN_SIDES) == 1 else 0
    before, after = paths[:place], paths[place + 1 :]
    if not (before and after):
        raise ConfigError("diff", "give two paths, or several a side: RUN_A... -- RUN_B...")
    return before, after


class _Run(NamedTuple):
    """One path of a side: reports and graphs of its steps, the steps in its watch log, facts, and
    its start-up if the path is a whole run.

    ``is_well`` tells whether no data is missing.
    """

    path: Path
    reports: list[Report]
    graphs: list[Graph]
    logged: list[StepSummary]
    infos: list[RunInfo]
    starts: list[StartUp]
    sources: Sequence[Source] = ()
    is_well: bool = True


def _run_at(path: Path, arguments: argparse.Namespace) -> _Run:
    """Read one path. It has graphs if each of its steps has a graph, unlike plain traces and saved
    reports.
    """
    if (saved := saved_report(path)) is not None:
        return _Run(path, [saved], [], [], [], [])
    run = the_run(path)
    folder = run.parent if is_step(run) else run
    info = known_run(folder)
    infos = [info] if info else []
    start = None if is_step(run) else start_up_of(folder)
    starts = [start] if start else []
    if is_uncaptured(path):
        return _Run(path, [], [], watched(path)[0], infos, starts)
    work = StepByStep([path], arguments.communication)
    steps = work.reports(keep_graphs=True)
    graphs = [step.graph for step, _ in steps if step.manifest and step.graph]
    logged = watched(run)[0] if run.is_dir() else []
    if len(graphs) < len(steps):
        graphs = []
    reports = [report for _, report in steps]
    sources = [source for capture in work.steps for source in capture.inputs.sources]
    return _Run(path, reports, graphs, logged, infos, starts, sources, work.is_well)


def _renamed(before: Sequence[_Run], after: Sequence[_Run]) -> dict[str, str]:
    """Return a common name for kernels that one side has, by the operator of both."""
    old, new = (
        {row.name for report in _joined(side, "reports") for row in report.kernels}
        for side in (before, after)
    )
    return renamed_kernels(
        old - new, new - old, _joined(before, "sources"), _joined(after, "sources")
    )


def _joined(runs: Sequence[_Run], name: str) -> list[Any]:
    """Return a list of all runs of a side as one."""
    return list(chain.from_iterable(getattr(run, name) for run in runs))


def _explained(before: Sequence[_Run], after: Sequence[_Run]) -> dict[str, tuple[float, float]]:
    """Return the part of the change (s) that each cause explains, and its noise (s); empty without
    graphs of all runs.

    An error becomes a warning.
    """
    if not all(run.graphs for run in (*before, *after)):
        return {}
    try:
        return explain(_joined(before, "graphs"), _joined(after, "graphs"))
    except Exception as error:
        warn(f"the change cannot be explained: {type(error).__name__}: {error}")
        return {}


def renamed_kernels(
    gone: set[str], new: set[str], before: Sequence[Source], after: Sequence[Source]
) -> dict[str, str]:
    """Return a common name for kernels of one side, where one operator launched kernels of such
    names on both sides.

    Another version of a library has another name for a kernel. As one kernel gone and one new,
    their times would not be compared.

    Args:
        gone: Names of kernels that only A has.
        new: Names of kernels that only B has.
        before: The traces of A.
        after: The traces of B.
    """
    if not (gone and new):
        return {}
    operators, others = _operators(before, gone), _operators(after, new)
    joint = set(operators.values()) & set(others.values())
    both = (operators | others).items()
    return {name: f"kernels of {operator}" for name, operator in both if operator in joint}


def _operators(sources: Sequence[Source], names: set[str]) -> dict[str, str]:
    """Return the operator that launched each of these kernels last, as far as traces say."""
    found = {}
    for source in sources:
        operators: dict[bytes, str] = {}
        launched: dict[str, bytes] = {}
        for event in chain.from_iterable(Trace(source.file).chunks()):
            number = _EXTERNAL.search(event.args)
            if number and event.cat == _OPERATOR:
                operators[number[1]] = event.name
            elif number and event.name in names:
                launched[event.name] = number[1]
        for name, of_operator in launched.items():
            if of_operator in operators:
                found[name] = operators[of_operator]
    return found
