"""A real SGLang engine on CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.contract import WindowContract, spans
from verl_profiling.workers import SGLangCaptureMixin

sglang = pytest.importorskip(
    "sglang", reason="SGLang is not installed; make test-sglang builds its environment"
)

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

NEVER = {"sglang": {"start_step": 1_000_000}, "count": 2}


class Server(SGLangCaptureMixin):
    """What a user writes, plus the helpers of the contract."""

    too_long_message = "longer"

    def __init__(self, model: Path, save_path: Path, **engine: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.news: list[Any] = []
        self.save_path = save_path
        self.engine = Engine(
            model_path=str(model),
            skip_tokenizer_init=True,
            device="cpu",
            attention_backend="torch_native",
            disable_cuda_graph=True,
            sampling_backend="pytorch",
            dtype="bfloat16",
            max_total_tokens=4096,
            mem_fraction_static=0.3,
            log_level="warning",
            skip_server_warmup=True,
            disable_radix_cache=True,
            **engine,
        )

    def reconfigure(self, **changes: Any) -> None:
        self.news.clear()
        self.init_capture({"enable": True, "save_path": str(self.save_path), **changes})

    async def generate(self, requests: int, tokens: int) -> int:
        return sum(await asyncio.gather(*[self._one([5, 6, 7, 8], tokens) for _ in range(requests)]))

    async def generate_too_long(self) -> int:
        return await self._one([5] * 5000, 1)

    async def _one(self, prompt: list[int], tokens: int) -> int:
        stream = await self.engine.async_generate(
            input_ids=prompt, sampling_params={"max_new_tokens": tokens, "ignore_eos": True}, stream=True
        )
        async for output in stream:
            length = output["meta_info"]["completion_tokens"]
        return int(length)

    @staticmethod
    def iterations(path: Path) -> int:
        """Count lookups of token embeddings: one for each forward pass."""
        return sum(event["name"] == "aten::embedding" for event in spans(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """One engine for the module; its processes are gone afterwards."""
    server = Server(tiny_model, tmp_path_factory.mktemp("save"))
    yield server
    server.engine.shutdown()


@pytest.fixture(autouse=True)
def engine_of_the_table(record_property: Any) -> None:
    record_property("engine", f"SGLang {sglang.__version__}")


class TestEngine(WindowContract):
    """The contract, on a scheduler in a process of its own."""

    windows = ({"count": 1}, {"count": 3})
    unreached = NEVER
