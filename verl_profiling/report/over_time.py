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
    """Return how many requests of each replica are on their way in each part of the step, on average.

    And how many of them are queued: from the engine getting a request (or, where it does not tell, from
    its begin) to scheduling it for the first time.
    """
    by_replica: dict[tuple[str, int], list[tuple[float, float]]] = {}
    queued: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for request in requests:
        key = (request.worker, request.replica)
        by_replica.setdefault(key, []).append((request.begin_us, request.end_us))
        if request.scheduled_us is not None:
            since_us = request.begin_us if request.arrival_us is None else request.arrival_us
            queued.setdefault(key, []).append((since_us, max(since_us, request.scheduled_us)))
    return [
        RunningRow(
            worker=key[0],
            replica=key[1],
            requests=_means(spans, span_us),
            queued=_means(queued[key], span_us) if key in queued else [],
        )
        for key, spans in sorted(by_replica.items(), key=lambda item: item[0][1])
    ]


def _means(spans_us: list[tuple[float, float]], whole_us: float) -> list[float]:
    spans = np.rint(np.array(spans_us) * 1000).astype(np.int64)
    return [round(float(mean), 2) for mean in _running(spans, 0, round(whole_us * 1000))]


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
