"""Loop lag: a loop that is blocked is measured, and who blocked it is named."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from drawn_logs import recorded

from verl_profiling import span, trajectory
from verl_profiling.files.trajectory_log import Block, TrajectoryLog
from verl_profiling.tools.trajectories import OpenLog
from verl_profiling.trajectories.spans import start_log, stop_log

Body = Coroutine[Any, Any, object]


def runners() -> list[Any]:
    without = pytest.mark.skipif(
        importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed"
    )
    return ["asyncio", pytest.param("uvloop", marks=without)]


@pytest.fixture(params=runners())
def run(request: pytest.FixtureRequest) -> Callable[[Body], TrajectoryLog]:
    """Run a coroutine in a loop of its own and return what was recorded."""

    def in_a_loop(body: Body) -> TrajectoryLog:
        if request.param == "uvloop":
            import uvloop

            return recorded(lambda: uvloop.run(body), 10_000)
        return recorded(lambda: asyncio.run(body), 10_000)

    return in_a_loop


def blocking(seconds: float) -> tuple[int, int]:
    """Let nothing else run on this thread; return from when to when (ns).
    Other threads get their turns.
    """
    begin_ns = time.time_ns()
    for _ in range(round(100 * seconds)):
        time.sleep(0.01)
    return begin_ns, time.time_ns()


def seconds(block: Block) -> float:
    return (block.end_ns - block.begin_ns) / 1e9


def test_a_block_names_the_span_and_the_function(run: Callable[[Body], TrajectoryLog]) -> None:
    """The task that blocks is told apart from those that wait."""
    blocked: list[tuple[int, int]] = []

    async def waits() -> None:
        with trajectory(group="waits"), span("tool:waits"):
            await asyncio.sleep(0.5)

    async def blocks() -> None:
        with trajectory(group="blocks"), span("tool:fetch"):
            await asyncio.sleep(0.05)
            blocked.append(blocking(0.3))  # after an await: no span begins or ends here
            await asyncio.sleep(0.01)

    async def body() -> None:
        await asyncio.gather(waits(), asyncio.create_task(blocks(), name="the culprit"))

    log = run(body())
    [(begin_ns, end_ns)] = blocked
    (block,) = (
        block for block in log.blocks if block.begin_ns < end_ns and block.end_ns > begin_ns
    )
    fetch = log.spans[block.span]
    assert fetch.name == "tool:fetch"
    assert block.task == "the culprit"
    assert "blocking (test_loop_lag.py:" in block.function
    assert seconds(block) > 0.2
    assert fetch.begin_ns <= block.begin_ns < end_ns <= block.end_ns <= fetch.end_ns


def test_a_short_block_at_a_span_is_exact(run: Callable[[Body], TrajectoryLog]) -> None:
    """60 ms inside a span that begins and ends in one go."""
    rounds: list[tuple[int, int]] = []
    blocked: list[tuple[int, int]] = []

    async def body() -> None:
        for _ in range(3):
            begin_ns = time.time_ns()
            with span("tool:parse"):
                blocked.append(blocking(0.06))
            await asyncio.sleep(0.03)
            rounds.append((begin_ns, time.time_ns()))

    log = run(body())
    for (from_ns, to_ns), (begin_ns, end_ns) in zip(blocked, rounds, strict=True):
        (block,) = (
            block for block in log.blocks if block.begin_ns < to_ns and block.end_ns > from_ns
        )
        assert log.spans[block.span].name == "tool:parse"
        assert seconds(block) > 0.059
        assert begin_ns <= block.begin_ns < block.end_ns <= end_ns


def test_each_block_of_50_ms_is_recorded_whole() -> None:
    """24 drawn blocks of 50 to 80 ms at a span, at drawn times beside other tasks."""
    drawn, blocked = random.Random(4), list[tuple[int, int]]()

    async def others() -> None:
        with trajectory(group="others"):
            while len(blocked) < 24:
                with span("tool:search"):
                    await asyncio.sleep(drawn.uniform(0.01, 0.06))

    async def blocks() -> None:
        for _ in range(24):
            with span("tool:parse"):
                begin_ns = time.time_ns()
                time.sleep(drawn.uniform(0.05, 0.08))
                blocked.append((begin_ns, time.time_ns()))
            await asyncio.sleep(drawn.uniform(0.001, 0.09))

    async def body() -> None:
        await asyncio.gather(blocks(), others(), others())

    log = recorded(lambda: asyncio.run(body()), 10_000)
    for begin_ns, end_ns in blocked:
        (block,) = (
            block for block in log.blocks if block.begin_ns < end_ns and block.end_ns > begin_ns
        )
        assert log.spans[block.span].name == "tool:parse"
        assert block.begin_ns <= begin_ns + 1e6
        assert block.end_ns >= end_ns


STOPPED = """
import asyncio, random, subprocess, time
from drawn_logs import recorded
from verl_profiling import span
from verl_profiling.trajectories.loop_lag import NO_CPU
async def body():
    with span("tool:innocent"):
        await asyncio.sleep(random.Random(SEED).uniform(0, 0.03))
        begin = time.monotonic()
        subprocess.Popen(["sh", "-c", "sleep 0.04; kill -STOP $PPID; sleep 0.6; kill -CONT $PPID"])
        while time.monotonic() < begin + 0.3:
            pass
    await asyncio.sleep(0.05)
print({block.function for block in recorded(lambda: asyncio.run(body()), 100).blocks} - {NO_CPU})
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_loop_without_cpu_is_blocked_by_nobody(seed: int) -> None:
    """The process is stopped while a call runs that is short by itself."""
    program = STOPPED.replace("SEED", str(seed))
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "{''}", found.stdout


STARVED = """
import asyncio, os, subprocess, sys, time
from drawn_logs import recorded
from verl_profiling import span
from verl_profiling.trajectories.loop_lag import NO_CPU
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
time.sleep(1)
async def body():
    with span("tool:innocent"):
        begin = time.thread_time()
        while time.thread_time() < begin + 0.1:
            pass
    await asyncio.sleep(0.05)
try:
    print(NO_CPU in {block.function for block in recorded(lambda: asyncio.run(body()), 100).blocks})
finally:
    [other.kill() for other in others]
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_a_loop_whose_cores_others_use_lacks_cpu() -> None:
    """Twelve processes compute on its only core, so what is said is no task."""
    found = subprocess.run(
        [sys.executable, "-c", STARVED],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "True"


def test_tasks_that_block_one_after_another_share_the_time(
    run: Callable[[Body], TrajectoryLog],
) -> None:
    """A loop that does not come to itself for long because several tasks block it in a row."""

    async def blocks(name: str) -> None:
        with span(name):
            await asyncio.sleep(0.05)
            blocking(0.3)

    async def body() -> None:
        await asyncio.gather(blocks("tool:a"), blocks("tool:b"))
        await asyncio.sleep(0.05)

    begin_s = time.monotonic()
    log = run(body())
    took_s = time.monotonic() - begin_s
    share = {"tool:a": 0.0, "tool:b": 0.0}
    for block in log.blocks:
        share[log.spans[block.span].name] += seconds(block)
    assert all(total > 0.2 for total in share.values()), log.blocks
    assert sum(share.values()) < took_s, log.blocks


def test_a_loop_that_waits_is_not_blocked(run: Callable[[Body], TrajectoryLog]) -> None:
    """Neither is one that has much to do in small parts, nor one that works in a thread."""

    async def body() -> None:
        with span("waits"):
            await asyncio.sleep(0.1)
        with span("busy"):
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                await asyncio.sleep(0)
        with span("thread"):
            await asyncio.to_thread(time.sleep, 0.1)

    tries = (run(body()).blocks for _ in range(10))
    assert any(blocks == [] for blocks in tries), (
        "a machine that is busy may stop the loop now and then"
    )


def test_a_block_that_lasts_when_recording_ends_is_kept() -> None:
    log = OpenLog(100)
    start_log(log)
    begun, go_on = threading.Event(), threading.Event()

    async def body() -> None:
        with span("tool:hangs"):
            begun.set()
            go_on.wait(20)

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    begun.wait(20)
    time.sleep(0.2)
    stop_log(log)
    log.end()
    found = log.close("here")
    go_on.set()
    thread.join()
    (block,) = found.blocks
    assert found.spans[block.span].name == "tool:hangs"
    assert seconds(block) > 0.15
