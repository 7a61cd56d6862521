"""Reads the bytes and the bandwidth between NPUs, as torch_npu's analysis wrote them.

They are in ``communication_matrix.json``, else in the table ``CommAnalyzerMatrix`` of
``analysis.db``, beside the trace or the database of the events. Both have MB, ms and GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verl_profiling.files.opener import read_small
from verl_profiling.steps.databases import open_database

_ALL_CALLS = "-total"  # end of the name of the sums over all calls of a collective
_LOCAL, _REMOTE = "LOCAL", "RDMA"  # inside of an NPU, and between nodes; others are in a node
_TABLE = (
    "SELECT hccl_op_name, src_rank || '-' || dst_rank, transport_type, transit_size, "
    "transit_time, bandwidth FROM CommAnalyzerMatrix"
)
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = 'CommAnalyzerMatrix'"
_FIELDS = ("Transport Type", "Transit Size(MB)", "Transit Time(ms)", "Bandwidth(GB/s)")


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
