"""What is taken over of a request from engines that cannot run here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.contract import noting, seconds
from verl_profiling.engines.sglang_requests import watch_manager
from verl_profiling.engines.vllm_requests import watch_vllm
from verl_profiling.manifest import Request

PARTS = ["to the engine", "queued", "prefill", "decode", "from the engine"]


class VLLM:
    """Answers with one output, a while after it was asked."""

    def __init__(
        self, ahead_s: float = 0.0, told: dict[str, Any] | None = None, **parallel: Any
    ) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
        self._ahead_s = ahead_s
        self._told = told

    async def generate(
        self, prompt: list[int], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        """Yield the whole response; its times are of a clock that is ahead of this host's."""
        marks = []
        for _ in range(4):
            marks.append(time.monotonic() + self._ahead_s)
            time.sleep(0.0005)
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        statistics = (
            None if self._told is None else SimpleNamespace(**dict(zip(names, marks, strict=True)))
        )
        if statistics is not None:
            vars(statistics).update(self._told or {})
        completions = [
            SimpleNamespace(index=index, token_ids=[1, 2, 3]) for index in range(sampling_params.n)
        ]
        yield SimpleNamespace(
            request_id=request_id,
            finished=True,
            prompt_token_ids=prompt,
            outputs=completions,
            num_cached_tokens=2,
            metrics=statistics,
        )


async def noted_by_vllm(engine: VLLM, *, by_name: bool = True, n: int = 1) -> Request:
    log = noting()
    watch_vllm(engine, log)
    sampling = SimpleNamespace(n=n)
    stream = (
        engine.generate([5, 6], sampling_params=sampling, request_id="turn-1")
        if by_name
        else engine.generate([5, 6], sampling, "turn-1")
    )
    async for _ in stream:
        pass
    noted = log.end()
    assert len(noted) == n
    return noted[0]


@pytest.mark.parametrize(
    ("engine", "known", "preemptions"),
    [
        (VLLM(told={"num_preemptions": 3}), PARTS, 3),
        (
            VLLM(
                told={}, data_parallel_size=4, data_parallel_size_local=1, local_engines_only=True
            ),
            PARTS,
            None,
        ),
        (VLLM(), ["generate"], None),
        (
            VLLM(told={"num_preemptions": 3}, data_parallel_size=4, data_parallel_size_local=2),
            ["generate"],
            3,
        ),
        (VLLM(told={}, ahead_s=3600.0), ["generate"], None),
        (
            VLLM(told={"queued_ts": 0.0, "scheduled_ts": 0.0}),
            ["first token", "decode", "from the engine"],
            None,
        ),
    ],
)
async def test_times_of_vllm_are_taken_over_where_its_clock_is_ours(
    engine: VLLM, known: list[str], preemptions: int | None
) -> None:
    """Not with statistics off, and not from engine cores on other hosts,
    even where nobody says so.
    """
    noted = await noted_by_vllm(engine)
    assert (list(seconds(noted)), noted.preemptions) == (known, preemptions)
    assert (noted.id, noted.prompt_tokens, noted.response_tokens) == ("turn-1", 2, 3)
    assert noted.cached_tokens == 2


async def test_a_request_of_vllm_for_several_samples_keeps_its_id_alone() -> None:
    noted = await noted_by_vllm(VLLM(told={"num_preemptions": 1}), n=2, by_name=False)
    assert (noted.id, list(seconds(noted))) == ("turn-1", ["generate"])
    assert (noted.cached_tokens, noted.preemptions) == (None, None)


class RetryableRequestError(RuntimeError):
    """Has the name of vLLM's, from 0.33 on."""


class PausedVLLM(VLLM):
    """Refuses requests until it resumes, as vLLM 0.33 does during weight updates."""

    paused = True

    async def generate(
        self, prompt: list[int], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        if self.paused:
            raise RetryableRequestError("Generation is paused")
        async for output in super().generate(prompt, sampling_params, request_id):
            yield output


async def test_a_request_that_a_paused_vllm_refuses_is_one_request_with_its_wait() -> None:
    """The client tries again with the same id; what it waits is in no failed request."""
    log, engine = noting(), PausedVLLM()
    watch_vllm(engine, log)
    begin_ns = time.time_ns()
    for _ in range(3):
        with pytest.raises(RetryableRequestError):
            async for _ in engine.generate([5, 6], SimpleNamespace(n=1), request_id="turn-1"):
                pass
        time.sleep(0.01)
    engine.paused = False
    async for _ in engine.generate([5, 6], SimpleNamespace(n=1), request_id="turn-1"):
        pass
    [noted] = log.end()
    assert not noted.failed
    assert begin_ns <= noted.begin_ns < begin_ns + 10_000_000
    assert noted.end_ns - noted.begin_ns >= 30_000_000


class SGLang:
    """A tokenizer manager that answers with what a release tells, a while after it was asked."""

    def __init__(self, told: Any, **arguments: Any) -> None:
        self.server_args = SimpleNamespace(**arguments)
        self._told = told

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        begin = time.time()
        time.sleep(0.005)
        lengths = {"prompt_tokens": 4, "completion_tokens": 6, "cached_tokens": 3}
        told = {"id": obj.rid, "finish_reason": {"type": "length"}, **lengths, **self._told(begin)}
        yield {"meta_info": told}


def since_0_5_12(begin: float) -> dict[str, Any]:
    """Return what 0.5.12 tells, and later ones do."""
    times = {"forward_entry_time": begin + 0.002, "prefill_finished_time": begin + 0.003}
    return {"num_retractions": 0, **times, "queue_time": 0.001}


def before(begin: float) -> dict[str, Any]:
    times = {"decode_finished_ts": begin + 0.004, "inference_time": 0.002}
    return {
        "total_retractions": 2,
        **times,
        "queue_time": -0.5,
        "prefill_finished_ts": begin + 0.0045,
    }


@pytest.mark.parametrize(
    ("manager", "known", "retractions"),
    [
        (SGLang(since_0_5_12), PARTS[:4], 0),
        (SGLang(since_0_5_12, nnodes=2, dp_size=2), ["generate"], 0),
        (SGLang(lambda begin: since_0_5_12(begin + 3600)), ["generate"], 0),
        (SGLang(lambda begin: since_0_5_12(begin) | {"num_retractions": 1}), PARTS[1:4], 1),
        (SGLang(before), ["queued", "generate"], 2),
        (
            SGLang(lambda begin: before(begin) | {"total_retractions": 0, "queue_time": 0.001}),
            [*PARTS[:2], "generate"],
            0,
        ),
        (SGLang(lambda _: {}), ["generate"], None),
    ],
)
async def test_times_of_sglang_are_taken_over_where_they_can_be(
    manager: SGLang, known: list[str], retractions: int | None
) -> None:
    """By the names of either release; a retracted request has lost when it was first queued."""
    log = noting()
    watch_manager(manager, log)
    async for _ in manager.generate_request(SimpleNamespace(rid="turn-1")):
        pass
    [noted] = log.end()
    assert (list(seconds(noted)), noted.preemptions) == (known, retractions)
    assert (noted.id, noted.prompt_tokens, noted.response_tokens) == ("turn-1", 4, 6)
    assert noted.cached_tokens == 3
    if known == PARTS[:4]:
        queued, prefill = ((end - begin) / 1e9 for _, begin, end in noted.parts()[1:3])
        assert (queued, prefill) == pytest.approx((0.001, 0.001), abs=1e-5)


@pytest.mark.parametrize(("rid", "id"), [("turn-1", "turn-1"), (None, ""), (["a", "b"], "a")])
async def test_a_request_that_never_answers_keeps_its_id(rid: Any, id: str) -> None:
    """What raises before the first output has failed under its own name."""

    class Refusing(SGLang):
        async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
            raise ValueError("too long")
            yield

    manager = Refusing(None)
    log = noting()
    watch_manager(manager, log)
    with pytest.raises(ValueError, match="too long"):
        async for _ in manager.generate_request(obj=SimpleNamespace(rid=rid)):
            pass
    [noted] = log.end()
    assert (noted.id, noted.failed, noted.cached_tokens, noted.preemptions) == (
        id,
        True,
        None,
        None,
    )
