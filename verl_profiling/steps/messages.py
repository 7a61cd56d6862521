"""The bytes of collectives that no event has: gloo's, and those between NPUs.

torch's profiler records bytes and process group of NCCL's kernels, but not of gloo's events. So the
tool ``torch`` writes the records of the flight recorder into the header of a trace.

Between NPUs, torch_npu's analysis writes bytes and bandwidth: into ``communication_matrix.json``,
else into the table ``CommAnalyzerMatrix`` of ``analysis.db``, beside the trace or the database of
the events. Both have MB, ms and GB/s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from verl_profiling.files.opener import read_small
from verl_profiling.manifest import Ns
from verl_profiling.slices.intervals import Ints, grouped
from verl_profiling.steps.databases import open_database
from verl_profiling.steps.kinds import Group, counted, group_of, item_bytes

_ROUNDING_NS = 1_000  # of the times in traces; an event begins some 10 us after it is recorded
_ALL_CALLS = "-total"  # end of the name of the sums over all calls of a collective
_LOCAL, _REMOTE = "LOCAL", "RDMA"  # inside of an NPU, and between nodes; others are in a node
_TABLE = (
    "SELECT hccl_op_name, src_rank || '-' || dst_rank, transport_type, transit_size, "
    "transit_time, bandwidth FROM CommAnalyzerMatrix"
)
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = 'CommAnalyzerMatrix'"
_FIELDS = ("Transport Type", "Transit Size(MB)", "Transit Time(ms)", "Bandwidth(GB/s)")


class _Record(msgspec.Struct):
    """A record of torch: when a process entered a collective (unix ns), the name of its event, name
    and description of the group, and the shapes and types of the tensors.
    """

    time_created_ns: Ns
    profiling_name: str
    process_group: tuple[str, str]
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    input_dtypes: list[str]


class Entered(NamedTuple):
    """A collective that a process entered.

    Attributes:
        time_ns: When the process entered it, before its event begins.
        name: Name of its event.
        group: Its process group; groups of the same ranks are one.
        bytes: Bytes that went into or came out of this rank, whichever are more; 0 if unknown.
    """

    time_ns: int
    name: str
    group: Group
    bytes: int


def entered_in(header: Mapping[str, Any], offset_ns: int) -> list[Entered]:
    """Return the collectives in the header of a trace.

    Args:
        header: The header.
        offset_ns: Clock offset: time in the file minus time on the controller's clock.
    """
    try:
        info = header["distributedInfo"]
        world = int(info["world_size"])
        groups = {row["pg_name"]: group_of(list(row["ranks"]), world) for row in info["pg_config"]}
        records = msgspec.convert(header["collectives"]["entries"], list[_Record])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return []
    entered = []
    for record in records:
        group = groups.get(record.process_group[0], Group())
        elements = max(sum(map(prod, record.input_sizes)), sum(map(prod, record.output_sizes)))
        size = counted(elements) * min(map(item_bytes, record.input_dtypes), default=0)
        time_ns = record.time_created_ns - offset_ns
        entered.append(Entered(time_ns, record.profiling_name, group, size))
    return entered


def with_entered(
    collectives: Mapping[tuple[str, Group], Ints], entered: Iterable[Entered]
) -> dict[tuple[str, Group], Ints]:
    """Return the runs of collectives with the bytes, and the unknown groups, of the entered
    collectives.

    Collectives of one name run in the order in which the process enters them. torch also has
    records of times without a recording. So the last run is the latest collective that was entered
    before it begins, and each run before is the latest one before that.
    """
    by_name = grouped(sorted(set(entered)), attrgetter("name"))
    parts: defaultdict[tuple[str, Group], list[Ints]] = defaultdict(list)
    for (name, group), runs in collectives.items():
        of_name = by_name.get(name)
        if of_name is None:
            parts[name, group].append(runs)
            continue
        times = np.array([call.time_ns for call in of_name], np.int64)
        order = np.arange(len(runs))
        latest = np.searchsorted(times, runs[:, 0] + _ROUNDING_NS, side="right") - 1
        places = order + np.minimum.accumulate((latest - order)[::-1])[::-1]
        for run, place in zip(runs, places.tolist(), strict=True):
            call = Entered(0, name, group, 0)
            if place >= 0:
                call = of_name[place]
            of_group = call.group if group == Group() else group
            parts[name, of_group].append(np.array([[*run[:2], call.bytes]]))
    return {call: np.concatenate(runs) for call, runs in parts.items()}


class Link(NamedTuple):
    """Data that one NPU sent to another, in one collective.

    Attributes:
        collective: Name of the collective, e.g. ``allreduce``.
        ranks: The two ranks, e.g. ``0-1``.
        transport: ``HCCS``, ``RDMA``, ...
        megabytes: Bytes (MB).
        milliseconds: Time of the transport (ms).
        gb_per_s: Bandwidth (GB/s).
    """

    collective: str
    ranks: str
    transport: str
    megabytes: float
    milliseconds: float
    gb_per_s: float

    @property
    def is_remote(self) -> bool:
        """Whether the link leaves the node."""
        return self.transport == _REMOTE


def npu_links(trace: Path) -> list[Link]:
    """Return the links in the files beside a trace; none without the files.

    Raises:
        Exception: A file cannot be read, or has other content.
    """
    matrix, database = trace.with_name("communication_matrix.json"), trace.with_name("analysis.db")
    rows: Any = []
    if matrix.exists():
        rows = list(_of_matrix(msgspec.json.decode(read_small(matrix))))
    elif database.exists():
        rows = _of_database(database)
    links = []
    for link in msgspec.convert(rows, list[Link]):
        name, _, _ = link.collective.partition("@")
        if name.endswith(_ALL_CALLS) and link.transport != _LOCAL:
            links.append(link._replace(collective=name.removesuffix(_ALL_CALLS)))
    return links


def _of_matrix(steps: Any) -> Iterator[tuple[Any, ...]]:
    for kinds in steps.values():
        for collectives in kinds.values():
            for name, pairs in collectives.items():
                for ranks, pair in pairs.items():
                    yield name, ranks, *(pair[field] for field in _FIELDS)


def _of_database(path: Path) -> list[Any]:
    with closing(open_database(path)) as database:
        if database.execute(_HAS_TABLE).fetchone():  # torch_npu omits empty ones
            return database.execute(_TABLE).fetchall()
    return []
