"""An engine that dies while it is captured: whoever asks next is told so, and where its log is."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.engines.contract import request, stop
from tests.engines.server import settings
from verl_profiling import ProfilingCallback
from verl_profiling.engines import recorder
from verl_profiling.errors import CaptureStateError
from verl_profiling.workers import SGLangCaptureMixin

_TRACE = {
    "traceEvents": [{"ph": "X", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}]
}
LOG = r"its log is the output of process \d+ on \S+"


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
        schemas = {
            "ProfileReq": {"properties": {"output_dir": {}, "num_steps": {}, "start_step": {}}}
        }
        body = json.dumps(
            {"components": {"schemas": schemas}, "tp_size": 1, "device": "cpu"}
        ).encode()
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


@contextmanager
def serving(routes: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve routes on a port of this machine; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), routes) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


async def test_an_answer_that_is_no_http_does_not_end_a_stop_well(tmp_path: Path) -> None:
    """Another program may hold the port by then."""

    class Garbled(_Routes):
        def do_POST(self) -> None:
            if self.path == "/stop_profile":
                self.wfile.write(b"hello\r\n\r\n")
            else:
                super().do_POST()

    with serving(Garbled) as address:
        server = SGLangCaptureMixin()
        server.init_capture(settings(tmp_path), engine=address)
        order = request(tmp_path)
        await server.start_capture(order)
        result = (await server.stop_capture(order.capture_id)).result
    assert result.status == "failed"
    assert "BadStatusLine" in result.reason


async def test_a_server_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends its server with its schedulers;
    stop and start name the address and where to look.
    """
    monkeypatch.setattr(recorder, "_DYING_S", 0.2)
    with serving(_Routes) as address:
        server = SGLangCaptureMixin()
        server.init_capture(settings(tmp_path), engine=address)
        order = request(tmp_path)
        assert (await server.start_capture(order)).status == "recording"
    result = (await server.stop_capture(order.capture_id)).result
    assert result.status == "failed"
    assert f"{address}/stop_profile does not answer" in result.reason
    assert "its log may show the cause" in result.reason
    with pytest.raises(CaptureStateError, match="/start_profile does not answer"):
        await server.start_capture(request(tmp_path, 2))


@pytest.mark.parametrize("method", ["start_profile", "stop_profile"])
def test_a_server_that_hangs_holds_the_loop_up_no_longer_than_the_timeouts(
    tmp_path: Path, method: str
) -> None:
    """The loop calls the server object itself: it is over before the server has answered."""
    goes_on, answered = threading.Event(), []

    class Hanging(_Routes):
        def do_POST(self) -> None:
            if self.path.endswith(method):
                goes_on.wait(60)
                answered.append(self.path)
            super().do_POST()

    config = settings(tmp_path, timeouts={"start_s": 1, "stop_s": 1, "finish_s": 1})
    with serving(Hanging) as address:
        server, callback = SGLangCaptureMixin(), ProfilingCallback(config)
        server.init_capture(config, engine=address)
        callback.add_rollout(server)
        with callback:
            callback.on_step_begin(1)
            callback.on_step_end()
        assert answered == []
        goes_on.set()


async def test_a_server_that_writes_past_the_timeouts_delivers_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is `failed` at the timeout; the trace is in the result on disk,
    as for an engine object.
    """
    monkeypatch.setattr(recorder, "_DYING_S", 0.0)
    goes_on, spools = threading.Event(), []

    class Writing(_Routes):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("start_profile"):
                spools.append(Path(body["output_dir"]))
            else:
                goes_on.wait(60)
                with gzip.open(spools[0] / "1-TP-0.trace.json.gz", "wt") as trace:
                    json.dump(_TRACE, trace)
            super().do_POST()

    config = settings(tmp_path, timeouts={"stop_s": 0.1})
    with serving(Writing) as address:
        server, order = SGLangCaptureMixin(), request(tmp_path)
        server.init_capture(config, engine=address)
        await server.start_capture(order)
        assert (await server.stop_capture(order.capture_id)).result.status == "failed"
        await asyncio.sleep(0.5)
        goes_on.set()
        result = Path(order.folder) / "rollout0.result.json"
        for _ in range(100):
            [late] = json.loads(result.read_text())["artifacts"]
            if late["status"] == "ok":
                break
            await asyncio.sleep(0.1)
    assert late["status"] == "ok", late["reason"]
    assert (Path(order.folder) / late["path"]).is_file()


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2], ids=["its core", "one of two workers"])
async def test_vllm_that_is_killed_is_said_to_be_dead(
    ranks: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it is captured: the result is failed and names the death,
    and so does the next start.
    """
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
        with pytest.raises(
            CaptureStateError, match=rf"start_capture\(step=4\): vLLM died \(.*{LOG}"
        ):
            await server.start_capture(request(tmp_path, 4))
    finally:
        server.close()
