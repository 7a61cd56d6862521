"""A real SGLang engine on CPU."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.engines.contract import (
    RanksContract,
    WindowContract,
    assert_idling_with_stacks_is_cheap,
    finished,
    request,
    spans,
    stop,
)
from tests.engines.server import PROMPT, SGLANG_ON_CPU, EngineServer
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.workers import SGLangCaptureMixin

pytest.importorskip(
    "sglang", reason="SGLang is not installed; make test-sglang builds its environment"
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]


class Server(EngineServer, SGLangCaptureMixin):
    """What a user writes, plus the helpers of the contract."""

    too_long_message = "longer"

    def __init__(self, model: Path, save_path: Path, replica: int = 0, **engine: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        super().__init__(save_path, replica)
        self.engine = Engine(
            model_path=str(model), skip_tokenizer_init=True, **{**SGLANG_ON_CPU, **engine}
        )

    async def _one(self, prompt: list[int], tokens: int) -> int:
        stream = await self.engine.async_generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": tokens, "ignore_eos": True},
            stream=True,
        )
        async for output in stream:
            length = output["meta_info"]["completion_tokens"]
        return int(length)

    @staticmethod
    def iterations(path: Path) -> int:
        """Count lookups of token embeddings: one for each forward pass."""
        return sum(event["name"] == "aten::embedding" for event in spans(path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """One engine for the module; its processes are gone afterwards."""
    server = Server(tiny_model, tmp_path_factory.mktemp("save"))
    yield server
    server.close()


class TestEngine(WindowContract):
    """The contract, with a scheduler in a separate process."""

    windows = ({"count": 1}, {"count": 3})

    async def test_unreached_window_is_empty_and_the_next_capture_clean(
        self, server: Server, tmp_path: Path
    ) -> None:
        """Nothing ran in it: the stop takes the armed window back,
        and later generation records nothing.
        """
        server.reconfigure(rollout={"count": 2})
        order = request(tmp_path)
        await server.start_capture(order)
        result = await stop(server, order.capture_id)
        assert (result.status, "never began" in result.reason) == ("empty", True)
        await server.generate(1, 5)
        assert not list(server.save_path.rglob("*.gz"))
        paths = await self.capture(server, request(tmp_path, 2), tokens=8)
        assert server.iterations(paths[0]) == 2


class TestOnlySGLang:
    """What only SGLang has, and what would end it."""

    async def test_a_second_start_of_its_profiler_is_refused_while_a_capture_runs(
        self, server: Server, tmp_path: Path
    ) -> None:
        """SGLang would report success, and begin a recording in place of the one that runs."""
        manager, order = server.engine.tokenizer_manager, request(tmp_path)
        server.reconfigure()
        await server.start_capture(order)
        with pytest.raises(RuntimeError, match="start SGLang's profiler after it"):
            await manager.start_profile()
        await server.generate(1, 5)
        result = await stop(server, order.capture_id)
        [artifact] = await finished(server, result)
        assert server.iterations(Path(order.folder, artifact.path)) >= 5
        assert manager.start_profile.__name__ == "start_profile"

    async def test_prefill_and_decode_have_traces_of_their_own(
        self, server: Server, tmp_path: Path
    ) -> None:
        """Each has as many iterations, or those until the stop; the file of all ranks is beside
        them, and is no lane of the report.
        """
        rollout = {"count": 3, "profile_by_stage": True, "merge_profiles": True}
        server.reconfigure(rollout=rollout)
        for step, tokens in ((1, 12), (2, 2)):
            order = request(tmp_path, step)
            await server.start_capture(order)
            await server.generate(1, tokens)
            artifacts = await finished(server, await stop(server, order.capture_id))
            assert [(artifact.path, artifact.status) for artifact in artifacts] == [
                ("rollout0_rank0.prefill.torch.json.gz", "ok"),
                ("rollout0_rank0.decode.torch.json.gz", "ok"),
                ("rollout0.merged.gz", "ok"),
            ]
            prefills, decodes = (
                server.iterations(Path(order.folder, artifact.path)) for artifact in artifacts[:2]
            )
            assert prefills == 1
            assert decodes == 3 if tokens > 3 else decodes in (1, 2)  # it may begin one too many

    async def test_idling_with_stacks_is_cheap(self, server: Server, tmp_path: Path) -> None:
        """With stacks recording begins with the first iteration and ends after a few,
        not while idle.
        """
        server.reconfigure(tools={"torch": {"stack": True, "shapes": True}})
        await assert_idling_with_stacks_is_cheap(server, request(tmp_path))

    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            ({"tools": {"torch": {"memory": True}}}, "tools.torch.memory"),
            ({"tools": {"torch": {"activities": ["cuda"]}}}, "tools.torch.activities"),
            ({"tools": {"torch": {"mini_batches": {"active": 1}}}}, "tools.torch.mini_batches"),
            ({"rollout": {"start": 3}}, "rollout.start"),
        ],
    )
    async def test_what_it_does_not_have_is_refused_before_anything_is_sent(
        self, server: Server, changes: dict[str, Any], key: str
    ) -> None:
        """The error names the key; the scheduler, which some of these would end, lives on."""
        with pytest.raises(ConfigError) as error:
            server.reconfigure(**changes)
        assert error.value.key == key
        assert await server.generate(1, 2) == 2

    async def test_no_manager_names_the_remedy(self) -> None:
        """Without a tokenizer manager there is nothing to drive,
        and the error says what to pass.
        """

        class Node:
            tokenizer_manager = None

        with pytest.raises(CaptureStateError, match="pass node_rank"):
            SGLangCaptureMixin().init_capture({"enable": True}, engine=Node())


# SGLang's shutdown ends every child of this process, so what has an engine of its own comes last.
# The watchdog of another engine takes that for a crash, and ends this process.


class TestTensorParallel(RanksContract):
    """The contract of ranks, on two schedulers."""

    ranks = 2

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def server(
        self, server: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[Server]:
        server.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
            server = Server(tiny_model, tmp_path_factory.mktemp("save"), tp_size=2)
            yield server
            server.close()


async def test_a_server_behind_a_url(tiny_model: Path, tmp_path: Path) -> None:
    """An HTTP server is driven over its own routes: two captures, an exact window,
    and stop twice.
    """
    async with http_servers(tiny_model, tmp_path) as [server]:
        for step, window in enumerate(({}, {"count": 3})):
            server.reconfigure(rollout=window)
            paths = await TestEngine().capture(server, request(tmp_path, step), tokens=8)
            assert (
                server.iterations(paths[0]) >= 8 if not window else server.iterations(paths[0]) == 3
            )
        assert (await stop(server, "never")).status == "skipped"


async def test_a_server_that_asks_for_a_key_is_named_as_such(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It does answer, by 401; the message says what to do."""
    async with http_servers(tiny_model, tmp_path, api_key="secret") as [server]:
        with pytest.raises(CaptureStateError, match=r"answered 401.*asks for an API key.*Engine"):
            server.reconfigure()


class URLServer(EngineServer, SGLangCaptureMixin):
    """What a user writes around the address of a server."""

    sees_requests = False

    def __init__(self, url: str, save_path: Path, replica: int) -> None:
        super().__init__(save_path, replica)
        self.engine = url

    async def generate(self, requests: int, tokens: int) -> int:
        body = {
            "input_ids": [PROMPT] * requests,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        }
        await asyncio.to_thread(_post, f"{self.engine}/generate", body)
        return requests * tokens

    iterations = staticmethod(Server.iterations)


@asynccontextmanager
async def http_servers(
    model: Path, folder: Path, count: int = 1, **options: Any
) -> AsyncIterator[list[URLServer]]:
    """Start HTTP servers, wait until they answer, and end them with all their processes."""
    servers, processes = [], []
    try:
        for replica in range(count):
            port = _free_port()
            command = [sys.executable, "-m", "sglang.launch_server", "--skip-tokenizer-init"]
            for name, value in {
                **{"model_path": model, "port": port, **SGLANG_ON_CPU},
                **options,
            }.items():
                option = f"--{name.replace('_', '-')}"
                command += [option] if value is True else [option, str(value)]
            with (folder / f"log{replica}").open("w") as log:
                processes.append(psutil.Popen(command, stdout=log, stderr=log))
            servers.append(URLServer(f"http://127.0.0.1:{port}", folder / "save", replica))
        for server, process in zip(servers, processes, strict=True):
            await _until_it_answers(f"{server.engine}/health", process)
        yield servers
    finally:
        for process in processes:
            family = [*process.children(recursive=True), process] if process.is_running() else []
            for member in family:
                member.kill()
            psutil.wait_procs(family)


def _free_port() -> int:
    """Return a port so low that those that SGLang derives from it exist,
    and are given to nobody.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


async def _until_it_answers(url: str, process: psutil.Popen) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=2):
                return
        except OSError:
            await asyncio.sleep(0.5)
    raise AssertionError(f"{url} does not answer")
