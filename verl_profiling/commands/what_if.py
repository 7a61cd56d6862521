"""``verl-profiling what-if``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.markup import escape

from verl_profiling.analysis import CapturedStep
from verl_profiling.commands import EXIT_FINDING, at_least_0, count, option
from verl_profiling.commands.common import (
    StepByStep,
    add_communication,
    add_paths,
    add_ray,
    progress,
)
from verl_profiling.errors import ConfigError
from verl_profiling.predict.changes import Changes, factor_of
from verl_profiling.predict.prediction import Prediction
from verl_profiling.report.tables import cells, summed
from verl_profiling.report.terminal import fitting_console, print_table
from verl_profiling.units import duration, visible, visible_text_of

_ROWS = 8
_SENTENCES = 4
_UUID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f-]{22}\b")  # of a group; 8 digits say which


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Prints the critical path of a step: the chain of work that made it as long as it "
        "was. With "
        "changes, prints the predicted step and its critical path."
    )
    parser.epilog = (
        "example: verl-profiling what-if outputs/run/step_000012 --scale update_actor=0.5"
    )
    add_paths(parser)
    add_communication(parser)
    add_ray(parser)
    help = (
        "a stage, or kernels (e.g. kernel:*gemm*=0.5), take this part of their time; "
        "repeatable, like "
        "--balance and --tool"
    )
    option(
        parser, "--scale STAGE=FACTOR", help, _named(at_least_0("a factor such as 0.5")), many=True
    )
    option(
        parser,
        "--balance STAGE",
        "a stage takes the mean of its workers on each of them",
        many=True,
    )
    help = "a rollout ends when this many of its trajectories, else requests, have ended"
    option(parser, "--no-tail PERCENT", help, _percent)
    help = "each call of a tool takes this time, or this factor of it: search=0.2s, search=0.5x"
    option(parser, "--tool NAME=TIME", help, _named(_time), many=True, dest="tools")
    help = "a tool no longer blocks the event loop of its agent loop; repeatable"
    option(parser, "--unblock NAME", help, many=True)
    help = "the requests of the rollout are served by this many replicas; prints an interval"
    option(parser, "--replicas NUMBER", help, count)
    help = "1: the next rollout runs beside the training; prints an interval"
    option(parser, "--async STEPS", help, int, dest="steps_ahead")
    option(parser, "--json", "print JSON, one document per step")


def run(arguments: argparse.Namespace) -> int:
    """Print the critical path of each step, as recorded or with changes."""
    work = StepByStep(arguments.paths, arguments.communication, arguments.ray)
    steps = [step for capture in work.steps for step in capture.by_step()]
    changes = {name: getattr(arguments, name) for name in Changes.__struct_fields__}
    changes |= {name: dict(changes[name]) for name in ("scale", "tools")}
    found: list[tuple[CapturedStep, Prediction]] = []
    refused: list[tuple[CapturedStep, ConfigError]] = []
    with progress("reading", sum(len(step.inputs.sources) for step in steps)) as advance:
        for step in steps:
            with work.surviving():
                try:
                    # Another object, whose graph goes at once.
                    prediction = CapturedStep(step.inputs).what_if(**changes, on_progress=advance)
                except ConfigError as error:
                    refused.append((step, error.with_traceback(None)))  # its frames have the graph
                    continue
                found.append((step, prediction))
    if refused and not found:
        raise refused[0][1]
    for step, problem in refused:
        work.problem(f"{step.inputs.title}: {problem}")
    for step, prediction in found:
        if arguments.json:
            print(msgspec.json.encode(prediction).decode())
        else:
            _print(
                visible(step.inputs.title), visible_text_of(prediction), fitting_console(Console())
            )
    return EXIT_FINDING if any(prediction.missing for _, prediction in found) else work.exit_code


def _named(read: Callable[[str], float | str]) -> Callable[[str], tuple[str, float | str]]:
    """Return a parser of a name and a value, e.g. ``rollout=0.5``."""

    def parse(text: str) -> tuple[str, float | str]:
        name, _, value = text.rpartition("=")
        if not name:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
        return name, read(value)

    return parse


def _time(text: str) -> float | str:
    if factor_of(text.strip()) is not None:
        return text.strip()
    number, unit = re.fullmatch(r"(.*?)(ms|us|s|)", text.strip()).groups()  # type: ignore[union-attr]
    return at_least_0("a time such as 0.2s or 150ms, or a factor such as 0.5x")(number) * {
        "ms": 1e-3,
        "us": 1e-6,
    }.get(unit, 1.0)


def _percent(text: str) -> float:
    return at_least_0("a percentage such as 95")(text.removesuffix("%"))


def _print(title: str, found: Prediction, console: Console) -> None:
    changed = found.predicted_us - found.span_us
    said = f"{duration(found.span_us / 1e6)}"
    if found.changes:
        said += f", predicted [bold]{duration(found.predicted_us / 1e6)}[/bold]"
        if found.low_us is not None and found.high_us is not None:
            said += f" (between {duration(found.low_us / 1e6)} and {duration(found.high_us / 1e6)})"
        said += (
            f" with {escape(' '.join(found.changes))}"
            f" ({duration(changed / 1e6, signed=True)}, {changed / max(found.span_us, 1e-3):+.1%})"
        )
    console.print(f"[bold]{escape(title)}[/bold]: {said}")
    rows = summed(found.path)
    largest = sorted(rows, key=lambda row: -row.duration_us)[:_ROWS]
    rest_us = sum(row.duration_us for row in found.path) - sum(row.duration_us for row in largest)
    short = (
        msgspec.structs.replace(row, who=_UUID.sub(r"\1…", row.who))
        for row in rows
        if row in largest
    )
    note = (
        f"and {duration(rest_us / 1e6)} in {len(rows) - _ROWS} others" if len(rows) > _ROWS else ""
    )
    kinds = (msgspec.structs.replace(row, stage="", who="") for row in found.path if found.changes)
    slack = sorted((row for row in found.slack if row.slack_us), key=lambda row: -row.slack_us)
    for name, table, below in (
        ("Critical path", list(short), note),
        (
            "Critical path by kind",
            sorted(summed(kinds), key=lambda row: -row.duration_us)[:_ROWS],
            "",
        ),
        (
            "Slack",
            slack[:_ROWS],
            f"{len(slack) - _ROWS:,} more: --json" if len(slack) > _ROWS else "",
        ),
        ("What would help", found.what_would_help[:_ROWS], ""),
    ):
        print_table(console, name, *cells(table), below)
    for kind, sentences in (
        ("missing", found.missing),
        ("assumed", found.assumed),
        ("note", found.notes),
    ):
        for sentence in sentences[:_SENTENCES]:
            console.print(f"[dim]{kind}: {escape(sentence)}[/dim]")
        if len(sentences) > _SENTENCES:
            console.print(f"[dim]{len(sentences) - _SENTENCES:,} more: --json[/dim]")
