"""Trajectories and spans: each ends right, and belongs to the task that began it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import random
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_logs import only, recorded

from verl_profiling import span, trajectory, trajectory_status
from verl_profiling.files.trajectory_log import (
    SpanRecord,
    TrajectoryLog,
    read_log,
)
from verl_profiling.testing import record_step
from verl_profiling.trajectories import count

MOST = 1_000


def ran(coroutine: Any, most: int = MOST) -> TrajectoryLog:
    return recorded(lambda: asyncio.run(coroutine), most)


def named(log: TrajectoryLog, name: str) -> SpanRecord:
    (found,) = (found for found in log.spans if found.name == name)
    return found


def test_counts_are_kept_while_something_records() -> None:
    """Each with its time; none outside of a recording, and no more than spans are kept."""
    count("queue", 1)

    async def body() -> None:
        for length in range(MOST + 2):
            count("queue", length)

    log = ran(body())
    assert [found.value for found in log.counts] == list(range(MOST))
    assert {found.name for found in log.counts} == {"queue"}
    assert all(log.begin_ns <= found.at_ns <= log.end_ns for found in log.counts)


def test_spans_of_concurrent_tasks_do_not_mix() -> None:
    """Each has the trajectory and the parent of its own task."""

    async def one(number: int) -> None:
        async with trajectory(group=f"g{number}", sample=number) as t:
            async with span(f"outer{number}"):
                await asyncio.sleep(0.001)
                with span(f"inner{number}", request=f"r{number}"):
                    await asyncio.sleep(0.001)
            t.add(turns=number)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(5)))

    log = ran(all_of_them())
    assert [found.status for found in log.trajectories] == ["done"] * 5
    for number in range(5):
        owner = log.trajectories[number]
        outer, inner = named(log, f"outer{number}"), named(log, f"inner{number}")
        assert (owner.group, owner.sample, owner.facts) == (f"g{number}", number, {"turns": number})
        assert (outer.trajectory, outer.parent) == (owner.id, -1)
        assert (inner.trajectory, inner.parent, inner.request) == (owner.id, outer.id, f"r{number}")
        assert owner.begin_ns <= outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns
        assert owner.loop == outer.loop == 0


def test_threads_that_are_handed_the_context_keep_it() -> None:
    def tool(name: str) -> None:
        with span(name):
            pass

    async def one() -> None:
        async with trajectory(group="g"), span("outer"):
            await asyncio.to_thread(tool, "to_thread")
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as pool:
                await loop.run_in_executor(pool, contextvars.copy_context().run, tool, "carried")
            thread = threading.Thread(target=tool, args=("bare",))
            thread.start()
            thread.join()

    log = ran(one())
    outer = named(log, "outer")
    for name in ("to_thread", "carried"):
        found = named(log, name)
        assert (found.trajectory, found.parent, found.loop) == (0, outer.id, -1)
        assert found.thread != outer.thread
    assert named(log, "bare").trajectory == -1


NOTED = SyntaxError("no code", ("tool.py", 1, 1, "a b"))
NOTED.__notes__ = ["a note"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("no such tool"), "failed", "ValueError: no such tool"),
        (asyncio.CancelledError(), "cancelled", ""),
        (concurrent.futures.CancelledError(), "cancelled", ""),
        (GeneratorExit(), "abandoned", ""),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (NOTED, "failed", "SyntaxError: no code"),
    ],
)
def test_what_leaves_a_trajectory_is_its_fate(error: BaseException, status: str, text: str) -> None:
    """The exception passes through, and every span that it left is marked."""

    def body() -> None:
        with pytest.raises(type(error)), trajectory(group="g"), span("outer"), span("inner"):
            raise error

    log = recorded(body)
    assert (only(log).status, only(log).error) == (status, text)
    assert [(found.failed, found.status) for found in log.spans] == [
        (status == "failed", "" if status == "failed" else status)
    ] * 2


def test_a_span_ends_as_a_trajectory_in_its_place() -> None:
    """Streams that are closed early, cancelled calls and errors, drawn:
    span and trajectory agree in each.
    """
    chance = random.Random(41)
    ways = [chance.choice(("close", "cancel", "raise", "read")) for _ in range(24)]

    async def stream(number: int, items: int) -> AsyncIterator[int]:
        async with trajectory(group=f"g{number}"), span(f"span{number}"):
            for item in range(items):
                await asyncio.sleep(0)
                yield item
            if ways[number] == "raise":
                raise ValueError("no token")
            if ways[number] == "cancel":
                await asyncio.sleep(60)

    async def one(number: int) -> None:
        items = chance.randint(1, 5)
        made = stream(number, items)
        last = chance.randrange(items)
        async for item in made:
            if ways[number] == "close" and item == last:
                break
        await made.aclose()  # type: ignore[attr-defined]

    async def body() -> None:
        tasks = [asyncio.create_task(one(number)) for number in range(len(ways))]
        await asyncio.sleep(0.05)
        for task, way in zip(tasks, ways, strict=True):
            if way == "cancel":
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    log = ran(body())
    right = {"close": "abandoned", "cancel": "cancelled", "raise": "failed", "read": "done"}
    for number, way in enumerate(ways):
        [owner] = (found for found in log.trajectories if found.group == f"g{number}")
        inner = named(log, f"span{number}")
        assert owner.status == right[way]
        assert (inner.failed, inner.status or "done") == (
            way == "raise",
            right[way].replace("failed", "done"),
        )


def test_the_loop_says_the_fate() -> None:
    """Before the end, whatever leaves it; and afterwards, for a sample or for a group."""

    def body() -> None:
        with suppress(ValueError), trajectory(group=7, sample="a") as t:
            t.status = "aborted"
            raise ValueError("late")
        trajectory_status(7, "filtered")
        trajectory_status("7", "reused", sample="a")

    log = recorded(body)
    assert (only(log).group, only(log).status) == ("7", "aborted")
    assert [(found.group, found.sample, found.status) for found in log.statuses] == [
        ("7", None, "filtered"),
        ("7", "a", "reused"),
    ]


def test_a_span_that_outlives_its_trajectory_ends_with_it() -> None:
    """A task that it left behind goes on, and its span does not."""

    async def left_behind(begun: asyncio.Event) -> None:
        with span("background"):
            begun.set()
            await asyncio.sleep(0.05)
        with span("later"):
            pass

    async def one() -> None:
        begun = asyncio.Event()
        with trajectory(group="g"):
            task = asyncio.create_task(left_behind(begun))
            await begun.wait()
        await task

    log = ran(one())
    assert named(log, "background").end_ns == only(log).end_ns
    assert named(log, "background").open
    assert not named(log, "background").failed
    assert (named(log, "later").trajectory, named(log, "later").parent) == (-1, -1)


def test_a_generator_may_end_whenever_it_likes() -> None:
    """One that is finished late, or never, does not become the parent of what comes after it."""

    def tokens() -> Iterator[int]:
        with span("generator"):
            yield 1
            yield 2

    async def stream() -> AsyncIterator[int]:
        async with span("async generator"):
            yield 1
            yield 2

    async def body() -> None:
        kept = tokens()
        with span("first"):
            next(kept)
        with span("second"):
            pass
        kept.close()
        other = stream()
        await anext(other)
        await asyncio.create_task(other.aclose())  # type: ignore[attr-defined]
        with span("third"):
            pass

    log = ran(body())
    assert named(log, "generator").parent == named(log, "first").id
    assert named(log, "second").parent == -1
    assert named(log, "third").parent == -1
    assert all(found.end_ns >= found.begin_ns for found in log.spans)


def test_what_is_open_when_recording_ends_is_kept() -> None:
    """The trajectory is still running, and its span ends with the log;
    the next log shows it again.
    """
    with trajectory(group="long") as t:
        inside = []

        def body() -> None:
            inside.append(span("tool:slow"))
            inside[0].__enter__()

        first = recorded(body)
        assert only(first).status == "running"
        assert only(first).end_ns == first.spans[0].end_ns == first.end_ns
        assert first.spans[0].open
        assert not first.spans[0].failed
        inside[0].__exit__(None, None, None)

        def later() -> None:
            with span("tool:quick"):
                pass

        second = recorded(later)
        assert only(second).begin_ns == t.begin_ns < second.begin_ns
        assert (named(second, "tool:quick").trajectory, named(second, "tool:quick").parent) == (
            0,
            -1,
        )


def test_nothing_is_kept_while_nothing_records() -> None:
    """Everything that may be done with a span may be done with nothing."""
    with span("idle", request="r", x=1) as idle:
        idle.request = "other"
        idle.add(y=2)
    assert idle is span("another")

    async def body() -> None:
        async with span("idle") as found:
            assert found is idle

    asyncio.run(body())
    assert recorded(lambda: idle.__enter__()).spans == []


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_facts_of_any_kind_are_kept_as_far_as_json_has_them(tmp_path: Path) -> None:
    """Huge, hostile and foreign values neither fail nor fill the memory; the file can be read."""
    facts: dict[str, Any] = {
        "text": "x" * 10**6,
        "lone": "\ud800",
        "whole": 1 << 80,
        "longer than Python prints": 10**5000,
        "nan": float("nan"),
        "list": [1, 2],
        "own": Unprintable(),
        "none": None,
        "name": "a fact of that name",
        "self": 1,
        **{f"n{number}": number for number in range(100)},
    }
    with record_step({"enable": True, "tool": "trajectories"}, tmp_path, role="agent_loop") as step:
        with (
            trajectory(Unprintable(), sample=None, **facts) as t,
            span("\ud800" + "n" * 10**5, **facts),
        ):
            t.add(**facts)
        with span(3):  # type: ignore[arg-type]
            pass
    assert step.result.status == "ok"
    log = read_log(step.path)
    kept = log.trajectories[0].facts
    assert (len(kept), kept["text"], kept["whole"]) == (50, "x" * 200, str(1 << 80))
    assert (kept["lone"], kept["nan"], kept["list"], kept["own"]) == (
        "?",
        None,
        "[1, 2]",
        "Unprintable",
    )
    assert log.trajectories[0].group == "Unprintable"
    assert len(log.spans[0].name) == 200
    assert log.spans[1].name == "3"
    assert step.path.stat().st_size < 10_000


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """As a sample, in its status afterwards, and as a counter;
    a long group still finds its trajectories.
    """
    group = "g" * 300
    with record_step({"enable": True, "tool": "trajectories"}, tmp_path, role="agent_loop") as step:
        with trajectory(group, sample=np.int64(3), validate=np.True_, size=Fraction(10**400)):  # type: ignore[arg-type]
            for value in (np.float32(2.5), float("nan"), 10**400, None, "text"):
                count("queue", value)  # type: ignore[arg-type]
        trajectory_status(group, "filtered", sample=np.int64(3))  # type: ignore[arg-type]
    log = read_log(step.path)
    [one], [status] = log.trajectories, log.statuses
    assert (one.group, one.sample) == (status.group, status.sample) == ("g" * 200, 3)
    assert one.facts == {"validate": True, "size": "1" + 199 * "0"}
    assert [counted.value for counted in log.counts] == [2.5]
