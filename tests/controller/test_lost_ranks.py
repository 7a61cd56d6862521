"""Ranks that cannot reach each other, or begin anew: the loop goes on, and nothing old is taken for new."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from example_loops import settings
from fleet import TrainWorker

from verl_profiling import ProfilingCallback, ProfilingConfig
from verl_profiling.aim import Aim
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import Session
from verl_profiling.commands.asking import find_job
from verl_profiling.controller.ahead import Announced, Announcing
from verl_profiling.controller.calls import Round
from verl_profiling.controller.channel import Channel, FileChannel, StoreChannel, lead_files
from verl_profiling.controller.decision import Decision
from verl_profiling.controller.following_rank import Follower
from verl_profiling.controller.leading_rank import Leader
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.settings.schedule import StepRange
from verl_profiling.trigger import Trigger

SOON = {"start_s": 0.2, "stop_s": 0.2, "finish_s": 0.2}


def rank(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfilingCallback:
    """Return the callback of a rank of two, which can be asked for captures."""
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = settings(
        save_path=str(tmp_path / "run"),
        schedule={"steps": []},
        watch={"enable": True},
        tool="spans",
        timeouts=SOON,
    )
    worker = TrainWorker()
    worker.set_up(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", worker)
    callback.on_train_begin()
    return callback


def steps(callback: ProfilingCallback, first: int, last: int) -> None:
    """Run steps."""
    for step in range(first, last + 1):
        callback.on_step_begin(step)
        callback.on_step_end()


def test_what_is_no_announcement_is_said_and_ends_nothing(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who may write the folder may have left it."""
    callback = rank(1, tmp_path, monkeypatch)
    lead_files(tmp_path / "run").put("ahead/1/0", b"\xc1")
    steps(callback, 1, 3)
    callback.on_train_end()
    assert len([text for text in caplog.messages if "what rank 0 announces is not heard" in text]) == 1


def test_where_the_others_cannot_be_told_who_asked_is_refused(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in which the ranks meet is gone; the loop of rank 0 goes on."""
    callback = rank(0, tmp_path, monkeypatch)
    steps(callback, 1, 25)
    job = find_job(tmp_path / "run")
    demand = job.ask(Aim(), 1, None)
    shutil.rmtree(tmp_path / "run" / ".spmd")
    (tmp_path / "run" / ".spmd").write_text("")
    steps(callback, 26, 30)
    answer = job.answer(demand.id)
    callback.on_train_end()
    assert answer is not None
    assert (answer.state, "the other ranks cannot be told" in answer.reason) == ("refused", True)


def test_a_training_that_ends_twice_waits_for_the_others_once(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call of the hook, and by the end of ``with``: rank 0 asks the others for no second farewell."""
    callback = rank(0, tmp_path, monkeypatch)
    steps(callback, 1, 25)
    callback.on_train_end()
    assert callback.watch is not None
    assert callback.watch.last_step_is_over() is None
    callback.on_train_end()


def test_a_store_that_is_gone_ends_no_other_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process of rank 0 had it, and has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    announced = Announced(Follower(configured(tmp_path), 1, lambda: StoreChannel(client, "test")))
    announced.step_begins(1)
    del server
    time.sleep(1.1)  # it looks once a second
    announced.step_begins(2)
    [said] = caplog.messages
    assert said.startswith("what rank 0 announces is not heard: DistNetworkError: ")
    assert "\n" not in said


def configured(tmp_path: Path) -> ProfilingConfig:
    """Return settings of a rank that waits for nobody for long."""
    return settings(save_path=str(tmp_path), timeouts=SOON)


class Two:
    """Rank 0 and rank 1, which meet over a channel of either kind."""

    def __init__(self, tmp_path: Path, join: Callable[[], Channel]) -> None:
        config = configured(tmp_path)
        self.leader = Leader(config, 2, join, StepFolders(config))
        self.follower = Follower(config, 1, join)

    def train_ends(self) -> None:
        """End a training on both ranks."""
        drive(self.follower.end([]))
        drive(self.leader.end([]))


def drive(rounds: Iterator[Round]) -> None:
    """Wait for rounds, one after another."""
    for round_ in rounds:
        round_.wait()


@pytest.fixture(params=["files", "store"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Two:
    """Two ranks."""
    if request.param == "files":

        def join() -> Channel:
            (tmp_path / "a" / "b" / "c").mkdir(parents=True, exist_ok=True)
            return FileChannel(tmp_path / "a" / "b" / "c")

    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)

        def join() -> Channel:
            return StoreChannel(store, "test")

    return Two(tmp_path, join)


def test_what_was_announced_in_an_earlier_training_is_not_of_the_next(two: Two) -> None:
    """The follower did not look any more; it would wait for an order there that never comes."""
    two.leader.announce(5, 5, None)
    two.train_ends()
    assert two.follower.announced() is None
    two.leader.announce(7, 8, None)
    assert two.follower.announced() == (7, 8)


def test_a_capture_of_a_later_training_is_not_taken_for_an_earlier_one(two: Two) -> None:
    """One that the follower had no part in, at a step of the same number."""
    request = CaptureRequest(capture_id="old", run_id="r", step=5, folder="old")
    drive(two.leader.agree(5, lambda: request))
    two.train_ends()
    drive(two.leader.agree(5, lambda: None))
    begin = time.monotonic()
    agreed: list[Any] = []

    def follow() -> Iterator[Round]:
        agreed.append((yield from two.follower.agree(5, lambda: None)))

    drive(follow())
    assert agreed == [None]
    assert time.monotonic() - begin < SOON["start_s"], (
        "there is an order, and it says that nothing is captured"
    )


def test_a_capture_that_rank_0_cannot_begin_is_waited_for_by_nobody(two: Two) -> None:
    """Its folder cannot be made; the others are told that nothing is captured."""

    def fails() -> CaptureRequest | None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        drive(two.leader.agree(5, fails))
    begin = time.monotonic()
    drive(two.follower.agree(5, lambda: None))
    assert time.monotonic() - begin < SOON["start_s"]


def test_a_loop_that_counts_anew_can_be_asked_again(two: Two) -> None:
    """Its steps have numbers that were decided on in the epoch before."""
    lost: list[str] = []
    announcing = Announcing(two.leader, lambda trigger, why: lost.append(why))
    for step in range(50):
        announcing.look(step, lambda step: None)
    for step in range(3):
        announcing.look(step, lambda step: Decision(StepRange(step, step), Trigger()))
    assert announcing.at(3) is not None
    assert lost == []
