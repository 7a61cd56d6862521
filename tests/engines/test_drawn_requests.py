"""A request is one sequence, and counts in the capture where it ends, whatever ends it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.contract import reporter_of
from verl_profiling.engines.sglang_requests import watch_manager
from verl_profiling.engines.vllm_requests import watch_vllm
from verl_profiling.workers import RequestLog


@dataclass
class Call:
    """One call of ``generate``: its tokens, its samples, those in vLLM's first output,
    its end, its phase.
    """

    id: str
    tokens: int
    samples: int
    early: int
    way: str
    phase: int
    streams: bool


class VLLM:
    """Replays outputs as vLLM 0.32 gives them: cumulative, with ``abort`` as a reason."""

    def generate(
        self, prompt: list[int], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        return self.outputs(prompt, sampling_params.call, request_id)

    async def outputs(self, prompt: list[int], call: Call, id: str) -> AsyncIterator[Any]:
        for made in range(1, call.tokens + 1):
            last = made == call.tokens
            if last and call.way == "raise":
                raise RuntimeError("the engine is dead")
            reason = {"abort": "abort", "end": "length"}.get(call.way) if last else None
            samples = [
                SimpleNamespace(index=index, token_ids=[7] * made, finish_reason=reason)
                for index in range(call.early if made == 1 else call.samples)
            ]
            yield SimpleNamespace(
                request_id=id,
                prompt_token_ids=prompt,
                finished=reason is not None,
                metrics=None,
                num_cached_tokens=0,
                outputs=samples,
            )

    def send(self, call: Call) -> AsyncIterator[Any]:
        sampling = SimpleNamespace(n=call.samples, call=call)
        return self.generate([1, 2, 3], sampling, request_id=call.id)


class SGLang:
    """Replays outputs as SGLang 0.5.23 gives them: a random id for each of several samples."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        call: Call = obj.call
        state = self.rid_to_state[call.id] = SimpleNamespace(output_ids=[])
        for made in range(1, call.tokens + 1):
            last = made == call.tokens
            state.output_ids.append(7)
            if last and call.way == "raise":
                raise RuntimeError("the engine is dead")
            reason = (
                {"abort": {"type": "abort"}, "end": {"type": "length"}}.get(call.way)
                if last
                else None
            )
            told = [
                {
                    "id": call.id if call.samples == 1 else f"random-{call.id}-{index}",
                    "finish_reason": reason,
                    "prompt_tokens": 3,
                    "completion_tokens": made,
                }
                for index in range(call.samples)
            ]
            if call.streams:
                for index, one in enumerate(told[:-1]):
                    yield {"meta_info": one, "index": index}
                yield {"meta_info": told[-1], "index": call.samples - 1}
            else:
                yield [{"meta_info": one} for one in told]

    def send(self, call: Call) -> AsyncIterator[Any]:
        obj = SimpleNamespace(
            rid=call.id, sampling_params={"n": call.samples}, input_ids=[1, 2, 3], call=call
        )
        return self.generate_request(obj)


def draw(chance: random.Random, number: int) -> Call:
    samples = chance.choice((1, 1, 2, 4))
    return Call(
        id=f"r{number}",
        tokens=chance.randint(2, 9),
        samples=samples,
        early=chance.randint(1, samples),
        way=chance.choice(("end", "abort", "close", "raise")),
        phase=chance.randrange(3),
        streams=chance.random() < 0.5,
    )


async def begun(call: Call, engine: Any) -> AsyncIterator[Any]:
    """Send a call, and take the first tokens of all its samples."""
    stream: AsyncIterator[Any] = engine.send(call)
    is_apart = call.streams and isinstance(engine, SGLang)
    for _ in range(call.samples if is_apart else 1):
        await anext(stream)
    return stream


async def ended(call: Call, stream: Any, engine: Any) -> list[tuple[str, int, bool]]:
    """End a call in its way; return the id, tokens and failure of each of its sequences."""
    length = call.tokens
    try:
        if call.way == "close":
            await stream.aclose()
            length = 1
        else:
            async for _ in stream:
                pass
    except RuntimeError:
        length -= 1
    early = call.early if isinstance(engine, VLLM) and length == 1 else call.samples
    lengths = [length] * early + [0] * (call.samples - early)
    return [(call.id, one, call.way != "end") for one in lengths]


@pytest.mark.parametrize("seed", range(24))
async def test_a_sequence_counts_in_the_capture_where_it_ends(seed: int) -> None:
    """From before or not, whole, aborted, cancelled or failed: with its id,
    its length and its fate.
    """
    chance = random.Random(seed)
    engine: Any = (VLLM, SGLang)[seed % 2]()
    log = RequestLog()
    log.serve(0, enable=True)
    sums = reporter_of(log)._sums()  # type: ignore[attr-defined]
    (watch_vllm if seed % 2 == 0 else watch_manager)(engine, log)
    calls = [draw(chance, number) for number in range(8)]
    streams = {call.id: await begun(call, engine) for call in calls}

    async def end(phase: int) -> list[tuple[str, int, bool]]:
        each = [
            await ended(call, streams[call.id], engine) for call in calls if call.phase == phase
        ]
        return [sequence for sequences in each for sequence in sequences]

    await end(0)
    log.begin(None)
    right = await end(1)
    noted = log.end()
    assert len(log.pending_since_ns) == sum(call.phase == 2 for call in calls)
    await end(2)
    assert sorted((one.id, one.response_tokens, one.failed) for one in noted) == sorted(right)
    assert all(one.begin_ns <= one.first_token_ns <= one.end_ns for one in noted)
    totals = sums[0].spans.of_steps([(0, 1 << 62)], 0)[0]
    [runs] = [total.runs for total in totals if total.name == "generate"]
    assert runs == sum(call.samples for call in calls)
    assert not sums[0].open


@pytest.mark.parametrize("seed", range(20))
async def test_a_batch_that_sglang_refuses_has_all_its_sequences(seed: int) -> None:
    """Each prompt counts, once for each sample; the caller gets SGLang's error, e.g.
    on too few ids.
    """
    chance = random.Random(seed)
    samples, ids = chance.randint(1, 3), [f"p{number}" for number in range(chance.randint(1, 4))]
    told = ids[: chance.randint(0, len(ids))]

    class Refusing:
        async def generate_request(self, obj: Any) -> AsyncIterator[Any]:
            obj.text = obj.text * samples
            raise ValueError("The length of rid")
            yield

    engine: Any = Refusing()
    log = RequestLog()
    log.serve(0, enable=True)
    watch_manager(engine, log)
    log.begin(None)
    obj = SimpleNamespace(rid=told or None, text=[*ids], sampling_params={"n": samples})
    with pytest.raises(ValueError, match="The length of rid"):
        await anext(engine.generate_request(obj))
    noted = [(one.id, one.response_tokens, one.failed) for one in log.end()]
    named = [*told, *[""] * (len(ids) - len(told))]
    assert noted == [(id, 0, True) for id in named for _ in range(samples)]
