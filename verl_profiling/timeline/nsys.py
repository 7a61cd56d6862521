"""Converts the output of ``nsys export --type sqlite`` into a Chrome trace.

Nsight Systems omits the tables of what it did not record, so each table is optional. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html ("SQLite Schema Reference").
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from isal import igzip

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MAX_NS
from verl_profiling.timeline.trace import LONGEST_US
from verl_profiling.timeline.whole_files import whole_file

__all__ = ["Converted", "convert_nsys"]

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
