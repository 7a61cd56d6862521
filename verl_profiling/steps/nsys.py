"""Moves reports of Nsight Systems into step folders, and converts exported reports into Chrome
traces.

A range is one recording of a process; Nsight Systems writes a report for each.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from isal import igzip
from msgspec.structs import replace

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.files.opener import move_file, named_file, read_small, remove_file, whole_file
from verl_profiling.files.run_files import read_manifest, write_result
from verl_profiling.manifest import (
    MANIFEST_NAME,
    NOTES_SUFFIX,
    NSYS_FOLDER,
    NsysRange,
    worst_status,
)
from verl_profiling.steps.databases import trace_of_database

REPORT = ".nsys-rep"
_TOOL = "nsys"


class Collected(NamedTuple):
    """The result of collecting the report of one range.

    Attributes:
        path: The report (or the trace made from it), relative to the run's folder.
        status: ``ok``: the report is in its step folder. ``truncated``: the process ended inside
            the range. ``missing``: there is no report yet. ``damaged``: the list of ranges is
            damaged, or the report cannot be moved or exported.
        reason: Reason for any status but ``ok``.
    """

    path: str
    status: Literal["ok", "truncated", "missing", "damaged"]
    reason: str = ""


def collect(run: Path, *, export: bool = False) -> list[Collected]:
    """Move finished reports into their step folders under canonical names; repeated calls are safe.

    A report with a ``.sqlite`` file next to it (``nsys export --type sqlite``) is also converted to
    a trace, which the step's timeline and report include.

    Args:
        run: The run's folder, or one of its step folders.
        export: Whether to run ``nsys export`` on every report first.

    Raises:
        TraceFormatError: The run has no files of the nsys tool.
        ToolUnavailableError: ``export`` is set, and ``nsys`` is not on ``PATH``.
        OSError: A report cannot be moved, or a manifest cannot be written.
    """
    if (run / MANIFEST_NAME).exists():
        run = run.parent
    if export and shutil.which("nsys") is None:
        raise ToolUnavailableError(
            "collect --export: there is no nsys on PATH; install NVIDIA Nsight Systems"
        )
    root = run
    if not (run / NSYS_FOLDER).is_dir():  # several runs may share one save_path
        root = run.parent
    of_outputs, collected = read_ranges(named_file(root, NSYS_FOLDER))
    processes = {
        output: [noted for noted in ranges if run in (root, (root / noted.folder).parent)]
        for output, ranges in of_outputs.items()
    }
    if not any(processes.values()) and not collected:
        raise TraceFormatError(
            run, "holds no file of the nsys tool; did the run record with this tool?"
        )
    for output, ranges in processes.items():
        for noted in ranges:
            report = _finished_report(output, noted.number, len(ranges))
            if not noted.keep:
                if report is not None:
                    remove_file(report)
                continue
            try:
                collected += _fetch(root, noted, report, export)
            except TraceFormatError as error:
                collected.append(
                    Collected(f"{noted.folder}/{noted.artifact}", "damaged", str(error))
                )
    return collected


def read_ranges(folder: Path) -> tuple[dict[Path, list[NsysRange]], list[Collected]]:
    """Return the ranges of each process by the common begin of its reports' paths, and an entry for
    each damaged line.

    Each process logs its ranges in a file next to the reports. A killed process may leave half a
    line; complete lines are still valid.
    """
    ranges: dict[Path, list[NsysRange]] = {}
    damaged = []
    for path in sorted(folder.glob(f"*{NOTES_SUFFIX}")):
        name = f"{NSYS_FOLDER}/{path.name}"
        latest: dict[int, NsysRange] = {}
        try:
            lines = read_small(path).splitlines()
        except OSError as error:
            damaged.append(Collected(name, "damaged", f"cannot be read: {error.strerror}"))
            continue
        for line in lines:
            try:
                noted = msgspec.json.decode(line, type=NsysRange)
                latest[noted.number] = noted
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"a line is incomplete, and its range is lost: {error}"
                damaged.append(Collected(name, "damaged", problem))
        output = path.with_name(path.name.removesuffix(NOTES_SUFFIX))
        ranges[output] = [latest[number] for number in sorted(latest)]
    return ranges, damaged


def _finished_report(output: Path, number: int, of: int) -> Path | None:
    """Return the report of a range, or ``None`` if Nsight Systems has not written it yet.

    Args:
        output: Path of the process's reports without number and suffix.
        number: Number of the range.
        of: Number of ranges of the process. Nsight Systems does not number a single report.
    """
    report = output.with_name(f"{output.name}.{number}{REPORT}")
    if of == 1 and not _is_there(report):
        report = output.with_name(f"{output.name}{REPORT}")
    return report if _is_there(report) else None


def _is_there(path: Path) -> bool:
    """Return whether Nsight Systems wrote a file; it writes no symbolic links."""
    return path.is_file() and not path.is_symlink()


def _fetch(run: Path, noted: NsysRange, report: Path | None, export: bool) -> Iterator[Collected]:
    """Move the report of a range into its step folder, and convert an exported report."""
    folder = named_file(run, noted.folder)
    target = named_file(run, f"{noted.folder}/{noted.artifact}")
    if not target.name.endswith(REPORT):
        raise TraceFormatError(target, f"is not a name of a report, which ends with {REPORT}")
    if not folder.is_dir():
        yield Collected(
            f"{noted.folder}/{noted.artifact}", "missing", "the step folder was removed"
        )
        return
    database = target.with_suffix(".sqlite")
    if report is not None:
        exported = report.with_suffix(".sqlite")
        if _is_there(exported):
            move_file(exported, database)
        move_file(report, target)
    if not _is_there(target):
        yield _entered(
            folder, noted, None, "there is no report of this range yet; has its process ended?"
        )
        return
    reason = ""
    if not noted.end_ns:
        reason = "the process ended inside this range"
    yield _entered(folder, noted, target, reason)
    if export and not database.is_file():
        _export(target, database)
    if database.is_file():
        trace = target.with_suffix(".nsys.json.gz")
        try:
            events = convert_nsys(database, trace, {"range": noted.number})
        except TraceFormatError as error:
            yield Collected(f"{noted.folder}/{trace.name}", "damaged", str(error))
            return
        yield _entered(folder, noted, trace, reason, events)


def _export(report: Path, database: Path) -> None:
    options = ["--type", "sqlite", "--force-overwrite", "true", "-o"]
    command = ["nsys", "export", *options, str(database), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines()
        raise TraceFormatError(
            report, f"nsys export failed: {printed[-1] if printed else done.returncode}"
        )


def _entered(
    folder: Path, noted: NsysRange, file: Path | None, reason: str, events: int | None = None
) -> Collected:
    """Add the artifact of a range, or the converted trace, to the result of its worker in the step
    folder, if there is a manifest.

    Args:
        folder: The step folder.
        noted: The range, as its process logged it.
        file: The report or the trace; ``None`` if there is no report yet.
        reason: Reason for any status but ``ok``.
        events: Number of events of the trace.
    """
    status: Literal["ok", "truncated"] = "truncated" if reason else "ok"
    workers = read_manifest(folder).workers if (folder / MANIFEST_NAME).exists() else []
    for worker in workers:
        artifacts = {artifact.path: artifact for artifact in worker.artifacts}
        listed = artifacts.get(noted.artifact)
        if listed is None or listed.tool != _TOOL:
            continue
        entry = replace(
            listed,
            path=listed.path if file is None else file.name,
            status="pending" if file is None else status,
            reason=reason,
            bytes=None if file is None else file.stat().st_size,
            events=events,
            begin_ns=noted.begin_ns,
            end_ns=noted.end_ns or listed.end_ns,
        )
        entries = list({**artifacts, entry.path: entry}.values())
        result = replace(worker, artifacts=entries)
        if worker.status != "failed":  # a failed worker stays failed, whatever its reports
            worst, why = worst_status(entries)
            result = replace(result, status=worst, reason=why)
        if result != worker:
            write_result(folder, result)
    if file is None:
        return Collected(f"{noted.folder}/{noted.artifact}", "missing", reason)
    return Collected(f"{noted.folder}/{file.name}", status, reason)


def convert_nsys(database: Path, output: Path, metadata: Mapping[str, Any]) -> int:
    """Write a compressed Chrome trace of an exported report; return the number of its events.

    Args:
        database: The SQLite file.
        output: The trace, ending in ``.json.gz``.
        metadata: Plain values kept under ``verl_profiling`` in the trace.

    Raises:
        TraceFormatError: The file is not an export of Nsight Systems.
        OSError: The trace cannot be written.
    """
    count = 0
    with (
        whole_file(output) as file,
        igzip.open(file, "wb", compresslevel=1) as packed,
        BufferedWriter(packed, 1 << 18) as buffered,
    ):
        for piece in trace_of_database(database, metadata):
            buffered.write(piece)
            count += 1
    return count - 2  # header and end are no events
