"""What a user sees of a step folder: the verdict of ``verl-profiling check``, and the manifest in Python."""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from pathlib import Path

from rich.console import Console

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.manifest import Manifest
from verl_profiling.report.files import write_csv
from verl_profiling.report.model import Report
from verl_profiling.report.terminal import print_report


def verdict(folder: Path) -> tuple[int, str]:
    """Return the exit status of ``check``, and what it prints of everything that is not ok."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["check", str(folder)])
    return status, "\n".join(line for line in printed.getvalue().splitlines() if not line.startswith("ok "))


def printed(report: Report, width: int = 200, *, everything: bool = True) -> str:
    """Return what a terminal of some width shows of a report."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    print_report(report, console, everything=everything)
    return console.file.getvalue()  # type: ignore[attr-defined]


def csv_rows(folder: Path, *reports: Report, table: str) -> list[dict[str, str]]:
    """Write the tables of reports into a folder, and return the rows of one."""
    write_csv(reports, folder)
    with (folder / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def recorded(folder: Path) -> Manifest:
    """Return the manifest of a step, however it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a step that was never ended is one
        manifest = open_step(folder).manifest
    assert manifest is not None
    return manifest


def reasons(manifest: Manifest) -> str:
    """Return everything that a manifest says besides numbers."""
    said = [*manifest.notes]
    for worker in manifest.workers:
        said += [worker.reason, *worker.notes, *(artifact.reason for artifact in worker.artifacts)]
    return "\n".join(filter(None, said))


def is_ok(manifest: Manifest) -> bool:
    """Return whether a step was recorded whole: it was ended, and every worker has its artifacts."""
    artifacts = [artifact for worker in manifest.workers for artifact in worker.artifacts]
    return (
        manifest.complete
        and bool(manifest.workers)
        and all(worker.status == "ok" for worker in manifest.workers)
        and all(artifact.status == "ok" for artifact in artifacts)
    )
