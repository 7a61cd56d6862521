"""Writes reports as CSV files, one per table of the report."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiling.report.flat_rows import REPORT_TABLES, columns, flat_rows
from verl_profiling.report.model import Report
from verl_profiling.run_files import naming

__all__ = ["write_csv"]


def write_csv(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write ``stages.csv``, ``workers.csv`` and so on; the columns are those of the JSON.

    Args:
        reports: One report per step; the first column says which.
        folder: Folder to write; it is created if it does not exist.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, row in REPORT_TABLES.items():
        rows = [flat for report in reports for flat in flat_rows(report.step, getattr(report, name))]
        if not rows:
            continue
        path = folder / f"{name}.csv"
        with naming(path), path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(columns(row)))
            writer.writeheader()
            writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
        written.append(path)
    return written


def _plain(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula (OWASP, "CSV Injection")."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
