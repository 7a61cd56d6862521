"""The ring of a process: what it keeps, and that it neither grows nor loses what it should not."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from verl_profiling import ProfilingConfig, stage
from verl_profiling.capture.session import Session
from verl_profiling.capture.stage import Stage
from verl_profiling.identity import WorkerIdentity
from verl_profiling.testing import record_step, shifted_clock
from verl_profiling.watch.busy import Busy
from verl_profiling.watch.memory import process_memory
from verl_profiling.watch.reading import EndedStage, WatchReading, ended_stages, read_ring
from verl_profiling.watch.ring import MAX_NAMES, OTHERS, SLOT, StageRing
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

WATCHED = {"enable": True, "tool": "spans", "watch": {"enable": True, "steps": 10}}


class Marked:
    """An owner of stages whose receiver is a ring."""

    def __init__(self, stages: int = 100) -> None:
        self.sink = StageRing(stages)

    def stage(self, name: str) -> Stage:
        """Return a stage of it."""
        return Stage(self, name)

    def kept(self, since_ns: int | None = 0) -> list[EndedStage]:
        """Return what the ring tells."""
        return list(ended_stages(*self.sink.read(since_ns)))

    def names(self) -> list[str]:
        """Return the names of what is kept."""
        return [ended.name for ended in self.kept()]


@pytest.fixture
def marked() -> Marked:
    """A ring for a hundred stages."""
    return Marked()


def test_an_outermost_stage_is_kept_with_its_begin_and_duration(marked: Marked) -> None:
    """By the clock of the process; what is inside of it is not kept, whatever its name."""
    before = time.time_ns()
    with marked.stage("update_actor"):
        with marked.stage("micro_batch"), marked.stage("update_actor"):
            time.sleep(0.002)
        with marked.stage("micro_batch"):
            pass
    after = time.time_ns()
    [ended] = marked.kept()
    assert (ended.number, ended.name) == (1, "update_actor")
    assert before <= ended.begin_ns <= ended.begin_ns + ended.duration_ns <= after
    assert ended.duration_ns >= 2_000_000


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
            assert leave.wait(5)

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
    assert entered.wait(5)
    with marked.stage("main"):
        pass
    asyncio.run(loop())
    leave.set()
    thread.join()
    assert marked.names() == ["main", "parent", "after", "thread"]


def test_a_stage_may_end_in_another_task_than_it_began_in(marked: Marked) -> None:
    """As a rollout does whose begin and end are told by different tasks."""

    async def loop() -> None:
        async def begin() -> object:
            return marked.sink.begin("rollout")

        rollout = await asyncio.create_task(begin())
        with marked.stage("beside"):
            pass
        marked.sink.end_stage(rollout)  # type: ignore[arg-type]
        marked.sink.end_stage(rollout)  # type: ignore[arg-type]

    asyncio.run(loop())
    assert marked.names() == ["beside", "rollout"]


def test_two_rings_of_a_process_do_not_hide_each_others_stages(marked: Marked) -> None:
    """The loop's stage around the call of a worker in its process is not around the worker's own."""
    worker = Marked()
    with marked.stage("update"), worker.stage("update"), worker.stage("mini_batch"):
        pass
    assert (marked.names(), worker.names()) == (["update"], ["update"])


def test_a_million_stages_need_the_memory_that_is_set_aside() -> None:
    """The ring keeps the last ones; nothing grows with their number, nor with the number of names."""
    marked = Marked(1_000)
    update = marked.stage("update")

    def run(times: int) -> None:
        for _ in range(times):
            with update:
                pass

    run(2_000)
    before = sys.getallocatedblocks()
    run(1_000_000)
    assert sys.getallocatedblocks() - before < 100
    tracemalloc.start()
    run(3_000)
    for number in range(2_000):
        with marked.stage(f"{number}" * 10_000):
            pass
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after < 200_000, "the names that are kept"
    assert peak < 400_000
    kept = marked.kept()
    assert [ended.number for ended in kept] == list(range(1_006_001, 1_007_001))
    assert OTHERS in {ended.name for ended in kept}
    assert len(marked.sink.read(0)[0]) == MAX_NAMES + 1


def test_a_reading_has_what_ended_since_and_nothing_twice(marked: Marked) -> None:
    """Without a time it is what was not told yet; with one, what ended since, and a second before it."""
    with marked.stage("a"):
        pass
    [first] = marked.kept(None)
    assert first.name == "a"
    assert marked.kept(None) == []
    with marked.stage("b"):
        pass
    assert [ended.name for ended in marked.kept(None)] == ["b"]
    ended_ns = first.begin_ns + first.duration_ns
    assert [ended.name for ended in marked.kept(ended_ns + 900_000_000)] == ["a", "b"]
    assert marked.kept(time.time_ns() + 10**10) == []


def test_threads_lose_no_stage_of_each_other() -> None:
    """Eight of them write and one reads; every stage has a number of its own, and is told once."""
    marked = Marked(10_000)
    told: list[EndedStage] = []

    def work(name: str) -> None:
        for _ in range(500):
            with marked.stage(name):
                pass

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        told += marked.kept(0)
    assert sorted(ended.number for ended in marked.kept()) == list(range(1, 4_001))
    assert {ended.name for ended in told} <= {f"t{number}" for number in range(8)}
    assert all(0 <= ended.duration_ns < 10**10 for ended in told)


def test_a_full_ring_is_read_in_order_while_stages_end() -> None:
    """The place of a stage may get a later one before it is read; that one is told in its turn."""
    ring, ends = StageRing(1_000, lambda: (0, 0)), threading.Event()

    def work() -> None:
        while not ends.is_set():
            ring.add("update", 0, time.time_ns())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        read = [[ended.number for ended in ended_stages(*ring.read(0))] for _ in range(200)]
    finally:
        sys.setswitchinterval(before)
        ends.set()
        thread.join()
    assert all(earlier < later for numbers in read for earlier, later in pairwise(numbers))


def test_memory_is_read_for_a_thousandth_of_the_time() -> None:
    """What a read took says when the next one is due; a clock that is set back does not put it off."""

    def memory() -> tuple[int, int]:
        begin_ns = time.thread_time_ns()
        while time.thread_time_ns() < begin_ns + 1_000_000:
            pass
        return 200, 100

    marked = Marked()
    marked.sink = StageRing(100, memory)
    for end_s in (10, 10.1, 10.5, 13, 5, 5.1):
        marked.sink.add("update", 0, int(end_s * 1e9))
    known = [(stage.peak_bytes, stage.held_bytes) for stage in marked.kept()]
    assert known == [(200, 100), (0, 0), (0, 0), (200, 100), (200, 100), (0, 0)]


def test_memory_is_read_after_the_same_stage_where_stages_are_quick() -> None:
    """What is held after two stages of a step differs; after long ones it is read each time."""

    def memory() -> tuple[int, int]:
        begin_ns = time.thread_time_ns()
        while time.thread_time_ns() < begin_ns + 1_000_000:
            pass
        return 200, 100

    for scale, expected in ((1, ["update", "update", "update"]), (100, ["update", "save"] * 3)):
        marked = Marked()
        marked.sink = StageRing(100, memory)
        for step in range(3):
            marked.sink.add("update", 0, int(2e9 * scale * (step + 10)))
            marked.sink.add("save", 0, int(2e9 * scale * (step + 10.8)))
        assert [stage.name for stage in marked.kept() if stage.held_bytes] == expected


def test_memory_of_the_host_is_that_of_the_process() -> None:
    """Where no device is used, it is the process's own resident memory and the kernel's mark of it."""
    peak, held = process_memory()
    assert 1_000_000 < held <= peak


def test_a_clock_that_is_set_back_makes_no_negative_duration(marked: Marked) -> None:
    """The wall clock may jump inside of a stage."""
    with shifted_clock(10**12):
        marked.stage("update").__enter__()
    marked.stage("update").__exit__(None, None, None)
    assert [ended.duration_ns for ended in marked.kept()] == [0]


def test_a_session_keeps_every_step_while_a_capture_is_open_and_when_none_is(
    session: Session, tmp_path: Path
) -> None:
    """In both modes; the capture's own log is the same as without the watch."""
    session.register(ProfilingConfig.from_any(WATCHED), worker := WorkerIdentity(role="actor"))
    assert session.sink is session.ring is not None
    assert not session.recording
    with stage("before"):
        pass
    for mode in ("e2e", "discrete"):
        with record_step({**WATCHED, "mode": mode}, tmp_path) as recorded, stage(mode), stage("inner"):
            assert session.recording
        assert recorded.result is not None
        assert [span.name for span in recorded.result.stages] == [mode, "inner"]
    with stage("after"):
        pass
    reading = session.read_watch(worker, 0)
    assert reading is not None
    assert [ended.name for ended in reading.ended()] == ["before", "e2e", "discrete", "after"]
    assert reading.received_ns <= reading.replied_ns
    assert reading.process.pid == os.getpid()


def test_the_watch_switched_off_leaves_the_session_as_it_was(session: Session) -> None:
    """No ring, no receiver of stages, nothing to read."""
    config = ProfilingConfig.from_any({"enable": True, "tool": "spans"})
    session.register(config, worker := WorkerIdentity(role="actor"))
    assert (session.sink, session.ring, session.read_watch(worker, 0)) == (None, None, None)


def test_a_fork_keeps_nothing_of_its_parent(session: Session) -> None:
    """The child inherits the memory, and is another process."""
    session.register(ProfilingConfig.from_any(WATCHED), WorkerIdentity(role="actor"))
    with stage("parent"):
        pass
    child = os.fork()
    if not child:
        os._exit(0 if session.ring is None and session.sink is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert session.ring is not None


def test_work_that_overlaps_is_one_stage_while_any_of_it_is_under_way(marked: Marked) -> None:
    """Whatever order it ends in, on any thread, also where a stream is dropped before its end."""

    async def stream() -> AsyncIterator[int]:
        yield 1

    busy = Busy(marked.sink, "generate")
    with busy:
        other = threading.Thread(target=busy.__enter__)
        other.start()
        other.join()
        busy.while_alive(response := stream())
    busy.__exit__(None, None, None)
    assert marked.names() == []
    del response
    assert marked.names() == ["generate"]
    with busy:
        pass
    assert marked.names() == ["generate", "generate"]


def test_work_without_a_pause_is_kept_in_pieces(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of an asynchronous loop is never idle; its pieces lie in the steps that they are of."""
    monkeypatch.setattr("verl_profiling.watch.busy.PIECE_NS", 1_000_000)
    busy = Busy(marked.sink, "generate")
    busy.__enter__()
    for _ in range(3):
        with busy:
            time.sleep(0.002)
    first, second, third = marked.kept()
    assert first.begin_ns + first.duration_ns == second.begin_ns
    assert second.begin_ns + second.duration_ns == third.begin_ns
    assert all(ended.duration_ns >= 2_000_000 for ended in (first, second, third))


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
        return server.read_watch()

    assert asyncio.run(serve({**WATCHED, "watch": {"enable": False}})) is None
    session.reset()
    reading = asyncio.run(serve(WATCHED))
    assert reading is not None
    assert reading.identity.lane() == "rollout1_rank0"
    assert [ended.name for ended in reading.ended()] == ["generate", "generate"]


def test_a_reading_is_as_large_as_its_stages(marked: Marked) -> None:
    """44 bytes a stage, and its names once."""
    for _ in range(50):
        with marked.stage("update_actor"):
            pass
    reading = read_ring(marked.sink, WorkerIdentity(role="actor"), None)
    assert len(reading.stages) == 50 * SLOT.size == 50 * 44
    assert reading.names == [OTHERS, "update_actor"]
