"""The watch of many workers: the loop's thread takes what they answered a part at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_callback import configured

from verl_profiling import ProfilingCallback, clock
from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply, start_reply, stop_reply
from verl_profiling.controller import watch as watch_module
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.step_account import StepAccount
from verl_profiling.watch.reading import WatchReading
from verl_profiling.watch.ring import StageRing

WORKERS = 12


class Fake:
    """A worker of which only its ring is read, in a process of its own by name."""

    def __init__(self, rank: int) -> None:
        self.identity = WorkerIdentity(role="actor", rank=rank)
        self.process = ProcessId(host="fake", clock_domain=self.identity.clock_domain, pid=10**6 + rank)
        self.ring = StageRing(100)
        self.asked = 0

    def start_capture(self, request: CaptureRequest) -> StartReply:
        """Record nothing."""
        return start_reply(self.identity, "recording", clock.now_ns())

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Answer with what the ring has."""
        result = CaptureResult(identity=self.identity, capture_id=capture_id or "", status="ok")
        reply = stop_reply(result, clock.now_ns())
        return msgspec.structs.replace(reply, watch=self.read_watch(None))

    def work(self) -> None:
        """Have run a stage a moment ago."""
        now_ns = clock.now_ns()
        self.ring.add("update_actor", now_ns - 1000, now_ns)

    def read_watch(self, since_ns: int | None) -> WatchReading:
        """Answer as a worker does."""
        self.asked += 1
        names, stages = self.ring.read(since_ns)
        now_ns = clock.now_ns()
        return WatchReading(
            identity=self.identity,
            process=self.process,
            names=names,
            stages=stages,
            received_ns=now_ns,
            replied_ns=now_ns,
        )


Run = Callable[..., tuple[ProfilingCallback, list[StepAccount], list[int], list[Fake]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run steps with many workers, where a hook has room for one piece of the work."""
    monkeypatch.setattr(watch_module, "ALLOWANCE_NS", 0)
    monkeypatch.setattr(watch_module, "SHARE", 0.0)

    def run(
        steps: int, begun: Callable[[ProfilingCallback, int], None] | None = None, **given: Any
    ) -> tuple[ProfilingCallback, list[StepAccount], list[int], list[Fake]]:
        fakes = [Fake(rank) for rank in range(WORKERS)]
        settings = {"schedule": {"steps": []}, "watch": {"enable": True, "every": 4}, **given}
        config = configured(tmp_path, **settings)
        callback = ProfilingCallback(config)
        callback.add_workers("actor", fakes)
        whole: list[StepAccount] = []
        after: list[int] = []
        assert callback.watch is not None
        callback.watch.listeners.append(whole.append)
        for step in range(1, steps + 1):
            callback.on_step_begin(step)
            if begun is not None:
                begun(callback, step)
            with callback.stage("update_actor"):
                for fake in fakes:
                    fake.work()
            callback.on_step_end()
            after.append(len(whole))
        return callback, whole, after, fakes

    return run


def test_a_step_does_a_part_and_all_accounts_are_whole_and_in_order(run: Run) -> None:
    """No step completes them all; while a part is left nobody is asked, and none is lost or cut short."""
    callback, whole, after, fakes = run(60)
    assert after[3] == 0, "the answers to the first question are there, and not all taken"
    assert max(now - before for before, now in pairwise(after)) <= 2
    assert after[-1] >= 4
    assert 2 <= max(fake.asked for fake in fakes) < 60 // 4
    callback.on_train_end()
    assert [account.step for account in whole] == list(range(1, 61))
    for account in whole:
        assert [use.lane for use in account.workers] == [f"actor_rank{rank}" for rank in range(WORKERS)]
        assert all([stage.name for stage in use.stages] == ["update_actor"] for use in account.workers)


def test_what_is_slow_is_not_spread(run: Run) -> None:
    """Who asks for the workers at once has them at once."""

    def begun(callback: ProfilingCallback, step: int) -> None:
        if step == 2 and callback.watch is not None:
            callback.watch.read_soon()

    callback, whole, after, _ = run(3, begun)
    assert after == [0, 2, 2]
    assert [len(account.workers) for account in whole] == [WORKERS] * 2
    callback.on_train_end()


def test_no_worker_is_called_silent_whose_answer_waits_to_be_taken(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """It answered in time; that the loop had no room for it yet is no matter of the worker's."""
    with caplog.at_level(logging.WARNING):
        callback, whole, _, _ = run(30, timeouts={"start_s": 0.0001, "stop_s": 20, "finish_s": 20})
        callback.on_train_end()
    assert not [record.message for record in caplog.records if "has not answered" in record.message]
    assert [account.step for account in whole] == list(range(1, 31))
    assert {len(account.workers) for account in whole} == {WORKERS}


def test_a_capture_ends_with_all_accounts(run: Run) -> None:
    """What was read for its manifest is complete when it is written."""
    callback, _, after, _ = run(12, schedule={"steps": [12]})
    assert after[-1] == 12
    callback.on_train_end()
