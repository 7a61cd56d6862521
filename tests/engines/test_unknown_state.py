"""Starts and stops of an engine's profiler that fail, are late or are given up:
it never stays on.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.contract import request
from tests.engines.server import settings
from tests.engines.test_death import _Routes, serving
from verl_profiling.engines import recorder
from verl_profiling.workers import SGLangCaptureMixin

TRACE = {
    "traceEvents": [{"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}]
}
START_S = 1.0


@dataclass
class Profiler:
    """SGLang's profiler: a start with a window is refused while it is on, a plain one replaces it.

    Its first start may be slow, or be answered by an error although it is on; its first stop may
    fail.
    """

    slow_s: float
    start_fails: bool
    stop_fails: bool
    folder: str = ""
    starts: int = 0
    stops: int = 0

    def delay_s(self, is_start: bool) -> float:
        return self.slow_s if is_start and not self.starts else 0.0

    def start(self, options: dict[str, Any]) -> None:
        self.starts += 1
        if self.folder and options.get("start_step"):
            raise RuntimeError("Profiling is already in progress")
        self.folder = options["output_dir"]
        if self.starts == 1 and self.start_fails:
            raise RuntimeError("CUPTI is out of memory")

    def stop(self) -> None:
        self.stops += 1
        if not self.folder:
            raise RuntimeError("Profiling is not in progress")
        if self.stops == 1 and self.stop_fails:
            raise RuntimeError("the export failed")
        folder, self.folder = Path(self.folder), ""
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(folder / f"{self.stops}-TP-0.trace.json.gz", "wt") as file:
            json.dump(TRACE, file)


def by_url(profiler: Profiler, names_errors: bool) -> type[_Routes]:
    """Return the routes of a server; as FastAPI does, it may hide what went wrong."""

    class Routes(_Routes):
        def do_POST(self) -> None:
            options = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, body, is_start = 200, b"done", self.path == "/start_profile"
            time.sleep(profiler.delay_s(is_start))
            try:
                profiler.start(options) if is_start else profiler.stop()
            except RuntimeError as error:
                code, body = 500, str(error).encode() if names_errors else b"Internal Server Error"
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Routes


class Manager:
    """A tokenizer manager: its calls are answered in order,
    and one that is cancelled blocks the others.
    """

    server_args = SimpleNamespace(tp_size=1, device="cpu")

    def __init__(self, profiler: Profiler, loop: asyncio.AbstractEventLoop | None) -> None:
        self._profiler, self.event_loop = profiler, loop
        self._lock = asyncio.Lock()

    async def start_profile(self, **options: Any) -> None:
        await self._lock.acquire()
        await asyncio.sleep(self._profiler.delay_s(is_start=True))
        self._answer(self._profiler.start, options)

    async def stop_profile(self) -> None:
        await self._lock.acquire()
        self._answer(self._profiler.stop)

    async def generate_request(self, obj: Any) -> AsyncIterator[Any]:
        yield {}

    def _answer(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        finally:
            self._lock.release()


async def step(
    server: SGLangCaptureMixin, folder: Path, number: int, cancelled: bool
) -> tuple[str, str]:
    """Capture a step as a callback does: it stops a worker also if the start failed;
    return the outcome.
    """
    order, problem = request(folder, number), ""
    starting = asyncio.ensure_future(server.start_capture(order))
    if cancelled:
        await asyncio.sleep(START_S / 5)
        starting.cancel()
    try:
        await starting
    except (Exception, asyncio.CancelledError) as error:
        problem = f"{type(error).__name__}: {error}"
    result = (await server.stop_capture(order.capture_id, 10.0)).result
    return ("failed", problem) if problem else (result.status, result.reason)


async def run(seed: int, folder: Path) -> None:
    """Capture three steps with an engine that is drawn from a seed."""
    draw = random.Random(seed)
    profiler = Profiler(
        draw.choice((0, START_S / 2, 2 * START_S)), draw.random() < 0.3, draw.random() < 0.3
    )
    cancelled = draw.random() < 0.4
    names_errors, uses_url = draw.random() < 0.5, draw.random() < 0.6
    changes: dict[str, Any] = {
        "tools": {"torch": {"activities": ["cpu"]}},
        "timeouts": {"start_s": START_S},
    }
    if draw.random() < 0.5:
        changes["rollout"] = {"count": draw.randint(1, 9)}
    server = SGLangCaptureMixin()
    with ExitStack() as stack:
        if uses_url:
            engine: Any = stack.enter_context(serving(by_url(profiler, names_errors)))
        else:
            loop = asyncio.new_event_loop() if draw.random() < 0.5 else None
            engine = SimpleNamespace(tokenizer_manager=Manager(profiler, loop))
            if loop is not None:
                threading.Thread(target=loop.run_forever, daemon=True).start()
                stack.callback(loop.call_soon_threadsafe, loop.stop)
        server.init_capture(settings(folder, **changes), engine=engine)
        outcomes = [
            await step(server, folder, number, cancelled and number == 1) for number in (1, 2, 3)
        ]
    seen = f"seed {seed}: {outcomes}, {profiler}"
    assert not profiler.folder, f"it is still on: {seen}"
    assert [status for status, _ in outcomes].count("ok") >= 2, seen
    answered = not uses_url or (names_errors and profiler.slow_s < START_S)
    if profiler.start_fails and answered and not cancelled:
        assert "CUPTI is out of memory" in outcomes[0][1], seen


async def test_a_profiler_whose_state_is_unknown_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later captures are whole, the profiler is off in the end,
    and reasons hold the server's answers.
    """
    monkeypatch.setattr(recorder, "_DYING_S", 0.1)
    ends = await asyncio.gather(
        *(run(seed, tmp_path / str(seed)) for seed in range(40)), return_exceptions=True
    )
    assert [str(end) for end in ends if end is not None] == []
