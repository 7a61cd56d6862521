"""Bytes and bandwidth of collectives and links: by process group, hosts and size.

A call's bandwidth is its bytes over the duration of its last rank, which waits for nobody. The bus
bandwidth is what the slowest link carries, whatever the collective and the number of ranks:

    bus bandwidth = bytes / duration * factor

Factors are those of nccl-tests (``doc/PERFORMANCE.md`` in NVIDIA/nccl-tests), of n ranks: 2(n-1)/n
for all_reduce, and (n-1)/n for all_gather, reduce_scatter and all_to_all. Other collectives have no
bandwidth here: their ranks do not leave together, and a late rank may find its data there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from verl_profiling.manifest import BUCKET, StageSpan
from verl_profiling.numbers.report_columns import LinkRow
from verl_profiling.slices.intervals import Ints, grouped
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.kinds import LAUNCHES, Group
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.messages import Link

_FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_MOST_HOSTS = 8  # whose link may be slow: a list of more says nothing
_REACH = {False: "in-node", True: "over nodes"}
SIZE_CLASS_BITS = 4
"""Messages of one row differ in size by less than a factor of 2 to the power of this number."""


def link_rows(step: Step, calls: Iterable[Calls]) -> list[LinkRow]:
    """Return a row per collective, process group and size, and per pair of ranks that a vendor's
    tool recorded; rows with most bytes first.
    """
    rows: list[LinkRow] = []
    engines = grouped(calls, lambda call: (call.name, call.group))
    runs: defaultdict[tuple[Any, ...], list[Ints]] = defaultdict(list)
    matched: dict[tuple[Any, ...], Calls] = {}
    for lane in step.lanes:
        rows += map(_of_npus, lane.links)
        for (name, group), of_lane in lane.collectives.items():
            if not name.startswith(LAUNCHES):
                number, engine = _engine_of(lane, engines.get((name, group), []))
                key = (lane.source.role, lane.source.replica, number, name, group)
                runs[key].append(of_lane)
                if engine is not None:
                    matched[key] = engine
    for key, of_lanes in runs.items():
        sizes = max(of_lanes, key=len)[:, 2]
        for size_class in np.unique(_classes(sizes)).tolist():
            of_class = sizes[_classes(sizes) == size_class]
            rows.append(_row(key[-2], key[-1], of_class, matched.get(key), step))
    for worker in step.workers:
        buckets = [span for span in worker.stages if span.name == BUCKET and span.bytes]
        if buckets:
            rows.append(_of_buckets(worker.name, buckets))
    return sorted(rows, key=lambda row: -(row.bytes or 0))


def _engine_of(lane: Lane, engines: Iterable[Calls]) -> tuple[int | None, Calls | None]:
    """Return the calls of a lane's whole group, with their number: engines name groups alike."""
    for number, calls in enumerate(engines):
        if calls.is_whole and any(lane is other for other in calls.lanes):
            return number, calls
    return None, None


def _of_buckets(worker: str, buckets: Sequence[StageSpan]) -> LinkRow:
    """Return the row of the buckets of weights that a worker sent to its engine."""
    sizes = np.array([span.bytes for span in buckets])
    took_ns = np.array([span.end_ns - span.begin_ns for span in buckets])
    usual, best = np.percentile(sizes / took_ns.clip(min=1), (50, 90)) * 1e9
    return LinkRow(
        name=f"weight {BUCKET}",
        group=worker,
        pair="",
        reach="",
        hosts=1,
        ranks=1,
        calls=len(buckets),
        bytes=float(sizes.sum()),
        duration_us=float(took_ns.sum()) / 1000,
        algorithm_bytes_per_s=float(usual),
        best_bytes_per_s=float(best),
    )


def _of_npus(link: Link) -> LinkRow:
    return LinkRow(
        name=f"{link.collective} {link.transport}",
        group=link.ranks,
        pair=link.ranks,
        reach=_REACH[link.is_remote],
        bytes=1e6 * link.megabytes,
        duration_us=1e3 * link.milliseconds,
        bus_bytes_per_s=1e9 * link.gb_per_s,
        best_bytes_per_s=1e9 * link.gb_per_s,
    )


def _row(name: str, group: Group, sizes: Ints, calls: Calls | None, step: Step) -> LinkRow:
    """Return the row of a collective with messages of similar size.

    Args:
        name: Name of its events.
        group: The process group.
        sizes: Bytes of the calls of one rank.
        calls: The calls of all sizes, if all ranks were captured.
        step: The step.
    """
    plain = (group.collective or name).lower().replace("_", "")
    kind = next((kind for kind in _FACTORS if kind.replace("_", "") in plain), "")
    hosts = _hosts(calls, step) if calls else []
    row = LinkRow(
        name=kind or group.collective or name,
        group=group.ranks,
        pair="-".join(hosts) if 1 < len(hosts) <= _MOST_HOSTS else "",
        hosts=len(hosts),
        reach=_REACH[len(hosts) > 1] if hosts else "",
        ranks=group.size,
        calls=len(sizes),
        bytes=float(sizes.sum()) or None,
    )
    if not row.bytes:
        return replace(row, missing="elements or type")
    if not kind:
        return replace(row, missing="a collective that all ranks leave together")
    if calls is None:
        return replace(row, missing="calls of all ranks")
    carried = calls.runs[:, :, 2]
    of_class = (carried == carried[0]).all(axis=0) & (_classes(carried[0]) == _classes(sizes)[0])
    if not of_class.any():
        return replace(row, missing="equal bytes of all ranks")
    of_class &= calls.cost > 0
    took_ns = calls.cost[of_class]
    if not len(took_ns):
        return replace(row, missing="durations")
    usual, best = np.percentile(carried[0, of_class] / took_ns, (50, 90)) * 1e9
    factor = _FACTORS[kind] * (group.size - 1) / group.size
    return replace(
        row,
        duration_us=float(took_ns.sum()) / 1000,
        algorithm_bytes_per_s=float(usual),
        bus_bytes_per_s=float(usual * factor),
        best_bytes_per_s=float(best * factor),
    )


def _classes(sizes: Ints) -> Ints:
    """Return the class of each size, from 1 on; 0 for an unknown size."""
    bits = np.log2(sizes.clip(min=1)).astype(np.int64)
    return np.where(sizes > 0, 1 + bits // SIZE_CLASS_BITS, 0)


def _hosts(calls: Calls, step: Step) -> list[str]:
    """Return the hosts of a group; empty if one is unknown."""
    workers = [step.worker_of(lane.source) for lane in calls.lanes]
    hosts = {worker.identity.host if worker else "" for worker in workers}
    return sorted(hosts) if all(hosts) else []
