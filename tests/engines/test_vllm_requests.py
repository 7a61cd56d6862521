"""What is noted of each request, held against the statistics
that a real vLLM engine keeps of it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import noting, reporter_of, seconds
from verl_profiling.engines.vllm_requests import watch_vllm

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SHARED = list(range(10, 42))
"""The first block of every prompt."""
TOKENS = 80
TINY: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
    "enable_prefix_caching": True,
}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """What the engine of a test started has ended after it."""
    before = set(multiprocessing.active_children())
    yield
    for process in set(multiprocessing.active_children()) - before:
        process.join(30)


async def serve(engine: Any, requests: int) -> None:
    """Send requests at once, twice as many as run at a time; give up a last one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(
        name: str, kind: RequestOutputKind, tokens: int = TOKENS, give_up: bool = False
    ) -> None:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind
        )
        stream = engine.generate(
            {"prompt_token_ids": [*SHARED, len(name)]}, sampling, request_id=name
        )
        async for _ in stream:
            if give_up:
                await stream.aclose()
                return

    await one("first", RequestOutputKind.CUMULATIVE, tokens=1)
    kinds = list(RequestOutputKind)
    await asyncio.gather(*(one(f"r{number}", kinds[number % 3]) for number in range(requests)))
    await one("given up", RequestOutputKind.CUMULATIVE, give_up=True)


async def test_the_division_is_that_of_the_engines_own_statistics(tiny_model: Path) -> None:
    """Queued, prefill and decode to the microsecond; tokens, cached tokens and preemptions exactly.

    While nothing is noted, each token is progress for the watch.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    finished: dict[str, Any] = {}
    preempted = 0

    class Statistics(StatLoggerBase):
        def __init__(self, *_: Any) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            nonlocal preempted
            if iteration_stats is not None:
                preempted += iteration_stats.num_preempted_reqs
                finished.update(
                    (stats.request_id, stats) for stats in iteration_stats.finished_requests
                )

        def log_engine_initialized(self) -> None: ...

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(tiny_model), dtype="float32", **TINY), stat_loggers=[Statistics]
    )
    try:
        log = noting(2)
        reporter = reporter_of(log)
        watch_vllm(engine, log)
        await serve(engine, 8)
        noted = {request.id: request for request in log.end()}
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        stream = engine.generate({"prompt_token_ids": SHARED}, sampling, request_id="long")
        seen = [reporter.last_ns() async for _ in stream]
    finally:
        engine.shutdown()
    assert len(set(seen)) == len(seen) > TOKENS / 8
    given_up = noted.pop("given up")
    assert given_up.failed
    assert set(noted) == {"first", *(f"r{number}" for number in range(8))}
    assert {request.replica for request in noted.values()} == {2}
    for name, request in noted.items():
        [own] = [stats for id, stats in finished.items() if id == name or id.startswith(f"{name}-")]
        parts = seconds(request)
        assert not request.failed
        assert parts["queued"] == pytest.approx(own.queued_time, abs=2e-6)
        assert parts["prefill"] == pytest.approx(own.prefill_time, abs=2e-6)
        assert parts.get("decode", 0.0) == pytest.approx(own.decode_time, abs=2e-6)
        assert parts["to the engine"] > 0 < parts["from the engine"]
        # Whoever takes the last token may be late where the machine is busy.
        assert own.e2e_latency - 0.05 < sum(parts.values()) < own.e2e_latency + 5
        lengths = (request.prompt_tokens, request.response_tokens)
        assert lengths == (own.num_prompt_tokens, own.num_generation_tokens)
        assert request.cached_tokens == own.num_cached_tokens
        assert request.preemptions == getattr(own, "num_preemptions", None), (
            "vLLM counts them from 0.30 on"
        )
    assert noted["first"].cached_tokens == 0
    assert noted["r0"].cached_tokens == len(SHARED)
    assert max(seconds(request)["queued"] for request in noted.values()) > 0.01
    assert preempted > 0
    if noted["first"].preemptions is not None:
        assert sum(request.preemptions or 0 for request in noted.values()) == preempted


@pytest.mark.parametrize("statistics", [False, True])
def test_a_batch_is_told_apart(
    tiny_model: Path, statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end together; what the engine knows of each is its own,
    or unknown without statistics.
    """
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = LLM(model=str(tiny_model), dtype="float32", disable_log_stats=not statistics, **TINY)
    log = noting(2)
    watch_vllm(engine, log)
    prompts = [{"prompt_token_ids": [*SHARED, place]} for place in range(4)]
    sampling = [
        SamplingParams(max_tokens=4 * (place + 1), ignore_eos=True, n=2 if place == 2 else 1)
        for place in range(4)
    ]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    noted = log.end()
    assert [request.id for request in noted] == [
        one.request_id for one in outputs for _ in one.outputs
    ]
    assert [request.response_tokens for request in noted] == [4, 8, 12, 12, 16]
    for sample in (noted.pop(2), noted.pop(2)):
        assert (list(seconds(sample)), sample.cached_tokens) == (["generate"], None)
    assert all(isinstance(request.cached_tokens, int) for request in noted)
    known = ["to the engine", "queued", "prefill", "decode"]  # the last may be a sample of two
    expected = known if statistics else ["generate"]
    assert [list(seconds(request)) for request in noted] == [expected] * 3
    assert {request.preemptions for request in noted} <= ({0, None} if statistics else {None})
    ends = [request.last_token_ns for request in noted]
    assert ends == (sorted(set(ends)) if statistics else [0] * 3)
    assert [request.ends_with_batch for request in noted] == [not statistics] * 3
    if statistics:
        assert [request.end_ns for request in noted] == ends
