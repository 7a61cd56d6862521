"""The stages that a process keeps for the watch: bounded, and none is lost that should be there."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from example_loops import settings

from verl_profiling import clock, stage
from verl_profiling.capture.session import Session
from verl_profiling.identity import WorkerIdentity
from verl_profiling.step_summary import RankUse
from verl_profiling.watch.sums import WatchQuestion, WatchReading
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

ACTOR, S = WorkerIdentity(role="actor"), 1_000_000_000
WATCHED = {"enable": True, "tool": "spans", "watch": {"enable": True, "steps": 10}}


def question(*steps: tuple[int, int]) -> WatchQuestion:
    """Return a question about some steps; by default about one that covers all times."""
    return WatchQuestion(steps=list(steps or [(0, 1 << 62)]), offsets_ns={clock.domain(): 0})


def names(session: Session) -> list[str]:
    """Return the names of what is kept, in order of the begins."""
    use: RankUse = session.read_watch(ACTOR, question()).uses()[-1]
    return use.stages.split("\n")


@pytest.fixture
def watched(session: Session) -> Session:
    """A process whose stages are kept."""
    session.register(settings(**WATCHED), ACTOR)
    return session


def test_stages_one_after_another_are_all_kept(watched: Session) -> None:
    """Also after one that raised, with timers inside of it that never ended."""

    def work() -> None:
        stage("timer").__enter__()
        raise ValueError("loss")

    with pytest.raises(ValueError, match="loss"), stage("ref"):
        work()
    with stage("update"):
        pass
    stage("never begun").__exit__(None, None, None)
    with stage("values"):
        pass
    assert names(watched) == ["ref", "update", "values"]


def test_threads_and_tasks_have_outermost_stages_of_their_own(watched: Session) -> None:
    """A task that begins inside of a stage is inside of it, and on its own once the stage has ended."""
    entered, leave = threading.Event(), threading.Event()

    def on_thread() -> None:
        with stage("thread"):
            entered.set()
            assert leave.wait(60)

    async def child(started: asyncio.Event, parent_ended: asyncio.Event) -> None:
        with stage("inside"):
            started.set()
            await parent_ended.wait()
        with stage("after"):
            pass

    async def loop() -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        with stage("parent"):
            task = asyncio.create_task(child(started, ended))
            await started.wait()
        ended.set()
        await task

    thread = threading.Thread(target=on_thread)
    thread.start()
    assert entered.wait(60)
    with stage("main"):
        pass
    asyncio.run(loop())
    leave.set()
    thread.join()
    assert sorted(names(watched)) == ["after", "main", "parent", "thread"]


def test_many_stages_need_the_memory_that_is_set_aside(session: Session) -> None:
    """The last ones are kept; nothing grows with their number, nor with the number of names."""
    session.register(settings(tool="spans", watch={"enable": True, "steps": 60}), ACTOR)
    update = stage("update")

    def run(times: int) -> None:
        for _ in range(times):
            with update:
                pass

    run(2_000)
    before = sys.getallocatedblocks()
    run(100_000)
    assert sys.getallocatedblocks() - before < 100
    for number in range(2_000):
        with stage(f"{number}" * 1_000):
            pass
    assert len(names(session)) == 257, "those after so many names are one"
    assert all(len(name) <= 200 for name in names(session))


def test_a_server_with_an_engine_of_its_own_tells_when_it_had_requests(session: Session) -> None:
    """Between captures, too; without the watch nothing is counted."""

    async def serve(config: object) -> WatchReading | None:
        server, log = RolloutCaptureMixin(), RequestLog()
        server.init_capture(config, requests=log, replica=1)  # type: ignore[arg-type]
        for _ in range(2):
            with log.open(id="a"), log.open(id="b"):
                await asyncio.sleep(0.002)
        assert log.begin(None) is None
        assert log.end() == []
        return server.read_watch(question())

    assert asyncio.run(serve({**WATCHED, "watch": {"enable": False}})) is None
    session.reset()
    reading = asyncio.run(serve(WATCHED))
    assert reading.identity.lane() == "rollout1_rank0"
    [use] = reading.uses()
    took_ns = [(name, took_ns) for name, _, _, took_ns in use.each_run()]
    assert {name for name, _ in took_ns} == {"generate"}
    assert 2 * 2_000_000 <= sum(ns for _, ns in took_ns) < 2 * 10**9
    [requests] = use.spans
    assert (requests.name, requests.runs) == ("generate", 4)
    assert 4 * 2_000_000 <= requests.duration_ns < 4 * 10**9


def test_a_stage_is_in_each_step_that_it_reaches_into(session: Session) -> None:
    """With its part; an open one ends at the step's end; what lies between steps is in none."""
    now_ns = 1_700_000_000 * S
    first, second, third = (
        (now_ns + begin * S, now_ns + end * S) for begin, end in ((10, 20), (21, 30), (40, 50))
    )
    with clock.replaced(lambda: now_ns, clock.domain()):
        session.register(settings(**WATCHED), ACTOR)
        for name, begin_ns, end_ns in (
            ("rollout", first[1] - 4 * S, second[0] + 3 * S),
            ("validate", second[1] + 1, third[0] - 1),
            ("generate", third[1] - 5 * S, third[1] + S),
        ):
            now_ns = begin_ns
            opened = stage(name)
            opened.__enter__()
            now_ns = end_ns
            if name != "generate":
                opened.__exit__(None, None, None)
        found = [
            [(name, took_ns) for name, _, _, took_ns in one.each_run()]
            for one in session.read_watch(ACTOR, question(first, second, third)).uses()
        ]
        assert found == [[("rollout", 4 * S)], [("rollout", 3 * S)], [("generate", 5 * S)]]
        opened.__exit__(None, None, None)
