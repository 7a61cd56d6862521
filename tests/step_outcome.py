"""What a user sees of a report: on a terminal, and in the files of its tables."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rich.console import Console

from verl_profiling.report.exports import write_csv
from verl_profiling.report.model import Report
from verl_profiling.report.terminal import print_report


def printed(report: Report, width: int = 200, *, everything: bool = True) -> str:
    """Return what a terminal of some width shows of a report."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    print_report(report, console, everything=everything)
    return console.file.getvalue()  # type: ignore[attr-defined]


def csv_rows(folder: Path, *reports: Report, table: str) -> list[dict[str, str]]:
    """Write the tables of reports, if there are any, into a folder; return the rows of one."""
    if reports:
        write_csv(reports, folder)
    with (folder / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
