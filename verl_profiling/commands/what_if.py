"""Prints the critical path of a step: the chain of work that made it as long as it was.

With changes, prints the predicted step and its critical path.

example: verl-profiling what-if outputs/run/step_000012 --scale update_actor=0.5
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from verl_profiling.analysis import CapturedStep
from verl_profiling.commands.common import (
    StepByStep,
    add_communication,
    add_json,
    add_paths,
    add_ray,
    at_least_0,
    count,
    names,
    option,
    percentage,
    print_json,
)
from verl_profiling.errors import ConfigError
from verl_profiling.numbers.report_columns import PathRow
from verl_profiling.predict.changes import CHANGES, factor_of
from verl_profiling.predict.prediction import Prediction
from verl_profiling.report.console import fitting_console
from verl_profiling.report.tables import cells, summed
from verl_profiling.report.terminal import print_table
from verl_profiling.units import duration, visible, visible_text_of

_ROWS = 8  # of a table that are printed
_SENTENCES = 4  # of a kind that are printed
_UUID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f-]{22}\b")  # of a group; 8 digits say which


DOCUMENTS = (Prediction,)
TEXTS = ("title",)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_paths(parser)
    add_communication(parser)
    add_ray(parser)
    for field, change in CHANGES.items():
        usage, is_list = f"{change.option} {change.values}", "," in change.values
        option(parser, usage, change.help, _READERS[change.values], many=is_list, dest=field)
    add_json(parser, "one document per step")


def run(arguments: argparse.Namespace) -> bool:
    """Print the critical path of each step, as recorded or with changes; return whether all data is
    there.
    """
    work = StepByStep(arguments.paths, arguments.communication, arguments.ray)
    changes = {}
    for field, change in CHANGES.items():
        value = getattr(arguments, field)
        changes[field] = dict(value) if "=" in change.values else value
    predictions = _predictions(work, changes)
    for title, prediction in predictions:
        if arguments.json:
            print_json({"title": title, **msgspec.structs.asdict(prediction)})
        else:
            _print(visible(title), visible_text_of(prediction), fitting_console(Console()))
    return work.is_well and not any(prediction.missing for _, prediction in predictions)


def _predictions(work: StepByStep, changes: Mapping[str, Any]) -> list[tuple[str, Prediction]]:
    """Return the title and the prediction of each step; warn of steps that lack, e.g., the stage
    to be changed.

    Raises:
        ConfigError: The changes fit no step, e.g. no step has the stage.
    """
    predictions: list[tuple[str, Prediction]] = []
    refusals: list[tuple[str, ConfigError]] = []
    with work.reading() as advance:
        for step in work.each:
            title = step.inputs.title
            with work.surviving():
                try:
                    # A new object for the step, so that its graph is freed at once.
                    prediction = CapturedStep(step.inputs).what_if(**changes, on_progress=advance)
                    predictions.append((title, prediction))
                except ConfigError as error:  # the frames of its traceback have the graph
                    refusals.append((title, error.with_traceback(None)))
    if refusals and not predictions:
        raise refusals[0][1]
    for title, refusal in refusals:
        work.problem(f"{title}: {refusal}")
    return predictions


_VALUE = re.compile(r"(.+?)=([^=,]+)(?:,|$)")  # a comma before "=" is a part of the name


def _values(
    read: Callable[[str], float | str],
) -> Callable[[str], list[tuple[str, float | str]]]:
    """Return a parser of an option like ``rollout=0.5,reward=2``, for :mod:`argparse`.

    Args:
        read: Function that converts the text after ``=``.
    """

    def parse(text: str) -> list[tuple[str, float | str]]:
        values, end = [], 0
        while end < len(text):
            match = _VALUE.match(text, end)
            if match is None:
                raise argparse.ArgumentTypeError(f"{text[end:]!r} is not NAME=VALUE")
            values.append((match[1].strip(), read(match[2])))
            end = match.end()
        return values

    return parse


def _time(text: str) -> float | str:
    """Return seconds, or a factor as text; a number without a unit may be meant as either."""
    if factor_of(text.strip()) is not None:
        return text.strip()
    what = "a time such as 0.2s or 150ms, or a factor such as 0.5x"
    time = re.fullmatch(r"(.*?)(ms|us|s)", text.strip())
    if time is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return at_least_0(what)(time[1]) * {"ms": 1e-3, "us": 1e-6}.get(time[2], 1.0)


_READERS: dict[str, Callable[[str], Any]] = {
    "STAGE=FACTOR,...": _values(at_least_0("a factor such as 0.5")),
    "NAME=TIME,...": _values(_time),
    "A,B": names,
    "PERCENT": percentage,
    "NUMBER": count,
    "STEPS": int,
}
"""Functions that parse a value, by its kind in the usage of its option."""


def _print(title: str, prediction: Prediction, console: Console) -> None:
    """Print a prediction: its duration, its critical path, and what would help."""
    console.print(f"[bold]{escape(title)}[/bold]: {_headline(prediction)}")
    for name, table, note in _tables(prediction):
        print_table(console, name, *cells(table), note)
    for kind, sentences in (
        ("missing", prediction.missing),
        ("assumed", prediction.assumed),
        ("note", prediction.notes),
    ):
        for sentence in sentences[:_SENTENCES]:
            console.print(f"[dim]{kind}: {escape(sentence)}[/dim]")
        if len(sentences) > _SENTENCES:
            console.print(f"[dim]{len(sentences) - _SENTENCES:,} more: --json[/dim]")


def _headline(prediction: Prediction) -> str:
    """Return the durations of the step, recorded and predicted, as markup."""
    recorded = duration(prediction.span_us / 1e6)
    if not prediction.changes:
        return recorded
    predicted = f"[bold]{duration(prediction.predicted_us / 1e6)}[/bold]"
    if prediction.low_us is not None and prediction.high_us is not None:
        low, high = duration(prediction.low_us / 1e6), duration(prediction.high_us / 1e6)
        predicted += f" (between {low} and {high})"
    change_us = prediction.predicted_us - prediction.span_us
    change = duration(change_us / 1e6, signed=True)
    share = change_us / max(prediction.span_us, 1e-3)
    changes = escape(" ".join(prediction.changes))
    return f"{recorded}, predicted {predicted} with {changes} ({change}, {share:+.1%})"


def _tables(prediction: Prediction) -> Iterator[tuple[str, Sequence[msgspec.Struct], str]]:
    """Yield title, rows and note of each table."""
    rows = summed(prediction.path)
    longest = _longest(rows)
    path = [row for row in rows if row in longest]
    note = ""
    if len(rows) > _ROWS:
        rest_us = sum(row.duration_us for row in rows) - sum(row.duration_us for row in path)
        note = f"and {duration(rest_us / 1e6)} in {len(rows) - _ROWS} others"
    replace = msgspec.structs.replace
    yield "Critical path", [replace(row, who=_UUID.sub(r"\1…", row.who)) for row in path], note
    if prediction.changes:
        kinds = summed(replace(row, stage="", who="") for row in prediction.path)
        yield "Critical path by kind", _longest(kinds), ""
    slack = sorted((row for row in prediction.slack if row.slack_us), key=lambda row: -row.slack_us)
    note = f"{len(slack) - _ROWS:,} more: --json" if len(slack) > _ROWS else ""
    yield "Slack", slack[:_ROWS], note
    yield "What would help", prediction.what_would_help[:_ROWS], ""


def _longest(rows: Iterable[PathRow]) -> list[PathRow]:
    return sorted(rows, key=lambda row: -row.duration_us)[:_ROWS]
