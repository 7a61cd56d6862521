"""Converts the output of ``nsys export --type sqlite`` into a Chrome trace.

Nsight Systems omits the tables of what it did not record, so each table is optional. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html ("SQLite Schema Reference").
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

from verl_profiling.errors import TraceFormatError

__all__ = ["convert_nsys"]

_RUNTIME_THREAD = 1 << 24  # globalTid = hardware and VM id, then 24 bits of process, then 24 of thread
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PUSH_POP, _START_END = 59, 60
_BATCH = 10_000


def convert_nsys(database: Path, output: Path, metadata: Mapping[str, Any]) -> int:
    """Write a compressed Chrome trace of an exported report.

    Args:
        database: The SQLite file.
        output: The trace, ending in ``.json.gz``.
        metadata: Plain values kept under ``verl_profiling`` in the trace.

    Returns:
        The number of events.

    Raises:
        TraceFormatError: The file is not an export of Nsight Systems.
        OSError: The trace cannot be written.
    """
    if not database.is_file():
        raise TraceFormatError(database, "no such file")
    part = output.with_name(f".{output.name}.part")
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
    try:
        count = _write(connection, part, metadata)
        part.replace(output)
    except sqlite3.Error as error:
        raise TraceFormatError(database, f"is not an export of Nsight Systems ({error})") from error
    finally:
        connection.close()
        part.unlink(missing_ok=True)
    return count


def _write(connection: sqlite3.Connection, output: Path, metadata: Mapping[str, Any]) -> int:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    head = {
        "verl_profiling": dict(metadata),
        "baseTimeNanoseconds": _session_start_ns(connection),
        "traceEvents": [],
    }
    count = 0
    with igzip.open(output, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(head)[:-2])
        batch: list[dict[str, Any]] = []
        for event in _events(connection, tables):
            batch.append(event)
            if len(batch) == _BATCH:
                file.write(_joined(batch, count))
                count += len(batch)
                batch = []
        file.write(_joined(batch, count) + b"]}")
    return count + len(batch)


def _joined(batch: list[dict[str, Any]], before: int) -> bytes:
    return (b"," if before and batch else b"") + msgspec.json.encode(batch)[1:-1]


def _session_start_ns(connection: sqlite3.Connection) -> int:
    """Return the unix time that all other times are relative to."""
    row = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return int(row[0]) if row else 0


def _events(connection: sqlite3.Connection, tables: set[str]) -> Iterator[dict[str, Any]]:
    if "CUPTI_ACTIVITY_KIND_KERNEL" in tables:
        rows = connection.execute(
            "SELECT s.value, k.start, k.end, k.deviceId, k.streamId, k.correlationId "
            "FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.demangledName"
        )
        for name, begin, end, device, stream, correlation in rows:
            yield _on_device(name or "kernel", "kernel", begin, end, device, stream, correlation)
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in tables:
        rows = connection.execute(
            "SELECT copyKind, start, end, deviceId, streamId, correlationId, bytes "
            "FROM CUPTI_ACTIVITY_KIND_MEMCPY"
        )
        for kind, begin, end, device, stream, correlation, size in rows:
            name = f"Memcpy {_COPIES.get(kind, kind)}"
            event = _on_device(name, "gpu_memcpy", begin, end, device, stream, correlation)
            event["args"]["bytes"] = size
            yield event
    if "CUPTI_ACTIVITY_KIND_MEMSET" in tables:
        rows = connection.execute(
            "SELECT start, end, deviceId, streamId, correlationId FROM CUPTI_ACTIVITY_KIND_MEMSET"
        )
        for begin, end, device, stream, correlation in rows:
            yield _on_device("Memset", "gpu_memset", begin, end, device, stream, correlation)
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        rows = connection.execute(
            "SELECT s.value, r.start, r.end, r.globalTid, r.correlationId "
            "FROM CUPTI_ACTIVITY_KIND_RUNTIME r LEFT JOIN StringIds s ON s.id = r.nameId"
        )
        for name, begin, end, thread, correlation in rows:
            event = _on_thread(name or "cuda call", "cuda_runtime", begin, end, thread)
            event["args"] = {"correlation": correlation}
            yield event
    if "NVTX_EVENTS" in tables:
        rows = connection.execute(
            "SELECT COALESCE(n.text, s.value), n.start, n.end, n.globalTid "
            "FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId "
            "WHERE n.eventType IN (?, ?) AND n.end IS NOT NULL",
            (_PUSH_POP, _START_END),
        )
        for name, begin, end, thread in rows:
            yield _on_thread(name or "range", "user_annotation", begin, end, thread)


def _on_device(
    name: str, category: str, begin: int, end: int, device: int, stream: int, correlation: int
) -> dict[str, Any]:
    return {
        **_span(name, category, begin, end),
        "pid": device,
        "tid": stream,
        "args": {"device": device, "stream": stream, "correlation": correlation},
    }


def _on_thread(name: str, category: str, begin: int, end: int, thread: int) -> dict[str, Any]:
    process = thread // _RUNTIME_THREAD % _RUNTIME_THREAD
    return {**_span(name, category, begin, end), "pid": process, "tid": thread % _RUNTIME_THREAD}


def _span(name: str, category: str, begin: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin / 1000, "dur": (end - begin) / 1000}
