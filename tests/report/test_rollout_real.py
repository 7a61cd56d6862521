"""Rollouts that really run, from the callback to the command line: what the report says of event loops."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from conftest import again

from verl_profiling import AsyncProfilingCallback, span, trajectory
from verl_profiling.cli import main
from verl_profiling.workers import AgentLoopCaptureMixin

Reported = Callable[..., dict[str, Any]]


async def nothing() -> None:
    """Run nothing before the capture."""


@pytest.fixture
def reported(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], session: object
) -> Reported:
    """Capture a step in which an agent loop runs a coroutine; return its report, as ``--json`` prints it.

    Another coroutine has begun when the capture does, and goes on in it.
    """

    async def loop(
        folder: Path, body: Coroutine[Any, Any, object], before: Coroutine[Any, Any, object], watch: bool
    ) -> None:
        config = {"enable": True, "save_path": str(folder), "schedule": {"steps": [1]}, "tool": "spans"}
        callback = AsyncProfilingCallback({**config, "watch": {"enable": watch}})
        worker = AgentLoopCaptureMixin()
        worker.init_capture(callback.config)
        callback.add_workers("agent_loop", [worker])
        await callback.on_train_begin()
        begun = asyncio.create_task(before)
        await asyncio.sleep(0.1)
        await callback.on_step_begin(1)
        with callback.stage("rollout"):
            await asyncio.gather(begun, body)
        await callback.on_step_end()
        await callback.on_train_end()

    def run(
        body: Coroutine[Any, Any, object],
        before: Coroutine[Any, Any, object] | None = None,
        watch: bool = False,
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        asyncio.run(loop(folder, body, before or nothing(), watch))
        capsys.readouterr()
        main(["report", str(folder / "step_000001"), "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def keep_the_gil(seconds: float = 0.3) -> None:
    """Count in C, which lets no other thread run Python meanwhile."""
    begin = time.perf_counter()
    sum(range(1_000_000))
    sum(range(round(1_000_000 * seconds / (time.perf_counter() - begin))))


def blocked(report: dict[str, Any]) -> dict[str, float]:
    """Return for how long event loops were blocked (s), by what is said to have done so."""
    return {row["what"]: row["seconds"] for row in report["rollout"]["blocks"]}


@again
def test_a_span_that_waits_for_another_thread_blocks_no_event_loop(reported: Reported) -> None:
    """What keeps the GIL in an executor is not known, and is not to be run in a thread."""

    async def tokenizes() -> None:
        async with trajectory():
            for _ in range(4):
                async with span("tokenize"):
                    await asyncio.get_running_loop().run_in_executor(None, keep_the_gil)

    async def body() -> None:
        await asyncio.gather(tokenizes(), tokenizes())

    report = reported(body())
    assert set(blocked(report)) <= {"unknown"}
    assert not [found for found in report["findings"] if "in a thread" in found["advice"]]


@again
def test_a_span_that_keeps_the_gil_in_its_event_loop_is_named(reported: Reported) -> None:
    """No sample can be taken meanwhile; a later one counts, for the loop's thread has used the CPU."""

    async def body() -> None:
        async with trajectory():
            for _ in range(6):
                async with span("wait:turn"):
                    await asyncio.sleep(0.05)
                async with span("tool:parse"):
                    keep_the_gil()
                    await asyncio.sleep(0)

    found = blocked(reported(body()))
    assert {"tool:parse"} <= set(found) <= {"tool:parse", "unknown"}, "no sample at all saw some of it"


@again
def test_a_tool_that_waits_for_a_command_in_its_event_loop_is_named(reported: Reported) -> None:
    """The function is the user's, below those of Python's own that wait."""

    async def body() -> None:
        async with trajectory():
            for _ in range(4):
                async with span("tool:sandbox"):
                    subprocess.run(["sleep", "0.3"], check=True)
                    await asyncio.sleep(0)

    found = blocked(reported(body()))
    assert {"tool:sandbox"} <= set(found) <= {"tool:sandbox", "unknown"}


@pytest.mark.parametrize("watch", [True, False])
@again
def test_what_began_before_the_capture_has_the_name_of_its_span(reported: Reported, watch: bool) -> None:
    """The watch knows the spans that are open; without it, all that is known is said."""

    async def before() -> None:
        async with trajectory(), span("turn"):
            begin_s = time.monotonic()
            async with span("tool:sandbox"):
                await asyncio.sleep(1.5)
            in_sandbox_s.append(time.monotonic() - begin_s)
            async with span("tool:search"):
                await asyncio.sleep(0.3)

    async def too_long() -> None:
        async with trajectory(), span("environment:start"):
            await asyncio.sleep(30)

    async def both() -> None:
        task = asyncio.create_task(too_long())
        await before()
        task.cancel()

    in_sandbox_s: list[float] = []
    report = reported(nothing(), both(), watch)
    shares = {row["cause"]: row["share"] for row in report["rollout"]["causes"]}
    unknown = "began before the capture"
    named = {"tool:sandbox", "tool:search", "environment:start"}
    seconds = {row["cause"]: row["seconds"] for row in report["rollout"]["causes"]}
    assert "unexplained" not in shares
    if watch:
        assert named <= set(shares)
        assert shares.get(unknown, 0) < 0.02
        assert shares["environment:start"] > 0.4
        assert seconds["tool:sandbox"] < in_sandbox_s[0], "as much of it as is in the capture"
    else:
        assert shares[unknown] > 0.7
        assert seconds["tool:search"] > 0.25
