"""Moves the reports of Nsight Systems into the step folders, and converts exported ones into Chrome traces.

Nsight Systems omits the tables of what it did not record, so each table of an export is optional. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html ("SQLite Schema Reference").
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
from isal import igzip

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.manifest import (
    MANIFEST_NAME,
    MAX_NS,
    Artifact,
    CaptureResult,
    worst_fate,
)
from verl_profiling.nsys_ranges import NSYS_FOLDER, NsysRange, read_ranges
from verl_profiling.run_files import named_file, read_manifest, whole_file, write_result
from verl_profiling.timeline.trace import LONGEST_US

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


_RUNTIME_THREAD = 1 << 24  # globalTid = hardware and VM id, then 24 bits of process, then 24 of thread
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PUSH_POP, _START_END = 59, 60
_BATCH = 10_000


class Converted(NamedTuple):
    """What was written.

    Attributes:
        events: Number of events.
        problem: What is not among them, as a sentence; empty if all rows are.
    """

    events: int
    problem: str


def convert_nsys(database: Path, output: Path, metadata: Mapping[str, Any]) -> Converted:
    """Write a compressed Chrome trace of an exported report.

    Args:
        database: The SQLite file.
        output: The trace, ending in ``.json.gz``.
        metadata: Plain values kept under ``verl_profiling`` in the trace.

    Raises:
        TraceFormatError: The file is not an export of Nsight Systems.
        OSError: The trace cannot be written.
    """
    if not database.is_file():
        raise TraceFormatError(database, "no such file")
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    try:
        with whole_file(output) as file:
            converted = _write(connection, file, metadata)
    except (sqlite3.Error, OverflowError) as error:
        raise TraceFormatError(database, f"is not an export of Nsight Systems ({error})") from error
    finally:
        connection.close()
    return converted


def _write(connection: sqlite3.Connection, output: BinaryIO, metadata: Mapping[str, Any]) -> Converted:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    head = {
        "verl_profiling": dict(metadata),
        "baseTimeNanoseconds": _session_start_ns(connection),
        "traceEvents": [],
    }
    count = skipped = 0
    with igzip.open(output, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(head)[:-2])
        batch: list[dict[str, Any]] = []
        for event in _events(connection, tables):
            if event is None:
                skipped += 1
                continue
            batch.append(event)
            if len(batch) == _BATCH:
                file.write(_joined(batch, count))
                count += len(batch)
                batch = []
        file.write(_joined(batch, count) + b"]}")
    problem = f"skipped {skipped:,} rows that are no events" if skipped else ""
    return Converted(count + len(batch), problem)


def _joined(batch: list[dict[str, Any]], before: int) -> bytes:
    return (b"," if before and batch else b"") + msgspec.json.encode(batch)[1:-1]


def _session_start_ns(connection: sqlite3.Connection) -> int:
    """Return the unix time that all other times are relative to."""
    row = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    start = row[0] if row else 0
    if type(start) is int and 0 <= start <= MAX_NS:
        return start
    raise sqlite3.DataError(f"{start!r:.40} is not the time of its start")


def _events(connection: sqlite3.Connection, tables: set[str]) -> Iterator[dict[str, Any] | None]:
    """Yield an event for each row; ``None`` for a row that is none."""
    for table, (columns, make) in _TABLES.items():
        if table in tables:
            for row in connection.execute(f"SELECT {columns}"):
                try:
                    yield make(*row)
                except (TypeError, ValueError):  # a cell may hold anything, whatever its column is
                    yield None


def _kernel(name: Any, begin: int, end: int, device: int, stream: int, correlation: Any) -> dict[str, Any]:
    return _on_device(name or "kernel", "kernel", begin, end, device, stream, {"correlation": correlation})


def _copy(
    kind: Any, begin: int, end: int, device: int, stream: int, correlation: Any, size: Any
) -> dict[str, Any]:
    args = {"correlation": correlation, "bytes": size}
    return _on_device(f"Memcpy {_COPIES.get(kind, kind)}", "gpu_memcpy", begin, end, device, stream, args)


def _memset(begin: int, end: int, device: int, stream: int, correlation: Any) -> dict[str, Any]:
    return _on_device("Memset", "gpu_memset", begin, end, device, stream, {"correlation": correlation})


def _call(name: Any, begin: int, end: int, thread: int, correlation: Any) -> dict[str, Any]:
    event = _on_thread(name or "cuda call", "cuda_runtime", begin, end, thread)
    return {**event, "args": {"correlation": correlation}}


def _range(name: Any, begin: int, end: int, thread: int) -> dict[str, Any]:
    return _on_thread(name or "range", "user_annotation", begin, end, thread)


_TABLES: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "s.value, k.start, k.end, k.deviceId, k.streamId, k.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.demangledName",
        _kernel,
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "copyKind, start, end, deviceId, streamId, correlationId, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY",
        _copy,
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start, end, deviceId, streamId, correlationId FROM CUPTI_ACTIVITY_KIND_MEMSET",
        _memset,
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "s.value, r.start, r.end, r.globalTid, r.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME r LEFT JOIN StringIds s ON s.id = r.nameId",
        _call,
    ),
    "NVTX_EVENTS": (
        "COALESCE(n.text, s.value), n.start, n.end, n.globalTid "
        "FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId "
        f"WHERE n.eventType IN ({_PUSH_POP}, {_START_END}) AND n.end IS NOT NULL",
        _range,
    ),
}


def _on_device(
    name: Any, category: str, begin: int, end: int, device: int, stream: int, args: dict[str, Any]
) -> dict[str, Any]:
    if not type(device) is type(stream) is int:
        raise TypeError
    args = {"device": device, "stream": stream, **args}
    return {**_span(name, category, begin, end), "pid": device, "tid": stream, "args": args}


def _on_thread(name: Any, category: str, begin: int, end: int, thread: int) -> dict[str, Any]:
    process = thread // _RUNTIME_THREAD % _RUNTIME_THREAD
    return {**_span(name, category, begin, end), "pid": process, "tid": thread % _RUNTIME_THREAD}


def _span(name: Any, category: str, begin: int, end: int) -> dict[str, Any]:
    if abs(begin) > MAX_NS or not 0 <= end - begin <= LONGEST_US * 1000:
        raise ValueError
    return {"ph": "X", "name": str(name), "cat": category, "ts": begin / 1000, "dur": (end - begin) / 1000}
