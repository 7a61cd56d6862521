"""Fetches the reports that Nsight Systems finished after the run, and enters them into the manifests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    worst_fate,
)
from verl_profiling.named_files import named_file
from verl_profiling.nsys_ranges import NSYS_FOLDER, NsysRange, read_ranges
from verl_profiling.run_files import read_manifest, write_result
from verl_profiling.timeline.nsys import convert_nsys

__all__ = ["Collected", "collect"]

REPORT = ".nsys-rep"
_TOOL = "nsys"


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the report of one range.

    Attributes:
        path: The report (or the trace made from it), relative to the run's folder.
        fate: ``ok``: the report is in its step folder. ``truncated``: it is, but the process ended
            inside the range. ``missing``: there is no report yet. ``damaged``: a file beside it cannot be
            read, or the report cannot be exported.
        reason: Why it is not ``ok``.
    """

    path: str
    fate: Literal["ok", "truncated", "missing", "damaged"]
    reason: str = ""


def collect(run: Path, *, export: bool = False) -> list[Collected]:
    """Move finished reports into their step folders under canonical names; may be repeated.

    A report that was exported (``nsys export --type sqlite``, a ``.sqlite`` file beside it) also
    becomes a trace, which the timeline and the report of the step include.

    Args:
        run: The run's folder, or one of its step folders.
        export: Export every report first; needs ``nsys``.

    Raises:
        TraceFormatError: Nothing was recorded with nsys there.
        ToolUnavailableError: ``export`` is set, and there is no nsys.
        OSError: A report cannot be moved, or a manifest cannot be written.
    """
    if (run / MANIFEST_NAME).exists():
        run = run.parent
    if export and shutil.which("nsys") is None:
        raise ToolUnavailableError(
            "collect --export: there is no nsys on PATH; install NVIDIA Nsight Systems"
        )
    root = run if (run / NSYS_FOLDER).is_dir() else run.parent  # of a run that shares its save_path
    collected: list[Collected] = []

    def torn(path: Path, problem: str) -> None:
        collected.append(Collected(path=str(path.relative_to(root)), fate="damaged", reason=problem))

    processes = {
        output: [noted for noted in ranges if run in (root, (root / noted.folder).parent)]
        for output, ranges in read_ranges(root / NSYS_FOLDER, torn).items()
    }
    if not any(processes.values()) and not collected:
        raise TraceFormatError(run, "holds no file of the nsys tool; was anything recorded with it?")
    for output, ranges in processes.items():
        for noted in ranges:
            report = _finished_report(output, noted.number, len(ranges))
            if not noted.keep:
                if report is not None:
                    report.unlink()
                continue
            try:
                collected += _fetch(root, noted, report, export)
            except TraceFormatError as error:
                name = f"{noted.folder}/{noted.artifact}"
                collected.append(Collected(path=name, fate="damaged", reason=str(error)))
    return collected


def _finished_report(output: Path, number: int, of: int) -> Path | None:
    """Return the report of a range; Nsight Systems omits the number when there is only one."""
    names = [f"{output.name}.{number}{REPORT}", *([f"{output.name}{REPORT}"] if of == 1 else [])]
    return next((path for path in map(output.with_name, names) if path.is_file()), None)


def _fetch(run: Path, noted: NsysRange, report: Path | None, export: bool) -> Iterator[Collected]:
    name = f"{noted.folder}/{noted.artifact}"
    try:
        folder, target = named_file(run, noted.folder), named_file(run, name)
        if not name.endswith(REPORT):
            raise TraceFormatError(target, f"is not a name of a report, which ends with {REPORT}")
    except TraceFormatError as error:
        yield Collected(path=name, fate="missing", reason=f"refused: {error.problem}")
        return
    if not folder.is_dir():
        yield Collected(path=name, fate="missing", reason="its step folder is gone")
        return
    if report is not None:
        exported = report.with_suffix(".sqlite")
        if exported.is_file():
            shutil.move(exported, target.with_suffix(".sqlite"))
        shutil.move(report, target)
    if not target.is_file():
        reason = "there is no report of this range yet; has its process ended?"
        _enter(folder, noted, None, reason)
        yield Collected(path=name, fate="missing", reason=reason)
        return
    reason = "" if noted.end_ns else "the process ended inside this range"
    _enter(folder, noted, target, reason)
    yield Collected(path=name, fate="truncated" if reason else "ok", reason=reason)
    database = target.with_suffix(".sqlite")
    if export and not database.is_file():
        _export(target, database)
    if database.is_file():
        trace = target.with_suffix(".nsys.json.gz")
        path = f"{noted.folder}/{trace.name}"
        try:
            converted = convert_nsys(database, trace, {"range": noted.number})
        except TraceFormatError as error:
            yield Collected(path=path, fate="missing", reason=str(error))
            return
        reason = reason or converted.problem
        _enter(folder, noted, trace, reason, converted.events)
        yield Collected(path=path, fate="truncated" if reason else "ok", reason=reason)


def _export(report: Path, database: Path) -> None:
    command = [
        "nsys",
        "export",
        "--type",
        "sqlite",
        "--force-overwrite",
        "true",
        "-o",
        str(database),
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines()
        raise TraceFormatError(report, f"nsys export failed: {printed[-1] if printed else done.returncode}")


def _enter(folder: Path, noted: NsysRange, file: Path | None, reason: str, events: int | None = None) -> None:
    """Enter a range's artifact, or the trace made from it, into the step's manifest."""
    if not (folder / MANIFEST_NAME).exists():
        return
    manifest = read_manifest(folder)
    workers = [_with_range(worker, noted, file, reason, events) for worker in manifest.workers]
    for before, worker in zip(manifest.workers, workers, strict=True):
        if worker != before:
            write_result(folder, worker)


def _with_range(
    worker: CaptureResult, noted: NsysRange, file: Path | None, reason: str, events: int | None
) -> CaptureResult:
    known = next((artifact for artifact in worker.artifacts if artifact.path == noted.artifact), None)
    if known is None or known.tool != _TOOL:
        return worker
    fate: Literal["ok", "truncated", "pending"] = (
        "pending" if file is None else "truncated" if reason else "ok"
    )
    entry: Artifact = msgspec.structs.replace(
        known,
        path=known.path if file is None else file.name,
        status=fate,
        reason=reason,
        bytes=None if file is None else file.stat().st_size,
        events=events,
        begin_ns=noted.begin_ns,
        end_ns=noted.end_ns or known.end_ns,
    )
    artifacts = list(
        {**{artifact.path: artifact for artifact in worker.artifacts}, entry.path: entry}.values()
    )
    status, why = worst_fate(artifacts)
    if worker.status == "failed":  # the worker itself failed, which its reports do not change
        status, why = worker.status, worker.reason
    return msgspec.structs.replace(worker, artifacts=artifacts, status=status, reason=why)
