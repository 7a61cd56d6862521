"""Reads databases of Nsight Systems and of torch_npu as Chrome traces.

Both omit empty tables, and older versions lack columns. Schemas:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html ("SQLite Schema Reference"), and the
names of tables in https://gitee.com/ascend/mstt. An NPU's events have the form of
``trace_view.json``, so one set of rules classifies both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import opened, reading
from verl_profiling.manifest import MAX_NS

if TYPE_CHECKING:
    import sqlite3

MAGIC = b"SQLite format 3\0"
"""First bytes of a database."""

NO_DATABASE = "is not an export of Nsight Systems, nor a database of torch_npu"

_Json = dict[str, Any]


def trace_of_database(path: Path, metadata: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a Chrome trace: its header, one event at a time, and its end.

    Args:
        path: The database.
        metadata: Plain values that are written under the header's key ``verl_profiling``.

    Raises:
        TraceFormatError: The file is no database of Nsight Systems or torch_npu.
    """
    import sqlite3

    with reading(path):
        connection = open_database(path)
    try:
        database = _Database(connection)
        read = _of_npu if "STRING_IDS" in database.tables else _of_nsys
        header, events = read(database)
        header["verl_profiling"] = {**metadata, **header["verl_profiling"]}
        yield msgspec.json.encode({**header, "traceEvents": []})[:-2]
        separator = b""
        for event in events:
            yield separator + msgspec.json.encode(event)
            separator = b","
        yield b"]}"
    except (
        sqlite3.Error,
        TypeError,
        OverflowError,
        UnicodeDecodeError,
    ) as error:  # it does not check types
        raise TraceFormatError(path, f"{NO_DATABASE} ({error})") from error
    finally:
        connection.close()


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database for reading.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    import sqlite3  # 1 MB, which no other trace needs

    opened(path).close()
    # SQLite opens by name; when nothing changes, it looks for no journal, which could be a link.
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return connection


class _Database:
    """An open database.

    Attributes:
        select: Runs a query.
        tables: Names of the columns of each table.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.select = connection.execute
        self.tables: dict[str, list[str]] = {}
        for (table,) in self.select("SELECT name FROM sqlite_master WHERE type = 'table'"):
            columns = self.select(f'PRAGMA table_info("{table}")')
            self.tables[table] = [name for _, name, *_ in columns]

    def first(self, query: str) -> int:
        """Return the only value of a query, a time or a number; 0 without a row."""
        (value,) = self.select(query).fetchone() or (0,)
        if type(value) is int and 0 <= value <= MAX_NS:
            return value
        raise TypeError(f"{value!r:.40} is no time or number")


def _named(pid: object, name: str, label: str) -> Iterator[_Json]:
    """Yield the metadata events with the name and the label of a process."""
    for key, value in (("name", name), ("labels", label)):
        yield {"ph": "M", "name": f"process_{key}", "pid": pid, "tid": 0, "args": {key: value}}


class _Table(NamedTuple):
    """A table of Nsight Systems that is read.

    Attributes:
        category: Category of its events in the Chrome trace, as torch writes it.
        title: SQL expression for the name of an event.
        condition: SQL condition on the rows that are read.
    """

    category: str
    title: str
    condition: str = "1"


_COPY = (
    "CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' WHEN 10 THEN "
    "'PtoP' ELSE copyKind"
)
_PUSH_POP, _START_END = 59, 60
WHOLE_GRAPH = "CUDA graph "
"""Begin of the name of an event for all kernels of a graph launch, which may be collectives."""
_STRING = "(SELECT value FROM StringIds WHERE id = {})"
_DEVICE_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _Table(
        "kernel", f"COALESCE({_STRING.format('demangledName')}, 'kernel')"
    ),
    # One row per launch, instead of its kernels, where --cuda-graph-trace is "graph".
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _Table("kernel", f"'{WHOLE_GRAPH}' || graphId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": _Table("gpu_memcpy", f"'Memcpy ' || {_COPY} END"),
    "CUPTI_ACTIVITY_KIND_MEMSET": _Table("gpu_memset", "'Memset'"),
}
_TABLES = {
    **_DEVICE_TABLES,
    "CUPTI_ACTIVITY_KIND_RUNTIME": _Table(
        "cuda_runtime", f"COALESCE({_STRING.format('nameId')}, 'cuda call')"
    ),
    "NVTX_EVENTS": _Table(
        "user_annotation",
        f"COALESCE(text, {_STRING.format('textId')}, 'range')",
        f"eventType IN ({_PUSH_POP}, {_START_END})",
    ),
}
"""The tables of Nsight Systems that are read."""

_COLUMNS = (
    "deviceId",
    "streamId",
    "correlationId",
    "bytes",
    "globalPid",
    "globalTid",
)  # any may be absent
_TIMED = "start IS NOT NULL AND end IS NOT NULL"
_OPERATOR = re.compile(r"(.+?), (?:seq|op_id) = ")  # torch.autograd.profiler.emit_nvtx
# First id in the trace for a device that several processes use. It is above the numbers of
# devices, and below the ids that Linux processes have in a timeline's lane.
_FIRST_SHARED = 1_000

_Devices = dict[tuple[int, int], int]
"""Process id of a device in the trace, by id of the process that uses it, and device number."""


def _of_nsys(database: _Database) -> tuple[_Json, Iterator[_Json]]:
    """Return header and events of an export of Nsight Systems."""
    start_ns = database.first("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    devices = _devices(database)
    parts: dict[int, list[int]] = {}
    for (process, _), pid in devices.items():
        parts.setdefault(process, [process]).append(pid)
    about: _Json = {"notes": list(_left_out(database))}
    header: _Json = {"verl_profiling": about, "baseTimeNanoseconds": start_ns}
    if len(parts) > 1:
        about["processes"] = list(parts.values())
    return header, _all_nsys_events(database, devices)


def _all_nsys_events(database: _Database, devices: _Devices) -> Iterator[_Json]:
    for (_, device), pid in devices.items():
        if pid != device:
            yield from _named(pid, "", f"GPU {device}")
    for table in _TABLES:
        if table in database.tables:
            yield from _nsys_events(database, table, devices)


def _process_of(number: int) -> int:
    """Return the process id in an id of Nsight Systems: 24 bits,
    before the 24 bits of the thread.
    """
    return number >> 24 & 0xFFFFFF


def _devices(database: _Database) -> _Devices:
    """Return the id in the trace for each device of each process.

    The id is the device's number. If several processes use the device, all but one get an id from
    1000 on.
    """
    used: set[tuple[int, int]] = set()
    for table in _DEVICE_TABLES:
        if "globalPid" in database.tables.get(table, ()):
            processes = (
                f"SELECT DISTINCT deviceId, globalPid FROM {table} WHERE globalPid IS NOT NULL"
            )
            used |= {(device, _process_of(number)) for device, number in database.select(processes)}
    pids: _Devices = {}
    for device, process in sorted(used):
        pids[process, device] = _FIRST_SHARED + len(pids) if device in pids.values() else device
    return pids


def _left_out(database: _Database) -> Iterator[str]:
    """Yield notes on rows without a begin or end, and on tables with times that are not read."""
    for name, table in _TABLES.items():
        if name in database.tables:
            untimed = f"{table.condition} AND NOT ({_TIMED})"
            rows = database.first(f"SELECT COUNT(*) FROM {name} WHERE {untimed}")
            if rows:
                yield f"{rows:,} rows of {name} have no begin or no end, and are left out"
    unread = []
    for name, columns in database.tables.items():
        if name not in _TABLES and not {"start", "timestamp"}.isdisjoint(columns):
            rows = database.first(f'SELECT COUNT(*) FROM "{name}"')
            if rows:
                unread.append(f"{name} ({rows:,})")
    if unread:
        yield f"tables of activity that are not read, with their rows: {', '.join(sorted(unread))}"


def _nsys_events(database: _Database, name: str, devices: _Devices) -> Iterator[_Json]:
    """Yield an event for each row of a table."""
    table = _TABLES[name]
    existing = dict.fromkeys(_COLUMNS, "NULL")
    for column in existing.keys() & database.tables[name]:
        existing[column] = column
    columns = ", ".join(existing.values())
    condition = f"{table.condition} AND {_TIMED}"
    rows = database.select(
        f"SELECT {table.title}, start, end, {columns} FROM {name} WHERE {condition}"
    )
    for title, begin, end, device, stream, correlation, size, process, thread in rows:
        event: _Json = {"ph": "X", "name": str(title), "cat": table.category}
        event |= {"ts": begin / 1000, "dur": (end - begin) / 1000}
        args = {"device": device, "stream": stream, "correlation": correlation, "bytes": size}
        event["args"] = {key: value for key, value in args.items() if value is not None}
        if thread is None:
            owner = 0 if process is None else _process_of(process)
            event |= {"pid": devices.get((owner, device), device), "tid": stream}
        else:
            event |= {"pid": _process_of(thread), "tid": thread & 0xFFFFFF}
        if name == "NVTX_EVENTS" and (operator := _OPERATOR.match(event["name"])):
            event |= {"name": operator[1], "cat": "cpu_op"}
        yield event


class _NpuTable(NamedTuple):
    """A query of a database of torch_npu; each row becomes an event.

    Attributes:
        tables: Tables that the query needs.
        process: Name of the events' process, as in ``trace_view.json``; empty if the process is
            that of the host thread.
        name: Column with the id of the event's name.
        kind: SQL expression for the event's category; with ``process``, for its task type.
        thread: Column with the thread or stream.
        rest: SQL after the list of columns.
    """

    tables: tuple[str, ...]
    process: str
    name: str
    kind: str
    thread: str
    rest: str


_HARDWARE, _COLLECTIVES, _CANN = "Ascend Hardware", "Communication", "CANN"
_TEXT = "(SELECT value FROM STRING_IDS WHERE id = {})"
_TYPE = _TEXT.format("taskType")
_PYTHON = (
    "CASE type WHEN 50001 THEN 'cpu_op' WHEN 50003 THEN 'python_function' ELSE "
    f"CASE {_TEXT.format('name')} WHEN 'Enqueue' THEN 'enqueue' ELSE 'dequeue' END END"
)
_COMPUTING = "FROM TASK JOIN COMPUTE_TASK_INFO AS info USING (globalTaskId)"
_COPYING = f"FROM TASK WHERE {_TYPE} LIKE '%MEMCPY%' OR {_TYPE} LIKE '%DMA%'"
_NPU_TABLES = (
    _NpuTable(
        ("TASK", "COMPUTE_TASK_INFO"),
        _HARDWARE,
        "info.name",
        _TEXT.format("info.taskType"),
        "streamId",
        _COMPUTING,
    ),
    _NpuTable(("TASK",), _HARDWARE, "taskType", _TYPE, "streamId", _COPYING),
    _NpuTable(
        ("COMMUNICATION_OP",), _COLLECTIVES, "opName", "''", "groupName", "FROM COMMUNICATION_OP"
    ),
    _NpuTable(("CANN_API",), _CANN, "name", "''", "globalTid", "FROM CANN_API"),
    _NpuTable(("PYTORCH_API",), "", "name", _PYTHON, "globalTid", "FROM PYTORCH_API"),
    _NpuTable(
        ("MSTX_EVENTS",), "", "message", "'user_annotation'", "globalTid", "FROM MSTX_EVENTS"
    ),
)
"""The queries of a database of torch_npu. Tasks inside collectives are not read, because an event
covers the whole collective.
"""


def _of_npu(database: _Database) -> tuple[_Json, Iterator[_Json]]:
    """Return header and events of a database of torch_npu."""
    start_ns = device = 0
    if "SESSION_TIME_INFO" in database.tables:
        start_ns = database.first("SELECT startTimeNs FROM SESSION_TIME_INFO")
    if "TASK" in database.tables:
        device = database.first("SELECT deviceId FROM TASK")
    header: _Json = {"verl_profiling": {}, "baseTimeNanoseconds": start_ns}
    if "RANK_DEVICE_MAP" in database.tables:
        header["distributedInfo"] = {"rank": database.first("SELECT rankId FROM RANK_DEVICE_MAP")}
    return header, _all_npu_events(database, device, start_ns)


def _all_npu_events(database: _Database, device: int, start_ns: int) -> Iterator[_Json]:
    labels = {_HARDWARE: f"NPU {device}", _COLLECTIVES: f"NPU {device}", _CANN: "CPU"}
    for process, label in labels.items():
        yield from _named(process, process, label)
    for query in _NPU_TABLES:
        if database.tables.keys() >= set(query.tables):
            yield from _npu_events(database, query, start_ns)


def _npu_events(database: _Database, query: _NpuTable, start_ns: int) -> Iterator[_Json]:
    """Yield an event for each row of a query."""
    times = "CAST(startNs AS INTEGER), CAST(endNs AS INTEGER)"  # PYTORCH_API has them as text
    columns = f"{_TEXT.format(query.name)}, {query.kind}, {query.thread}, {times}"
    for title, kind, thread, begin, end in database.select(f"SELECT {columns} {query.rest}"):
        event: _Json = {"ph": "X", "name": str(title)}
        event |= {"ts": (begin - start_ns) / 1000, "dur": (end - begin) / 1000}
        if query.process:
            event |= {"pid": query.process, "tid": thread, "args": {"Task Type": kind}}
        else:
            event |= {"cat": kind, "pid": thread >> 32, "tid": thread & 0xFFFFFFFF}
        yield event
