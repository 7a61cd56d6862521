"""A real vLLM engine on CPU."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.contract import EngineContract, spans
from verl_profiling.workers import VLLMCaptureMixin

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def settings(save_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration that is on."""
    return {"enable": True, "save_path": str(save_path), **changes}


class Server(VLLMCaptureMixin):
    """What a user writes, plus the helpers of the contract."""

    too_long_message = "maximum"

    def __init__(self, model: Path, save_path: Path, **engine: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.news: list[Any] = []
        self.save_path = save_path
        changes = engine.pop("changes", {})
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=8,
                dtype="bfloat16",
                **self.engine_args(settings(save_path, **changes)),
                **engine,
            )
        )
        self._ids = itertools.count()

    def reconfigure(self, **changes: Any) -> None:
        self.news.clear()
        self.init_capture(settings(self.save_path, **changes))

    async def generate(self, requests: int, tokens: int) -> int:
        return sum(await asyncio.gather(*[self._one([5, 6, 7, 8], tokens) for _ in range(requests)]))

    async def generate_too_long(self) -> int:
        return await self._one([5] * 1000, 1)

    async def _one(self, prompt: list[int], tokens: int) -> int:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for output in self.engine.generate(
            {"prompt_token_ids": prompt}, sampling, request_id=f"r{next(self._ids)}"
        ):
            length = len(output.outputs[0].token_ids)
        return length

    @staticmethod
    def iterations(path: Path) -> int:
        """Count vLLM's own annotation of each executed iteration."""
        return sum(event["name"].startswith("execute_context") for event in spans(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """One engine for the module; its processes are gone afterwards."""
    server = Server(tiny_model, tmp_path_factory.mktemp("save"))
    yield server
    server.engine.shutdown()


@pytest.fixture(autouse=True)
def engine_of_the_table(record_property: Any) -> None:
    import vllm

    record_property("engine", f"vLLM {vllm.__version__}")


class TestAsyncLLM(EngineContract):
    """The contract, on an engine core in a process of its own."""
