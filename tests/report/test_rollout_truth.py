"""A rollout that runs for real, with a stopwatch of its own: the report finds what the stopwatch says."""

from __future__ import annotations

import asyncio
import threading
import time
from asyncio import Future
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import span, trajectory
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, Manifest, Request, StageSpan
from verl_profiling.report.lanes import Step
from verl_profiling.report.rollout.section import rollout_of
from verl_profiling.report.rows import Rollout
from verl_profiling.timeline.step import Source
from verl_profiling.trajectories.log import OpenLog
from verl_profiling.trajectories.spans import start_log, stop_log

pytestmark = pytest.mark.soak  # what it compares are milliseconds
QUEUED, PREFILL = 0.05, 0.05
BLOCK = 0.4
ONES = 8
SLEEPS = {"environment:start": 0.1, "tool:sleeps": 0.3, "reward": 0.05}


class Simulated:
    """An agent loop whose tools sleep, and an engine that answers after set times, whatever the loop does.

    Attributes:
        truth: Seconds by cause, by the stopwatch.
        requests: What the engine says of its requests.
        total: Seconds of all trajectories.
    """

    def __init__(self) -> None:
        self.truth: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.total = 0.0
        self._blocked = threading.Event()
        self._answered = threading.Semaphore(0)

    async def generate(self, id: str, decode: float) -> None:
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        sent = time.time_ns()

        def engine() -> None:
            marks = [time.time_ns()]
            for wait in (QUEUED, PREFILL, decode):
                time.sleep(wait)
                marks.append(time.time_ns())
            self._blocked.wait(20)  # the loop, before it is answered
            marks[-1] = time.time_ns()
            arrival, scheduled, first, last = marks
            self.requests.append(
                Request(
                    replica=0,
                    id=id,
                    begin_ns=sent,
                    arrival_ns=arrival,
                    scheduled_ns=scheduled,
                    first_token_ns=first,
                    last_token_ns=last,
                    end_ns=last,
                    prompt_tokens=1,
                    response_tokens=1,
                )
            )
            self.truth.update(queued=scheduled - arrival, prefill=first - scheduled, decode=last - first)
            loop.call_soon_threadsafe(answered.set)
            self._answered.release()

        with span("generate", request=id):
            threading.Thread(target=engine).start()
            await answered.wait()
        (done,) = (request for request in self.requests if request.id == id)
        self.truth["loop lag"] += time.time_ns() - done.end_ns

    @asynccontextmanager
    async def watched(self, name: str) -> AsyncIterator[None]:
        begin = time.time_ns()
        with span(name):
            yield
        self.truth[name] += time.time_ns() - begin

    async def sleep(self, name: str) -> None:
        async with self.watched(name):
            await asyncio.sleep(SLEEPS[name])

    @property
    def overslept(self) -> float:
        """Seconds that the sleeps took longer than they should have."""
        return sum(self.truth[name] / 1e9 - ONES * took for name, took in SLEEPS.items())

    async def one(self, number: int) -> None:
        begin = time.time_ns()
        with trajectory(group=f"g{number // 4}", sample=number % 4):
            await self.sleep("environment:start")
            await self.generate(f"r{number}", 0.25 + 0.02 * number)
            await self.sleep("tool:sleeps")
            await self.sleep("reward")
        self.total += (time.time_ns() - begin) / 1e9

    async def long(self, others: Future[Any]) -> None:
        begin = time.time_ns()
        with trajectory(group="long"):
            async with self.watched("tool:sandbox"):  # goes on in the block, and long after it
                await asyncio.sleep(1.5)
                await others
        self.total += (time.time_ns() - begin) / 1e9

    async def blocks(self) -> None:
        begin = time.time_ns()
        with trajectory(group="blocks"):
            async with self.watched("tool:waits"):
                await asyncio.sleep(0.42)
            async with self.watched("tool:blocks"):
                self._blocked.set()
                assert all(self._answered.acquire(timeout=20) for _ in range(ONES))
                time.sleep(BLOCK)
        self.total += (time.time_ns() - begin) / 1e9

    async def run(self) -> None:
        others = asyncio.gather(*(self.one(number) for number in range(ONES)), self.blocks())
        await self.long(others)


@pytest.fixture(scope="module")
def simulated() -> tuple[Simulated, Rollout]:
    """What the stopwatch says, and the section of the report; of a machine that did not stop meanwhile."""
    for _ in range(5):
        found = simulate()
        if found[0].overslept < 0.02 * found[0].total:
            break
    return found


def simulate() -> tuple[Simulated, Rollout]:
    """Run a rollout."""
    simulated, log = Simulated(), OpenLog(10_000)
    begin = time.time_ns()
    start_log(log)
    try:
        asyncio.run(simulated.run())
    finally:
        stop_log(log)
        log.end()
        recorded = log.close("agent_loop_rank0")
    end = time.time_ns()
    engine = CaptureResult(identity=WorkerIdentity(role="rollout", replica=0), requests=simulated.requests)
    manifest = Manifest(
        run_id="simulated",
        capture_id="simulated-1",
        step=1,
        steps=[1],
        begin_ns=begin,
        end_ns=end,
        controller=WorkerIdentity(role="controller"),
        stages=[StageSpan("rollout", begin, end)],
        workers=[engine],
    )
    source = Source(path=Path("log"), lane="agent_loop_rank0", worker="agent_loop_rank0", role="agent_loop")
    section = rollout_of(Step(manifest, []), [(source, recorded)])
    assert section is not None
    return simulated, section[0]


def test_every_cause_is_within_two_percent_of_the_rollout(simulated: tuple[Simulated, Rollout]) -> None:
    """And they add up to the time of all trajectories."""
    truth, rollout = simulated
    found = {row.cause: row.seconds for row in rollout.causes}
    assert rollout.seconds == pytest.approx(truth.total, rel=0.02)
    assert sum(found.values()) == pytest.approx(rollout.seconds)
    expected = {cause: took / 1e9 for cause, took in truth.truth.items()}
    assert expected["loop lag"] > ONES * BLOCK
    for cause in {*expected, *found}:
        assert found.get(cause, 0.0) == pytest.approx(expected.get(cause, 0.0), abs=0.02 * rollout.seconds), (
            cause
        )


def test_the_blocking_tool_is_named_with_its_seconds(simulated: tuple[Simulated, Rollout]) -> None:
    """All that the engine had answered stood still; what ran elsewhere did not."""
    truth, rollout = simulated
    row = max(rollout.blocks, key=lambda row: row.seconds)
    assert row.what == "tool:blocks"
    assert "test_rollout_truth.py" in row.function
    assert row.seconds == pytest.approx(truth.truth["tool:blocks"] / 1e9, abs=0.1)
    assert row.trajectories == ONES
    assert rollout.explained > 0.9
    assert rollout.last is not None
    assert (rollout.last.trajectories, rollout.last.parts[0].cause) == (1, "tool:sandbox")
