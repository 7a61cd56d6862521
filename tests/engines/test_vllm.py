"""A real vLLM engine on CPU."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.engines.contract import (
    RanksContract,
    WindowContract,
    assert_idling_with_stacks_is_cheap,
    request,
    spans,
    stop,
)
from tests.engines.server import EngineServer, settings
from verl_profiling.capture.session import Session
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.workers import VLLMCaptureMixin

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


class Server(EngineServer, VLLMCaptureMixin):
    """What a user writes, plus the helpers of the contract."""

    too_long_message = "maximum"

    def __init__(
        self, model: Path, save_path: Path, replica: int = 0, changes: Any = None, **engine: Any
    ) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        super().__init__(save_path, replica)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=8,
                dtype="float32",
                **self.engine_args(settings(save_path, **(changes or {}))),
                **engine,
            )
        )
        self._ids = itertools.count()

    def close(self) -> None:
        """End what the engine has started at once; by itself it takes seconds,
        and is killed in the end.
        """
        for process in set(multiprocessing.active_children()) - self._others:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
        super().close()

    def reconfigure(self, **changes: Any) -> None:
        try:
            super().reconfigure(**changes)
        except CaptureStateError as error:
            if "was started with (delay_iterations, max_iterations)" not in str(error):
                raise
            pytest.skip(
                "this vLLM fixes the window when it starts; test_window_of_engine_args has one"
            )

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
async def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """One engine for the module; its processes are gone afterwards."""
    server = Server(tiny_model, tmp_path_factory.mktemp("save"))
    yield server
    server.close()


class TestAsyncLLM(WindowContract):
    """The contract, with an engine core in a separate process."""


class TestTensorParallel(RanksContract):
    """The contract of ranks, on two workers."""

    ranks = 2

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def server(
        self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[Server]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            server = Server(tiny_model, tmp_path_factory.mktemp("save"), tensor_parallel_size=2)
            yield server
            server.close()


async def test_idling_with_stacks_is_cheap(tiny_model: Path, tmp_path: Path) -> None:
    """With stacks recording begins with the first iteration and ends after a few,
    not while polling.
    """
    changes = {"tools": {"torch": {"stack": True, "shapes": True}}}
    server = Server(tiny_model, tmp_path, changes=changes)
    try:
        server.reconfigure(**changes)
        await server.generate(1, 2)
        await assert_idling_with_stacks_is_cheap(server, request(tmp_path))
    finally:
        server.close()


async def test_window_of_engine_args(tiny_model: Path, tmp_path: Path) -> None:
    """A window that the engine is started with is exact, capture after capture,
    on every version.
    """
    changes = {"rollout": {"start": 2, "count": 3}}
    server = Server(tiny_model, tmp_path / "save", changes=changes)
    try:
        server.reconfigure(**changes)
        for step in (1, 2):
            paths = await TestAsyncLLM().capture(server, request(tmp_path, step), tokens=12)
            assert server.iterations(paths[0]) == 3
        order = request(tmp_path, 3)
        await server.start_capture(order)
        assert (await stop(server, order.capture_id)).status == "empty"
        await TestAsyncLLM().capture(server, request(tmp_path, 4), tokens=12)
    finally:
        server.close()


async def test_engine_without_a_profiler(
    tiny_model: Path, tmp_path: Path, session: Session
) -> None:
    """With the tool torch it is refused at init, with the remedy;
    with spans its requests are logged.
    """
    server = Server(tiny_model, tmp_path, changes={"enable": False})
    try:
        with pytest.raises(CaptureStateError, match=r"no profiler.*engine_args\(config\)"):
            server.reconfigure()
        server.reconfigure(tool="spans")
        order = request(tmp_path)
        await server.start_capture(order)
        assert await server.generate(1, 2) == 2
        result = await stop(server, order.capture_id)
        assert (result.status, result.artifacts, len(result.requests)) == ("ok", [], 1), result
    finally:
        server.close()


async def test_options_are_refused_by_name_or_nothing_is_configured(tmp_path: Path) -> None:
    """No arguments when disabled, when the role is left out,
    and for tools that record no engine.
    """
    windowed = {"torch": {"mini_batches": {"active": 2}}}
    with pytest.raises(ConfigError, match=r"tools\.torch\.mini_batches"):
        VLLMCaptureMixin.engine_args(settings(tmp_path, tools=windowed))
    for changes in ({"enable": False}, {"select": {"roles": ["actor"]}}, {"tool": "spans"}):
        assert VLLMCaptureMixin.engine_args({**settings(tmp_path), **changes}) == {}
