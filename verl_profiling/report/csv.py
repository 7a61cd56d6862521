"""Writes reports as CSV files: each table of the report, an empty one too, so that no older one stays."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiling.report.flat_rows import REPORT_TABLES, columns, flat_rows, rows_of
from verl_profiling.report.model import Report
from verl_profiling.run_files import naming

__all__ = ["write_csv"]


def write_csv(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write ``stages.csv``, ``workers.csv`` and so on; the columns are those of the JSON.

    Args:
        reports: One report per step; the first columns say which: its title, folder and number.
        folder: Folder to write; it is created if it does not exist.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, row in REPORT_TABLES.items():
        path = folder / f"{name}.csv"
        with naming(path), path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=["title", "directory", *columns(row)])
            writer.writeheader()
            for report in reports:
                of = {"title": report.title, "directory": report.directory}
                for flat in flat_rows(report.step, rows_of(report, name)):
                    writer.writerow({key: _plain(value) for key, value in (of | flat).items()})
        written.append(path)
    return written


def _plain(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula (OWASP, "CSV Injection")."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
