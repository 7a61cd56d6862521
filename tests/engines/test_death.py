"""An engine that dies while it is captured: whoever asks next is told so, and where its log is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.engines.contract import request, stop
from tests.engines.server import settings
from verl_profiling.engines.adapter import EngineAdapter, EngineTrace
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.rollout import RolloutOptions
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool
from verl_profiling.workers import SGLangCaptureMixin

IDENTITY = WorkerIdentity(role="rollout", rank=0, replica=0)
LOG = r"its log is the output of process \d+ on \S+"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process as the kernel does."""
    process.send_signal(signal.SIGKILL)
    process.wait()


class SilentEngine(EngineAdapter):
    """An engine in one process, which does not answer once that process has ended."""

    name = "silent"
    window = RolloutOptions()
    ranks = 1

    def __init__(self, process: subprocess.Popen[bytes], spool: Path) -> None:
        self.process = process
        self.spool = spool

    async def start(self) -> None:
        await self._answer()

    async def stop(self) -> None:
        await self._answer()

    def died(self) -> str:
        code = self.process.poll()
        return "" if code is None else f"core ended with {signal.Signals(-code).name}"

    def identify(self, path: Path) -> EngineTrace | None:
        return None

    async def _answer(self) -> None:
        if self.process.poll() is not None:
            await asyncio.Event().wait()


@pytest.fixture
def recorder(process: subprocess.Popen[bytes], tmp_path: Path) -> EngineRecorder:
    """A recorder of a silent engine."""
    engine = SilentEngine(process, tmp_path / "spool")
    config = ProfilingConfig.from_any(settings(tmp_path))
    return EngineRecorder(engine, TorchTool(TorchOptions()), IDENTITY, config, RequestLog())


async def test_a_stop_that_nobody_answers_is_not_waited_for(
    process: subprocess.Popen[bytes], recorder: EngineRecorder, tmp_path: Path
) -> None:
    """The stop returns at once, failed, with the death as its reason; so does the next start."""
    order = request(tmp_path, 3)
    assert (await recorder.start(order)).status == "recording"
    kill(process)
    begin = time.monotonic()
    result = (await recorder.stop(order.capture_id, 0.0)).result
    assert time.monotonic() - begin < 30, "the deadline of a stop is 300 s"
    assert result.status == "failed"
    assert result.reason.startswith("silent died (core ended with SIGKILL); its log is ")
    with pytest.raises(CaptureStateError, match=rf"start_capture\(step=4\): silent died .*{LOG}.*replica 0"):
        await recorder.start(request(tmp_path, 4))


async def test_an_error_of_an_engine_that_is_dying_is_not_taken_for_the_cause(
    process: subprocess.Popen[bytes], recorder: EngineRecorder, tmp_path: Path
) -> None:
    """A core whose worker has died answers with some error first, and ends afterwards."""
    engine: Any = recorder.engine

    async def fail() -> None:
        asyncio.get_running_loop().call_later(0.7, kill, process)
        raise RuntimeError("cancelled")

    order = request(tmp_path)
    await recorder.start(order)
    engine.stop = fail
    result = (await recorder.stop(order.capture_id, 0.0)).result
    assert result.reason.startswith("silent died (core ended with SIGKILL)")


async def test_sglang_names_the_processes_that_its_watchdog_watches(tmp_path: Path) -> None:
    """A scheduler that was killed, where this SGLang holds its processes."""
    alive, scheduler = SimpleNamespace(exitcode=None), SimpleNamespace(exitcode=None)

    class Manager:
        server_args = SimpleNamespace(tp_size=1, device="cpu")
        _subprocess_watchdog = SimpleNamespace(
            _names=["detokenizer", "scheduler_0"], _processes=[alive, scheduler]
        )

        async def start_profile(self, **options: Any) -> None:
            pass

        async def stop_profile(self) -> None:
            await asyncio.Event().wait()

        async def generate_request(self, obj: Any) -> AsyncIterator[Any]:
            yield {}

    server, order = SGLangCaptureMixin(), request(tmp_path)
    server.init_capture(settings(tmp_path), engine=SimpleNamespace(tokenizer_manager=Manager()))
    assert (await server.start_capture(order)).status == "recording"
    scheduler.exitcode = -signal.SIGKILL
    result = (await server.stop_capture(order.capture_id)).result
    assert result.reason.startswith("SGLang died (scheduler_0 ended with SIGKILL); its log is ")


class _Routes(BaseHTTPRequestHandler):
    """The part of SGLang's server that is asked."""

    def do_GET(self) -> None:
        schemas = {"ProfileReq": {"properties": {"output_dir": {}, "num_steps": {}, "start_step": {}}}}
        body = json.dumps({"components": {"schemas": schemas}, "tp_size": 1, "device": "cpu"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    """SGLang ends its server with its schedulers; stop and start name the address and where to look."""
    http = HTTPServer(("127.0.0.1", 0), _Routes)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        server = SGLangCaptureMixin()
        server.init_capture(settings(tmp_path), engine=f"http://127.0.0.1:{http.server_port}")
        order = request(tmp_path)
        assert (await server.start_capture(order)).status == "recording"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
    result = (await server.stop_capture(order.capture_id)).result
    assert result.status == "failed"
    assert f":{http.server_port}/stop_profile does not answer" in result.reason
    assert "the server's log says why" in result.reason
    with pytest.raises(CaptureStateError, match="/start_profile does not answer"):
        await server.start_capture(request(tmp_path, 2))


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2], ids=["its core", "one of two workers"])
async def test_vllm_that_is_killed_is_said_to_be_dead(
    ranks: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it is captured: the result is failed and names the death, and so does the next start."""
    from tests.engines.test_vllm import Server

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if ranks == 2 else "auto")
    before = set(psutil.Process().children(recursive=True))
    server = Server(tiny_model, tmp_path, tensor_parallel_size=ranks)
    try:
        server.reconfigure()
        started = [p for p in psutil.Process().children(recursive=True) if p not in before]
        name = "VLLM::Worker" if ranks == 2 else "VLLM::EngineCore"
        victim = next(p for p in started if name in " ".join(p.cmdline()))
        order = request(tmp_path, 3)
        await server.start_capture(order)
        await server.generate(1, 2)
        os.kill(victim.pid, signal.SIGKILL)
        begin = time.monotonic()
        result = await stop(server, order.capture_id)
        assert time.monotonic() - begin < 120, "the deadline of a stop is 300 s"
        assert result.status == "failed"
        assert "vLLM died" in result.reason
        assert "its log is" in result.reason
        with pytest.raises(CaptureStateError, match=rf"start_capture\(step=4\): vLLM died \(.*{LOG}"):
            await server.start_capture(request(tmp_path, 4))
    finally:
        server.close()
