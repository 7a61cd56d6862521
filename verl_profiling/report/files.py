"""Reports as files and data frames: the tables of :mod:`~verl_profiling.report.tables`, with every field."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.report.model import Report
from verl_profiling.report.tables import TABLES, fields_of, flat_rows
from verl_profiling.run_files import naming

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["data_frame", "write_csv"]

_DTYPES: dict[Any, str] = {
    bool: "bool",
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
}


def write_csv(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write ``stages.csv``, ``workers.csv`` and so on, an empty table too, so that no older one stays.

    Args:
        reports: One report per step; the first columns say which: its title, folder and number.
        folder: Folder to write; it is created if it does not exist.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in TABLES.items():
        path = folder / f"{name}.csv"
        with naming(path), path.open("w", newline="", encoding="utf-8") as file:
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
    """Return rows as a data frame, with the same columns and types when there are none.

    Args:
        kind: What a row is.
        tables: The rows of each step, with its number, which is the first column.

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
    """Return a cell that no spreadsheet takes for a formula (OWASP, "CSV Injection")."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
