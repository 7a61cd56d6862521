"""The stages that a process keeps for the watch: bounded, and none is lost that should be there."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import pytest

from verl_profiling import ProfilingConfig, clock, stage
from verl_profiling.capture.session import Session
from verl_profiling.capture.stage import SpanLog, Stage
from verl_profiling.identity import WorkerIdentity
from verl_profiling.step_summary import RankUse, StageUse
from verl_profiling.watch.sums import Begun, StageSums, WatchQuestion, WatchReading
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

QUESTION = WatchQuestion(steps=[(0, 1 << 62)], offsets_ns={clock.domain(): 0})
WATCHED = {"enable": True, "tool": "spans", "watch": {"enable": True, "steps": 10}}


WHO = RankUse(lane="actor_rank0", role="actor")


class Marked:
    """An owner of stages that are kept for the watch."""

    def __init__(self, stages: int = 100) -> None:
        self.sums = StageSums(stages)
        self.sink = SpanLog(self, self.sums, None)

    def stage(self, name: str) -> Stage:
        """Return a stage of it."""
        return Stage(self, name)

    def of_steps(self, *steps: tuple[int, int]) -> list[list[StageUse]]:
        """Return the stages of some steps."""
        return [use.stages if use is not None else [] for use in self.sums.of_steps(WHO, steps)]

    def kept(self) -> list[StageUse]:
        """Return all that is kept, as one step."""
        return self.of_steps((0, 1 << 62))[0]

    def names(self) -> list[str]:
        """Return the names of what is kept, in order of the begins, each as often as it ran."""
        return [use.name for use in self.kept() for _ in range(use.runs)]


@pytest.fixture
def marked() -> Marked:
    """Room for a hundred stages."""
    return Marked()


def names(reading: WatchReading) -> list[str]:
    """Return the names of the stages that a process answers with, each as often as it ran."""
    [use] = reading.uses()
    return [stage.name for stage in use.stages for _ in range(stage.runs)]


def test_stages_one_after_another_are_all_kept(marked: Marked) -> None:
    """Also after one that raised, with timers inside of it that never ended."""

    def work() -> None:
        marked.stage("timer").__enter__()
        raise ValueError("loss")

    with pytest.raises(ValueError, match="loss"), marked.stage("ref"):
        work()
    with marked.stage("update"):
        pass
    marked.stage("never begun").__exit__(None, None, None)
    with marked.stage("values"):
        pass
    assert marked.names() == ["ref", "update", "values"]


def test_threads_and_tasks_have_outermost_stages_of_their_own(marked: Marked) -> None:
    """A task that begins inside of a stage is inside of it, and on its own once the stage has ended."""
    entered, leave = threading.Event(), threading.Event()

    def on_thread() -> None:
        with marked.stage("thread"):
            entered.set()
            assert leave.wait(60)

    async def child(started: asyncio.Event, parent_ended: asyncio.Event) -> None:
        with marked.stage("inside"):
            started.set()
            await parent_ended.wait()
        with marked.stage("after"):
            pass

    async def loop() -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        with marked.stage("parent"):
            task = asyncio.create_task(child(started, ended))
            await started.wait()
        ended.set()
        await task

    thread = threading.Thread(target=on_thread)
    thread.start()
    assert entered.wait(60)
    with marked.stage("main"):
        pass
    asyncio.run(loop())
    leave.set()
    thread.join()
    assert sorted(marked.names()) == ["after", "main", "parent", "thread"]


def test_two_owners_in_a_process_do_not_hide_each_others_stages(marked: Marked) -> None:
    """The loop's stage around the call of a worker in its process is not around the worker's own."""
    worker = Marked()
    with marked.stage("update"), worker.stage("update"), worker.stage("mini_batch"):
        pass
    assert (marked.names(), worker.names()) == (["update"], ["update"])


def test_many_stages_need_the_memory_that_is_set_aside() -> None:
    """The last ones are kept; nothing grows with their number, nor with the number of names."""
    marked = Marked(1_000)
    update = marked.stage("update")

    def run(times: int) -> None:
        for _ in range(times):
            with update:
                pass

    run(2_000)
    before = sys.getallocatedblocks()
    run(100_000)
    assert sys.getallocatedblocks() - before < 100
    for number in range(2_000):
        with marked.stage(f"{number}" * 1_000):
            pass
    assert len(marked.kept()) == 257, "those after so many names are one"
    assert all(len(use.name) <= 200 for use in marked.kept())


def test_a_fork_keeps_nothing_of_its_parent(session: Session) -> None:
    """The child inherits the memory, and is another process."""
    session.register(ProfilingConfig.from_any(WATCHED), WorkerIdentity(role="actor"))
    with stage("parent"):
        pass
    child = os.fork()
    if not child:
        os._exit(0 if session.sums is None and session.sink is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert session.sums is not None


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
        return server.read_watch(QUESTION)

    assert asyncio.run(serve({**WATCHED, "watch": {"enable": False}})) is None
    session.reset()
    reading = asyncio.run(serve(WATCHED))
    assert reading.identity.lane() == "rollout1_rank0"
    assert names(reading) == ["generate", "generate"]
    [[requests]] = [use.spans for use in reading.uses()]
    assert (requests.name, requests.runs) == ("generate", 4)
    assert 4 * 2_000_000 <= requests.duration_ns < 4 * 10**9


def test_a_stage_is_in_each_step_that_it_reaches_into(marked: Marked) -> None:
    """With its part; an open one ends at the step's end; what lies between steps is in none."""
    s = 1_000_000_000
    now_ns = time.time_ns() + 60 * s
    steps = [(now_ns - 30 * s, now_ns - 20 * s), (now_ns - 19 * s, now_ns - 10 * s)]
    marked.sums.end(Begun("rollout", now_ns - 24 * s), now_ns - 16 * s)
    marked.sums.end(Begun("validate", now_ns - 20 * s + 1), now_ns - 19 * s - 1)
    first, second = marked.of_steps(*steps)
    assert [(use.name, use.duration_ns) for use in first] == [("rollout", 4 * s)]
    assert [(use.name, use.duration_ns) for use in second] == [("rollout", 3 * s)]
    open_stage = marked.sink.begin("generate")
    step = (open_stage.begin_ns - 1000, open_stage.begin_ns + 1000)
    time.sleep(0.01)
    [[generate]] = marked.of_steps(step)
    assert (generate.name, generate.begin_ns) == ("generate", open_stage.begin_ns)
