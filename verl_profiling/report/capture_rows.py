"""Rows on the capture itself: numbers that workers recorded, its cost, clocks that were set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import Artifact, CaptureResult, Manifest, Request
from verl_profiling.report.intervals import holding, spans_of
from verl_profiling.report.lanes import VALIDATE
from verl_profiling.report.rows import AnchorRow, CostRow, MeasureRow, RequestRow
from verl_profiling.timeline.inputs import resolve_artifact
from verl_profiling.units import duration

__all__ = ["anchors", "clock_notes", "core_notes", "costs", "measures", "requests"]

_STAGE_PREFIX = "stage/"
_SET_CLOCK_NS = 1_000_000
_SET_CLOCK_SHARE = 0.001  # NTP slews a clock by at most half of this


def measures(manifest: Manifest) -> list[MeasureRow]:
    """Return the numbers of every worker, in the order of workers and stages."""
    rows = []
    for worker in manifest.workers:
        for key, value in worker.metrics.items():
            stage, name = "", key
            if key.startswith(_STAGE_PREFIX):
                stage, _, name = key.removeprefix(_STAGE_PREFIX).rpartition("/")
            rows.append(MeasureRow(worker=worker.name, stage=stage, name=name, value=value))
    return rows


def costs(manifest: Manifest, directory: Path) -> list[CostRow]:
    """Return what the capture cost each worker that took part."""
    return [
        CostRow(
            worker=worker.name,
            start_s=worker.cost.start_s,
            stop_s=worker.cost.stop_s,
            export_s=worker.cost.export_s,
            bytes=sum(_size(directory, artifact) for artifact in worker.artifacts),
        )
        for worker in manifest.workers
        if worker.status != "skipped"
    ]


def _size(directory: Path, artifact: Artifact) -> int:
    """Return an artifact's size, from the disk if it was still being compressed."""
    path = None
    with suppress(TraceFormatError):  # it leads out of the folder: the report's coverage says so
        path = resolve_artifact(directory, artifact) if artifact.bytes is None else None
    return artifact.bytes or (path.stat().st_size if path and path.is_file() else 0)


def requests(manifest: Manifest) -> list[RequestRow]:
    """Return the requests of every replica, on the controller's clock."""
    validating = spans_of((s.begin_ns, s.end_ns) for s in manifest.stages if s.name == VALIDATE)
    rows = []
    for worker in manifest.workers:
        zero_ns = manifest.begin_ns
        validates = holding(validating, [request.begin_ns for request in worker.requests])
        for request, is_validation in zip(worker.requests, validates, strict=True):
            rows.append(
                RequestRow(
                    worker=worker.name,
                    replica=request.replica,
                    begin_us=(request.begin_ns - zero_ns) / 1000,
                    first_token_us=_since(zero_ns, request.first_token_ns),
                    end_us=(request.end_ns - zero_ns) / 1000,
                    latency_us=(request.end_ns - request.begin_ns) / 1000,
                    prompt_tokens=request.prompt_tokens,
                    response_tokens=request.response_tokens,
                    id=request.id,
                    arrival_us=_since(zero_ns, request.arrival_ns),
                    scheduled_us=_since(zero_ns, request.scheduled_ns),
                    last_token_us=_since(zero_ns, request.last_token_ns),
                    to_first_token_us=_since(request.begin_ns, request.first_token_ns),
                    per_token_us=_per_token_us(request),
                    cached_tokens=request.cached_tokens,
                    preemptions=request.preemptions,
                    policy_version=request.policy_version,
                    failed=request.failed,
                    validate=is_validation,
                )
            )
    return rows


def _since(begin_ns: int, time_ns: int) -> float | None:
    return (time_ns - begin_ns) / 1000 if time_ns else None


def _per_token_us(request: Request) -> float | None:
    """Return the mean time from token to token; the first is the prefill's."""
    if not request.first_token_ns or request.response_tokens < 2:
        return None
    decode_ns = (request.last_token_ns or request.end_ns) - request.first_token_ns
    return decode_ns / 1000 / (request.response_tokens - 1)


def clock_notes(manifest: Manifest) -> Iterator[str]:
    """Yield a note for each worker whose host's clock was set while it was captured."""
    for worker in manifest.workers:
        set_ns = _clock_set_ns(worker)
        if set_ns:
            yield (
                f"{worker.name}: the clock of {worker.identity.host} was set by "
                f"{duration(set_ns / 1e9, signed=True)} during the capture; its lane may be off by as much"
            )


def anchors(manifest: Manifest) -> list[AnchorRow]:
    """Return what the clock of each worker did between its first reading and its last."""
    rows = []
    for worker in manifest.workers:
        if len(worker.anchors) < 2:
            continue
        first, last = worker.anchors[0], worker.anchors[-1]
        zero_ns = manifest.begin_ns
        rows.append(
            AnchorRow(
                worker=worker.name,
                host=worker.identity.host,
                begin_us=(first.unix_ns - zero_ns) / 1000,
                end_us=(last.unix_ns - zero_ns) / 1000,
                set_us=(last.unix_ns - first.unix_ns - last.monotonic_ns + first.monotonic_ns) / 1000,
            )
        )
    return rows


def core_notes(manifest: Manifest, on_cpus: Iterable[str]) -> Iterator[str]:
    """Yield a note for each host that has more lanes than cores.

    Args:
        manifest: The capture.
        on_cpus: The worker of each lane that computes on CPUs.
    """
    workers = {worker.name: worker for worker in manifest.workers}
    hosts = Counter(workers[name].identity.host for name in on_cpus if name in workers)
    for host, lanes in hosts.items():
        cores = max(worker.cores for worker in manifest.workers if worker.identity.host == host)
        if 0 < cores < lanes:
            yield (
                f"{lanes} lanes share the {cores} cores of {host or 'the host'}: when all have something to "
                "do, each looks slower or idle while it waits for a core"
            )


def _clock_set_ns(worker: CaptureResult) -> int:
    """Return how far unix time moved against monotonic time between a worker's first and last anchor."""
    if len(worker.anchors) < 2:
        return 0
    first, last = worker.anchors[0], worker.anchors[-1]
    elapsed_ns = last.monotonic_ns - first.monotonic_ns
    ahead_ns = last.unix_ns - first.unix_ns - elapsed_ns
    return ahead_ns if abs(ahead_ns) > max(_SET_CLOCK_NS, _SET_CLOCK_SHARE * elapsed_ns) else 0
