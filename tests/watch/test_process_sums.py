"""The stages that a process keeps for the watch: bounded, and none is lost that should be there."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest
from example_loops import settings

from verl_profiling import clock, stage
from verl_profiling.capture.session import Session
from verl_profiling.files.step_summary import RankUse
from verl_profiling.identity import WorkerIdentity
from verl_profiling.watch.process_sums import WatchQuestion

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
    """A task that begins inside of a stage is inside of it,
    and on its own once the stage has ended.
    """
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


def test_a_stage_that_ends_at_the_end_of_a_step_by_another_clock_has_ended_in_it(
    watched: Session,
) -> None:
    """A hundredth of it is no part of the next step; more is, and goes on with the step's end."""
    with stage("update"):
        time.sleep(0.02)
    [use] = watched.read_watch(ACTOR, question()).uses()
    [(_, begin_ns, end_ns, took_ns)] = use.each_run()
    for rest_ns, ends_ns in ((took_ns // 200, end_ns), (took_ns // 2, end_ns - took_ns // 2)):
        border_ns = end_ns - rest_ns
        steps = [(begin_ns - S, border_ns), (border_ns, end_ns + S)]
        first, second = watched.read_watch(ACTOR, question(*steps)).uses()
        assert [end_ns for _, _, end_ns, _ in first.each_run()] == [ends_ns]
        assert bool(second.stages) == (ends_ns != end_ns)


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
