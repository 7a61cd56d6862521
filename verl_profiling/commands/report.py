"""``verl-profiling report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from verl_profiling.analysis import CapturedStep, open_run
from verl_profiling.commands import EXIT_FINDING, EXIT_OK, option
from verl_profiling.commands.common import (
    StepByStep,
    add_communication,
    add_paths,
    add_ray,
    warn,
    watched,
)
from verl_profiling.errors import ConfigError
from verl_profiling.opener import naming, whole_file
from verl_profiling.report.files import write_csv, write_tensorboard
from verl_profiling.report.findings import OWN_COST, USUAL
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.run_page import RUN_PAGE, render_run, stage_seconds
from verl_profiling.report.sentences import counted
from verl_profiling.report.tables import TABLES
from verl_profiling.report.terminal import fitting_console, print_report
from verl_profiling.report.watch_frame import (
    STEP,
    Pulse,
    print_run,
    seconds_of,
    thresholds_of,
    watch_frame,
    watch_sentence,
)
from verl_profiling.run_files import known_run
from verl_profiling.timeline.inputs import how_to_capture, is_uncaptured, the_run
from verl_profiling.units import visible


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Prints the stages of a step, the work of each worker and rollout engine, idle time "
        "by cause, and "
        "missing data. Takes a step folder, a run folder, or plain traces. For a run without "
        "captured "
        "steps, prints the log of its watch."
    )
    parser.epilog = "example: verl-profiling report outputs/run/step_000012 --json | jq .workers"
    add_paths(parser)
    add_communication(parser)
    add_ray(parser)
    option(parser, "--verdict", "print one line; exit 1 if a finding stands out in any step")
    option(parser, "--all", "print every table, not only the first screen")
    option(parser, "--json", "print JSON, one document per step")
    help = "write report.json and report.html into the folder, and index.html into that of a run"
    option(parser, "--save", help)
    option(
        parser, "--csv DIR", "write workers.csv, stages.csv, lost.csv, kernels.csv and so on", Path
    )
    option(parser, "--tensorboard LOGDIR", "write scalars", Path)


def run(arguments: argparse.Namespace) -> int:
    """Report on every captured step under the paths, and on their runs, also without a captured
    step.

    Raises:
        ConfigError: ``--csv``, ``--tensorboard`` or ``--verdict`` is given, which need a captured
            step.
    """
    found = [the_run(path) for path in arguments.paths]
    runs: dict[Path, list[tuple[CapturedStep, Report]]] = {
        run: [] for run in found if is_uncaptured(run)
    }
    paths = [run for run in found if run not in runs]
    for name in ("csv", "tensorboard", "verdict"):
        if not paths and getattr(arguments, name):
            raise ConfigError(f"--{name}", how_to_capture(found[0]))
    steps: list[tuple[CapturedStep, Report]] = []
    written, code = list[Path](), EXIT_OK
    if paths:
        work = StepByStep(paths, arguments.communication, arguments.ray)
        for run in runs if arguments.verdict else ():
            work.problem(f"{run}: {how_to_capture(run)}")
        steps, code = work.reports(), work.exit_code
    for path in paths:
        if sentence := open_run(path).never_came():
            warn(sentence)
    for step, report in steps:
        run = step.directory.parent
        if any(run.resolve().is_relative_to(path.resolve()) for path in paths):
            runs.setdefault(run, []).append((step, report))
        if arguments.json:
            print(msgspec.json.encode(report).decode())
        elif not arguments.verdict:
            print_report(report, Console(), everything=arguments.all)
        if arguments.save:
            data = msgspec.json.format(msgspec.json.encode(report))
            _write(step.output("report.json"), data)
            _write(step.output("report.html"), render_html(report).encode())
            written.append(step.output("report.html"))
    for run, of_run in runs.items():
        written += _of_run(run, of_run, arguments)
    reports = [report for _, report in steps]
    if arguments.csv:
        written += write_csv(reports, arguments.csv)
    if arguments.tensorboard:
        with naming(arguments.tensorboard):
            write_tensorboard(reports, arguments.tensorboard)
        written.append(arguments.tensorboard)
    if arguments.verdict and _verdict(reports, arguments):
        code = EXIT_FINDING
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return code


def _of_run(
    run: Path, steps: list[tuple[CapturedStep, Report]], arguments: argparse.Namespace
) -> list[Path]:
    """Show the log of a run's watch, and a table of its steps; return the written page."""
    history, hangs = watched(run)
    steps.sort(key=lambda of: of[1].step or 0)
    reports = [report for _, report in steps]
    note = "" if steps else how_to_capture(run)
    if arguments.json and not steps:
        print(msgspec.json.encode({"run": str(run), "note": note, "watch": history}).decode())
    elif not (arguments.json or arguments.verdict):
        console = fitting_console(Console())
        if not steps:
            pulse = Pulse(says="no step was captured", hangs=hangs, is_well=False)
            thresholds = thresholds_of(known_run(run))
            console.print(watch_frame(run.resolve().name, pulse, history, thresholds=thresholds))
        elif history:
            print(visible(f"watch of {run}: {hangs or watch_sentence(history)}"))
        captured = [{**stage_seconds(report), STEP: report.span_us / 1e6} for report in reports]
        which = "steps of the watch, exposed time" if history else "captured steps"
        print_run(list(map(seconds_of, history)) or captured, which, console)
        print(f"{visible(note)}\n" if note else "", end="")
    if not arguments.save:
        return []
    pages = [step.output("report.html") for step, _ in steps]
    _write(run / RUN_PAGE, render_run(run, pages, reports, history, hangs).encode())
    return [run / RUN_PAGE]


def _verdict(reports: Sequence[Report], arguments: argparse.Namespace) -> bool:
    """Print the finding with most seconds of all steps; return whether one stands out.

    The largest cause of the trajectories' time is usual work, and comes after all losses.
    """
    found = [
        (one, report) for report in reports for one in report.findings if one.rule not in OWN_COST
    ]
    text = f"{counted(len(reports), 'step')}: nothing stands out"
    if found:
        most, report = max(found, key=lambda one: (one[0].rule not in USUAL, one[0].seconds))
        text = f"{report.title}: {most.text}" + (f" Try: {most.advice}." if most.advice else "")
        text += "".join(
            f" Would help most: {row.change} ({row.option}), {row.difference_share:+.0%} of "
            "the step."
            for row in TABLES["what_would_help"].rows_shown(report)[:1]
        )
    print(visible(text), file=sys.stderr if arguments.json else sys.stdout)
    return any(one.rule not in USUAL for one, _ in found)


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)
