"""What the requests of each replica waited for: the table of the report, from the rows of requests."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import numpy as np

from verl_profiling.report.rows import ReplicaRow, RequestRow
from verl_profiling.report.thresholds import Outlier
from verl_profiling.units import duration

__all__ = ["replica_rows", "slow_replica"]


def replica_rows(requests: Iterable[RequestRow]) -> list[ReplicaRow]:
    """Return one row for each replica that noted requests, in their order."""
    by_replica: dict[tuple[int, str], list[RequestRow]] = {}
    for request in requests:
        by_replica.setdefault((request.replica, request.worker), []).append(request)
    return [_row(by_replica[key]) for key in sorted(by_replica)]


def slow_replica(rows: Iterable[ReplicaRow]) -> str:
    """Return advice on the replica that takes longest for a token, if it stands out; else nothing."""
    known = sorted((row.per_token_p50_us, row.worker) for row in rows if row.per_token_p50_us)
    if len(known) < 2:
        return ""
    *others, (slowest_us, worker) = known
    usual_us = median(us for us, _ in others)
    if slowest_us <= Outlier.SLOWER * usual_us:
        return ""
    return (
        f"compare the host and the device of {worker} with those of the others: it takes "
        f"{duration(slowest_us / 1e6)} a token, the others {duration(usual_us / 1e6)}"
    )


def _row(requests: list[RequestRow]) -> ReplicaRow:
    first, every = requests[0], len(requests)
    requests = [request for request in requests if not request.validate]
    whole = [request for request in requests if not request.failed]
    queued = [
        request.scheduled_us - request.arrival_us
        for request in whole
        if request.scheduled_us is not None and request.arrival_us is not None
    ]
    queued_p50, queued_p90, queued_p99 = _percentiles(queued)
    first_p50, first_p90, first_p99 = _percentiles(request.to_first_token_us for request in whole)
    token_p50, token_p90, token_p99 = _percentiles(request.per_token_us for request in whole)
    preemptions = [request.preemptions for request in requests if request.preemptions is not None]
    return ReplicaRow(
        worker=first.worker,
        replica=first.replica,
        requests=len(requests),
        failed=len(requests) - len(whole),
        queued_p50_us=queued_p50,
        queued_p90_us=queued_p90,
        queued_p99_us=queued_p99,
        to_first_token_p50_us=first_p50,
        to_first_token_p90_us=first_p90,
        to_first_token_p99_us=first_p99,
        per_token_p50_us=token_p50,
        per_token_p90_us=token_p90,
        per_token_p99_us=token_p99,
        cache_hit_share=_cache_hit_share(requests),
        preemptions=sum(preemptions) if preemptions else None,
        validation=every - len(requests),
    )


def _percentiles(values: Iterable[float | None]) -> list[float] | list[None]:
    known = [max(value, 0.0) for value in values if value is not None]
    return [float(value) for value in np.percentile(known, (50, 90, 99))] if known else [None] * 3


def _cache_hit_share(requests: list[RequestRow]) -> float | None:
    """Return the share of prompt tokens that were cached, of the requests that tell; at most all of them."""
    told = [
        (min(request.cached_tokens, request.prompt_tokens), request.prompt_tokens)
        for request in requests
        if request.cached_tokens is not None
    ]
    prompts = sum(length for _, length in told)
    return sum(cached for cached, _ in told) / prompts if prompts else None
