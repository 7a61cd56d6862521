"""What ran in each of many equal parts of the step: the curves of the page."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.intervals import Spans
from verl_profiling.report.rows import RequestRow, RunningRow

__all__ = ["PARTS", "percent", "requests_running"]

PARTS = 240


def percent(spans: Spans, begin_ns: int, end_ns: int) -> list[int]:
    """Return how much of each part is covered by disjoint spans, 0 to 100."""
    return [int(share) for share in np.rint(100 * _running(spans, begin_ns, end_ns))]


def requests_running(requests: Iterable[RequestRow], span_us: float) -> list[RunningRow]:
    """Return how many requests of each replica are on their way in each part of the step, on average."""
    by_replica: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for request in requests:
        span_ns = (round(request.begin_us * 1000), round(request.end_us * 1000))
        by_replica.setdefault((request.worker, request.replica), []).append(span_ns)
    end_ns = round(span_us * 1000)
    return [
        RunningRow(
            worker=worker,
            replica=replica,
            requests=[round(float(mean), 2) for mean in _running(np.array(spans), 0, end_ns)],
        )
        for (worker, replica), spans in sorted(by_replica.items(), key=lambda item: item[0][1])
    ]


def _running(spans: Spans, begin_ns: int, end_ns: int) -> NDArray[np.float64]:
    """Return how many spans run in each part on average; they may overlap."""
    whole = max(end_ns - begin_ns, 1)
    edges = np.linspace(0.0, whole, PARTS + 1)
    inside = np.clip(spans - begin_ns, 0, whole).astype(np.float64)
    before = _time_since(inside[:, 0], edges) - _time_since(inside[:, 1], edges)
    return np.clip(np.diff(before) * PARTS / whole, 0.0, None)


def _time_since(instants: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, at each edge, the time since each instant before it, added up."""
    ordered = np.sort(instants)
    count = np.searchsorted(ordered, edges)
    return count * edges - np.concatenate(([0.0], np.cumsum(ordered)))[count]
