"""Prints the stages of a step, the work of each worker and rollout engine, and idle time by cause.

Takes a step folder, a run folder, or plain traces, and names missing data. For a run without
captured steps, prints the log of its watch.

example: verl-profiling report outputs/run/step_000012 --json | jq .workers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.console import Console

from verl_profiling.analysis import CapturedStep, open_run
from verl_profiling.commands.common import (
    StepByStep,
    add_communication,
    add_json,
    add_paths,
    add_ray,
    option,
    print_json,
    warn,
)
from verl_profiling.commands.live_run import run_view, watched
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import naming, whole_file
from verl_profiling.files.run_files import known_run
from verl_profiling.report.console import fitting_console
from verl_profiling.report.findings import OWN_COST, USUAL
from verl_profiling.report.hand_offs import hand_off_sentence
from verl_profiling.report.health import events
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import counted
from verl_profiling.report.run_table import print_run
from verl_profiling.report.tables import TABLES
from verl_profiling.report.terminal import print_report
from verl_profiling.report.watch_frame import (
    STEP,
    CaptureHead,
    RunView,
    capture_heads,
    seconds_of,
    stage_seconds,
    watch_frame,
    watch_sentence,
)
from verl_profiling.steps.deaths import attempts_of
from verl_profiling.steps.inputs import how_to_capture, is_uncaptured, the_run
from verl_profiling.units import visible, visible_text_of

_Steps = list[tuple[CapturedStep, Report]]
_WATCHED = "steps of the watch, and by how much each stage made them longer"


DOCUMENTS = (Report, RunView)  # of a step, or of a run without captured steps


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_paths(parser)
    add_communication(parser)
    add_ray(parser)
    help = "print one line; exit 1 if a finding stands out, or a run ended badly or is not as usual"
    option(parser, "--verdict", help)
    option(parser, "--all", "print every table, not only the first screen")
    add_json(parser, "one document per step, or of a run without captured steps")
    help = "write report.json and report.html into the folder, and index.html into that of a run"
    option(parser, "--save", help)
    option(
        parser, "--csv DIR", "write workers.csv, stages.csv, lost.csv, kernels.csv and so on", Path
    )
    option(parser, "--tensorboard LOGDIR", "write scalars", Path)


def run(arguments: argparse.Namespace) -> bool:
    """Report on every captured step under the paths, and on their runs, also without a captured
    step; return whether all data is there, and with ``--verdict`` nothing stands out.

    Raises:
        ConfigError: ``--csv``, ``--tensorboard`` or ``--verdict`` is given, which need a captured
            step.
    """
    runs: dict[Path, _Steps] = {}
    captured = []
    for place in map(the_run, arguments.paths):
        if is_uncaptured(place):
            runs[place] = []
        else:
            captured.append(place)
    is_well, steps = True, _Steps()
    if captured:
        is_well, steps = _read(captured, runs, arguments)
    else:
        _refuse_options_of_steps(next(iter(runs)), arguments)
    for step, report in steps:
        run = step.directory.parent
        if any(run.resolve().is_relative_to(place.resolve()) for place in captured):
            runs.setdefault(run, []).append((step, report))
    written = _show_steps(steps, arguments)
    for run, of_run in runs.items():
        written += _show_run(run, of_run, arguments)
    reports = [report for _, report in steps]
    written += _write_tables(reports, arguments)
    if arguments.verdict and _verdict(list(runs), reports, arguments):
        is_well = False
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return is_well


def _refuse_options_of_steps(place: Path, arguments: argparse.Namespace) -> None:
    for name in ("csv", "tensorboard", "verdict"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name}", how_to_capture(place))


def _read(
    captured: Sequence[Path], uncaptured: Iterable[Path], arguments: argparse.Namespace
) -> tuple[bool, _Steps]:
    """Return whether all data is there, and the steps of the places; warn of missing steps."""
    work = StepByStep(captured, arguments.communication, arguments.ray)
    if arguments.verdict:
        for run in uncaptured:
            work.problem(f"{run}: {how_to_capture(run)}")
    steps = work.reports()
    for place in captured:
        if sentence := open_run(place).never_came():
            warn(sentence)
    return work.is_well, steps


def _show_steps(steps: _Steps, arguments: argparse.Namespace) -> list[Path]:
    """Print the report of each step; return the written pages."""
    pages = []
    for step, report in steps:
        if arguments.json:
            print_json(report)
        elif not arguments.verdict:
            print_report(report, Console(), everything=arguments.all)
        if arguments.save:
            from verl_profiling.report.html import render_html

            data = msgspec.json.format(msgspec.json.encode(report))
            _write(step.output("report.json"), data)
            _write(step.output("report.html"), render_html(report).encode())
            pages.append(step.output("report.html"))
    return pages


def _show_run(run: Path, steps: _Steps, arguments: argparse.Namespace) -> list[Path]:
    """Print the log of a run's watch, and a table of its steps; return the written page."""
    history, hangs = watched(run)
    steps.sort(key=lambda of_step: of_step[1].step or 0)
    reports = [report for _, report in steps]
    note = "" if steps else how_to_capture(run)
    view = run_view(run, known_run(run), history, hangs, note)
    if arguments.json and not steps:
        print_json(view)
    elif not (arguments.json or arguments.verdict):
        _print_run(view, reports)
    if not arguments.save:
        return []
    from verl_profiling.report.run_page import RUN_PAGE, render_run
    from verl_profiling.report.run_steps import RunCapture

    heads = capture_heads(run)
    captures = []
    for step, report in steps:
        name = step.directory.name
        page = step.output("report.html").relative_to(run)
        link, report = quote(page.as_posix()), visible_text_of(report)
        captures.append(RunCapture(name, heads.get(name) or CaptureHead(), link, report=report))
    content = render_run(view, captures, [*attempts_of(run)])
    _write(run / RUN_PAGE, content.encode())
    return [run / RUN_PAGE]


def _print_run(view: RunView, reports: Sequence[Report]) -> None:
    console = fitting_console(Console())
    if not reports:
        console.print(watch_frame(view))
    elif view.watch:
        print(visible(f"watch of {view.run}: {view.hangs or watch_sentence(view.watch)}"))
        if view.start_up is not None:
            print(visible(f"start-up: {view.start_up.sentence()}"))
        if least := hand_off_sentence(view.watch):
            print(visible(f"device memory: {least}"))
    if view.watch:
        print_run(list(map(seconds_of, view.watch)), _WATCHED, console)
    else:
        steps = [{**stage_seconds(report), STEP: report.span_us / 1e6} for report in reports]
        print_run(steps, "captured steps", console)
    if view.note:
        print(visible(view.note))


def _write_tables(reports: Sequence[Report], arguments: argparse.Namespace) -> list[Path]:
    """Write the tables and scalars that were asked for; return the written paths."""
    written: list[Path] = []
    if not (arguments.csv or arguments.tensorboard):
        return written
    from verl_profiling.report.exports import write_csv, write_tensorboard

    if arguments.csv:
        written += write_csv(reports, arguments.csv)
    if arguments.tensorboard:
        with naming(arguments.tensorboard):
            write_tensorboard(reports, arguments.tensorboard)
        written.append(arguments.tensorboard)
    return written


def _verdict(
    runs: Sequence[Path], reports: Sequence[Report], arguments: argparse.Namespace
) -> bool:
    """Print the main fault of all runs and steps in one line; return whether there is any.

    A run that ended badly comes first, then the main finding of the steps, then what the watch
    noticed and lasts, in no capture.
    """
    ends, notices = [], []
    for run in runs:
        ended, lasting = _faults_of(run)
        ends += ended
        notices += lasting
    text, stands_out = _main_finding(reports)
    if ends:
        text = "; ".join([*ends, *notices])
    elif notices and not stands_out:
        text = "; ".join(notices)
    print(visible(text), file=sys.stderr if arguments.json else sys.stdout)
    return stands_out or bool(ends or notices)


def _faults_of(run: Path) -> tuple[list[str], list[str]]:
    """Return how a run hangs or ended badly, and the last notice of its watch that lasts."""
    history, hangs = watched(run)
    view = run_view(run, known_run(run), history, hangs)
    ended = []
    if not view.is_well:
        ended.append(f"{run}: {hangs or (view.death.sentence() if view.death else view.state)}")
    lasting = [event for event in events(view.watch) if event.lasts]
    return ended, [f"{run}: {event.what}. {event.now}" for event in lasting[-1:]]


def _main_finding(reports: Sequence[Report]) -> tuple[str, bool]:
    """Return the main finding of all steps, and whether any finding stands out.

    It is the first one of a step: of one whose capture has what the watch noticed, which lasts or
    came back, else of the step with most seconds. The largest part of the trajectories' time is
    usual work, unless the watch suspects it: it stands out in no step, and is printed only if there
    is no loss.
    """
    findings = []
    for report in reports:
        request = report.capture_request
        has_fault = report.noticed and not (request and request.is_gone)
        of_step = []
        for finding in report.findings:
            if finding.rule not in OWN_COST:
                is_loss = finding.rule not in USUAL or bool(report.suspected_cause)
                of_step.append((is_loss, has_fault, finding.seconds, finding, report))
        findings += sorted(of_step, key=itemgetter(0), reverse=True)[:1]
    text = f"{counted(len(reports), 'step')}: nothing stands out"
    if findings:
        *_, finding, report = max(findings, key=itemgetter(0, 1, 2))
        text = f"{report.title}: {finding.text}"
        if finding.advice:
            text += f" Try: {finding.advice}."
        for row in TABLES["what_would_help"].rows_shown(report)[:1]:
            effect = f"{row.difference_share:+.0%} of the step"
            text += f" Would help most: {row.change} ({row.option}), {effect}."
    return text, any(map(itemgetter(0), findings))


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)
