"""Writes reports as CSV files, one per table of the report."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.report.model import Report

__all__ = ["write_csv"]

_TABLES = ("stages", "workers", "engines", "lost", "stragglers", "collectives", "ops")
_NOT_FLAT = {"load", "lost_us"}


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
    for name in _TABLES:
        rows = [{"step": report.step, **row} for report in reports for row in _flat(getattr(report, name))]
        if not rows:
            continue
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        written.append(path)
    return written


def _flat(rows: Iterable[msgspec.Struct]) -> Iterable[dict[str, Any]]:
    for row in rows:
        fields: dict[str, Any] = msgspec.to_builtins(row)
        causes = {f"lost_{cause}_us": us for cause, us in fields.get("lost_us", {}).items()}
        yield {key: value for key, value in fields.items() if key not in _NOT_FLAT} | causes
