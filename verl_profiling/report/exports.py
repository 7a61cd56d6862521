"""Reports for other programs: files, data frames, and the scalars of trackers.

Event files are written with tensorboard's own writer, without torch. All points of a run go into
one TensorBoard run, under ``profiling/``.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.files.opener import make_folder, real_folder, whole_file
from verl_profiling.files.run_files import EventFile
from verl_profiling.manifest import NUMBER_BYTES
from verl_profiling.numbers.report_columns import sum_of
from verl_profiling.report.model import Report
from verl_profiling.report.tables import TABLES, fields_of, flat_rows
from verl_profiling.slices.intervals import grouped

if TYPE_CHECKING:
    from pandas import DataFrame

_DTYPES: dict[Any, str] = {
    bool: "bool",
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
}


def write_csv(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write ``stages.csv``, ``workers.csv`` and so on; empty tables too, so that older files are
    replaced.

    Args:
        reports: One report per step; the first columns are the step's title, folder and number.
        folder: Folder to write; a missing folder is created.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = real_folder(folder)
    make_folder(folder)
    written = []
    for name, table in TABLES.items():
        path = folder / f"{name}.csv"
        with whole_file(path) as raw, TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=["title", "directory", *fields_of(table.row)])
            writer.writeheader()
            for report in reports:
                of = {"title": report.title, "directory": report.directory}
                for flat in flat_rows(report.step, table.rows(report)):
                    writer.writerow({key: _plain(value) for key, value in (of | flat).items()})
        written.append(path)
    return written


def data_frame(
    kind: type[msgspec.Struct], tables: Iterable[tuple[int | None, Iterable[msgspec.Struct]]]
) -> DataFrame:
    """Return rows as a data frame, with the same columns and types if there are no rows.

    Args:
        kind: Class of the rows.
        tables: Pairs of step number (the first column) and rows.

    Raises:
        ToolUnavailableError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ToolUnavailableError(
            f"to_frame needs {error.name}: pip install 'verl-profiling[analysis]', or use report()"
        ) from error
    types = fields_of(kind)
    records = [record for step, rows in tables for record in flat_rows(step, rows)]
    frame = pandas.DataFrame.from_records(records, columns=list(types))
    return frame.astype({name: _DTYPES[kind] for name, kind in types.items() if kind in _DTYPES})


def _plain(value: Any) -> Any:
    """Return a cell, quoted if a spreadsheet would read it as a formula (OWASP,
    "CSV Injection").
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return value


def write_tensorboard(reports: Sequence[Report], logdir: Path) -> None:
    """Write one point per report; a report without a step is written as step 0.

    Raises:
        ConfigError: Several reports have no step, so their points would overwrite each other.
        ToolUnavailableError: tensorboard is missing.
    """
    if sum(report.step is None for report in reports) > 1:
        titles = "; ".join(report.title for report in reports if report.step is None)
        raise ConfigError(
            "--tensorboard", f"needs steps with numbers, or one recording; there are: {titles}"
        )
    file = EventFile(real_folder(logdir), "--tensorboard")
    for report in reports:
        file.add(report.step or 0, {f"profiling/{name}": value for name, value in scalars(report)})


def scalars(report: Report) -> Iterator[tuple[str, float]]:
    """Yield the main numbers of a report by name, for any metric tracker; ``profiled`` is always 1,
    which marks the step.
    """
    yield "profiled", 1.0
    yield "step_s", report.span_us / 1e6
    for stage in report.stages:
        yield f"stage/{stage.name.strip('()').replace(' ', '_')}_s", stage.duration_us / 1e6
    exposed_us = sum_of(report.devices, "exposed_communication_us")
    yield "busy_share", sum_of(report.devices, "busy_us") / report.observed_us
    yield "exposed_communication_share", exposed_us / report.observed_us
    for lost in report.lost:
        yield f"lost/{lost.cause}_s", lost.seconds
    if report.tail:
        yield "rollout/tail_ratio", report.tail.ratio
        yield "rollout/tail_share", report.tail.tail_share
    rollout = report.rollout
    if rollout:
        yield "trajectories/count", float(rollout.trajectories)
        for row in rollout.causes:
            if not row.validate:
                yield f"trajectories/{row.cause.replace(' ', '_')}_s", row.seconds
        yield "trajectories/group_waited_s", rollout.group_waited_s
    if report.throughput:
        yield "tokens_per_s", report.throughput.tokens_per_s
    yield from _work_and_limits(report)
    peaks: dict[str, float] = {}
    for measure in report.measures:
        if measure.name == NUMBER_BYTES:  # which is no peak
            continue
        name = f"peak/{measure.stage}/{measure.name}" if measure.stage else f"peak/{measure.name}"
        peaks[name] = max(measure.value, peaks.get(name, measure.value))
    yield from peaks.items()


def _work_and_limits(report: Report) -> Iterator[tuple[str, float]]:
    """Yield the work by stage, bytes of links, achieved operations, and what taught nothing."""
    sums = defaultdict[str, float](float)
    for row in report.work:
        sums[f"work/{row.stage}/tokens"] += row.tokens or 0
    for link in report.links:
        sums[f"links/{link.name.replace(' ', '_')}/bytes"] += link.bytes or 0
    for slow in report.stragglers:
        if slow.data_us is not None:
            sums[f"slowest/{slow.stage}/data_s"] += slow.data_us / 1e6
    for part in report.useless_training:
        sums[f"taught_nothing/{part.stage}"] += part.share
    if report.rollout and report.rollout.rewarded:
        sums["taught_nothing/rollout"] = sum_of(report.rollout.nothing, "share")
    yield from sums.items()
    for stage, rows in grouped(report.achieved, attrgetter("stage")).items():
        yield f"achieved/{stage.strip('()')}/tflops", sum_of(rows, "teraflops") / len(rows)
