"""What is noted of each request, held against the statistics that a real SGLang engine keeps."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import noting, reporter_of, seconds
from tests.engines.server import SGLANG_ON_CPU
from verl_profiling.engines.sglang_requests import watch_manager
from verl_profiling.manifest import Request

pytest.importorskip(
    "sglang", reason="SGLang is not installed; make test-sglang builds its environment"
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

SHARED = list(range(10, 42))
TOKENS = 80
# SGLang 0.5.23 retracts no request with `ignore_eos`; the end of this model is token 2.
NEVER_ENDS = {"2": -1000.0}
CROWDED = {
    "disable_radix_cache": False,
    "max_total_tokens": 320,
    "max_running_requests": 4,
    "schedule_conservativeness": 0.01,
}


async def serve(engine: Any, requests: int) -> list[dict[str, Any]]:
    """Send requests, more than run at a time, every other one a stream;
    return what is told of each.
    """

    async def one(name: str, streams: bool, tokens: int = TOKENS) -> dict[str, Any]:
        response = await engine.async_generate(
            input_ids=[*SHARED, len(name), tokens],
            sampling_params={"max_new_tokens": tokens, "logit_bias": NEVER_ENDS},
            stream=streams,
            rid=name,
        )
        if streams:
            async for last in response:
                response = last
        told: dict[str, Any] = response["meta_info"]
        return told

    first = await one("first", streams=False, tokens=1)
    return [
        first,
        *await asyncio.gather(*(one(f"r{number}", number % 2 == 0) for number in range(requests))),
    ]


def told_by_prometheus(folder: Path) -> dict[str, float]:
    """Return the sums and counts of the engine's histograms; that of the stages by stage."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return {
        f"{sample.name}/{sample.labels['stage']}"
        if "stage" in sample.labels
        else sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith(("_sum", "_count", "_total"))
    }


@pytest.mark.parametrize("metrics", [True, False])
async def test_the_division_is_that_of_the_engines_own_statistics(
    tiny_model: Path, tmp_path: Path, metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued and prefill agree with its histograms; without `enable_metrics` both are unknown.

    While nothing is noted, each token is progress for the watch.
    """
    from sglang.srt.entrypoints.engine import Engine

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    before = set(multiprocessing.active_children())
    engine = Engine(
        model_path=str(tiny_model),
        skip_tokenizer_init=True,
        enable_metrics=metrics,
        **{**SGLANG_ON_CPU, **CROWDED},
    )
    try:
        log = noting(2)
        reporter = reporter_of(log)
        watch_manager(engine.tokenizer_manager, log)
        told = {meta["id"]: meta for meta in await serve(engine, 8)}
        noted = {request.id: request for request in log.end()}
        histograms = told_by_prometheus(tmp_path) if metrics else {}
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
        stream = await engine.async_generate(
            input_ids=SHARED, sampling_params=sampling, stream=True
        )
        seen = [reporter.last_ns() async for _ in stream]
    finally:
        engine.shutdown()
        for process in set(multiprocessing.active_children()) - before:
            process.join(30)
    assert len(set(seen)) == len(seen) > TOKENS / 8
    assert set(noted) == set(told) == {"first", *(f"r{number}" for number in range(8))}
    for name, request in noted.items():
        is_as_told(request, told[name])
    assert noted["first"].cached_tokens == 0
    assert noted["r0"].cached_tokens == len(SHARED)
    assert sum(request.preemptions or 0 for request in noted.values()) > 0
    if metrics:
        divides_as_histograms(noted.values(), histograms)
        return
    for name, request in noted.items():
        streams = name in ("r0", "r2", "r4", "r6")
        assert list(seconds(request)) == (["first token", "decode"] if streams else ["generate"])


def is_as_told(request: Request, told: dict[str, Any]) -> None:
    """Check a request against what the engine says of it in its answer."""
    lengths = (request.prompt_tokens, request.response_tokens)
    assert lengths == (told["prompt_tokens"], told["completion_tokens"])
    again = (request.cached_tokens, request.preemptions)
    assert again == (told["cached_tokens"], told["num_retractions"])
    # Whoever takes the last token may be late where the machine is busy.
    assert told["e2e_latency"] - 0.05 < sum(seconds(request).values()) < told["e2e_latency"] + 5


def divides_as_histograms(noted: Collection[Request], histograms: dict[str, float]) -> None:
    """Check the division of all requests against the engine's histograms."""
    once = [request for request in noted if not request.preemptions]
    again = [request for request in noted if request.preemptions]
    assert {request.arrival_ns for request in again} == {0}, (
        "the engine tells when it was last queued"
    )
    assert all(
        list(seconds(request)) == ["to the engine", "queued", "prefill", "decode"]
        for request in once
    )
    queued, with_sending = (
        sum(seconds(request)["queued"] for request in requests) for requests in (once, noted)
    )
    assert 0.1 < queued < histograms["sglang:queue_time_seconds_sum"] < with_sending < queued * 1.1
    prefill = sum(seconds(request)["prefill"] for request in noted)
    by_engine = histograms["sglang:per_stage_req_latency_seconds_sum/prefill_forward"]
    assert prefill == pytest.approx(by_engine, rel=0.01)
    whole = sum(request.end_ns - request.begin_ns for request in noted) / 1e9
    assert whole == pytest.approx(histograms["sglang:e2e_request_latency_seconds_sum"], rel=0.02)
    assert histograms["sglang:e2e_request_latency_seconds_count"] == len(noted)
    assert (
        sum(request.cached_tokens or 0 for request in noted)
        == (histograms["sglang:cached_tokens_total"])
    )
