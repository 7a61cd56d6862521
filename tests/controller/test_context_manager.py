"""``with profiling:`` around a loop, and ``async with profiling:`` around one that is a coroutine."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleet import TrainWorker
from test_callback import configured, following, local_worker, manifest

from verl_profiling import AsyncProfilingCallback, CaptureStateError, ProfilingCallback
from verl_profiling.capture.messages import CaptureRequest, StartReply
from verl_profiling.capture.session import Session

FAILS_AT_STOP = "tools.test_third_party:FailsAtStop"


def leave(profiling: ProfilingCallback, step: int = 2, error: BaseException | None = None) -> None:
    """Leave the block in the middle of a step."""
    with profiling:
        profiling.on_step_begin(step)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("strict", [False, True])
def test_what_the_loop_raises_goes_on_and_the_step_is_kept(
    tmp_path: Path, session: Session, caplog: Any, error: BaseException, strict: bool
) -> None:
    """It is the same object, also where the tool fails too and settings are strict."""
    config = configured(tmp_path, strict=strict, tool=FAILS_AT_STOP)
    profiling = following(config)
    with pytest.raises(type(error)) as caught:
        leave(profiling, error=error)
    assert caught.value is error
    assert error.__context__ is None
    assert session.sink is None
    assert manifest(config).workers[0].reason == "stop raised OSError: device lost"
    assert any(message.startswith("closing the capture after") for message in caplog.messages)


def test_the_loops_own_error_is_seen_when_nothing_can_be_written(tmp_path: Path, session: Session) -> None:
    """Neither closing the capture nor ending training puts an error in its place, strict or not."""

    class Disconnected(TrainWorker):
        def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> Any:
            reply = super().stop_capture(capture_id, finish_s)
            shutil.rmtree(config.save_path, ignore_errors=True)
            return reply

    config = configured(tmp_path, strict=True)
    worker = Disconnected()
    worker.set_up(config)
    profiling = following(config, worker)
    with pytest.raises(ValueError, match="mine"):
        leave(profiling, error=ValueError("mine"))
    assert not Path(config.save_path).exists()


async def test_a_block_that_cannot_be_entered_is_not_left_half_open(tmp_path: Path, session: Session) -> None:
    """The blocking callback is refused inside of an event loop, and works outside of it afterwards."""
    config = configured(tmp_path)
    profiling = following(config)
    with pytest.raises(CaptureStateError, match="use AsyncProfilingCallback"), profiling:
        pytest.fail("entered")
    profiling.on_step_begin(2)  # refused as well, in the log

    def loop() -> None:
        with profiling:
            profiling.on_step_begin(2)
            profiling.on_step_end()

    await asyncio.to_thread(loop)
    assert manifest(config).complete


async def test_a_coroutine_ends_training_on_leaving(tmp_path: Path, session: Session) -> None:
    """As the ordinary block; and it may be entered again."""
    config = configured(tmp_path, tool="torch", schedule={"every": 1})
    worker = local_worker(config)
    profiling = AsyncProfilingCallback(config)
    profiling.add_workers("actor", worker)
    for step in (1, 2):
        async with profiling as entered:
            assert entered is profiling
            await profiling.on_step_begin(step)
            worker.work(["update_actor"] * 20)
            await profiling.on_step_end()
        assert [artifact.status for artifact in manifest(config, step).workers[0].artifacts] == ["ok"]


async def test_a_task_that_is_cancelled_keeps_its_step(tmp_path: Path, session: Session) -> None:
    """Cancelling a training task is how an asynchronous trainer is shut down."""
    config = configured(tmp_path)
    begun = asyncio.Event()

    async def loop() -> None:
        async with AsyncProfilingCallback(config) as profiling:
            profiling.add_workers("actor", local_worker(config))
            await profiling.on_step_begin(2)
            begun.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(loop())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not manifest(config).complete
    assert session.sink is None


class Slow(TrainWorker):
    """A worker whose start takes a while, on the loop's event loop."""

    async def start_capture(self, request: CaptureRequest) -> StartReply:  # type: ignore[override]
        await asyncio.sleep(0.3)
        return super().start_capture(request)


async def test_a_hook_that_is_cancelled_ends_its_work_first(tmp_path: Path, session: Session) -> None:
    """The next hook finds no worker busy, and no step is lost."""
    config = configured(tmp_path, schedule={"steps": [2, 3]})
    worker = Slow()
    worker.set_up(config)
    async with AsyncProfilingCallback(config) as profiling:
        profiling.add_workers("actor", worker)
        for step in (1, 2, 3):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(profiling.on_step_begin(step), 0.1)
            worker.work()
            await profiling.on_step_end()
    assert [manifest(config, step).workers[0].status for step in (2, 3)] == ["ok", "ok"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_workers_may_be_added_inside_of_the_block(
    tmp_path: Path, session: Session, caplog: Any, role: str
) -> None:
    """Roles in the settings are looked for when there are workers, and a wrong one is said once."""
    config = configured(tmp_path, select={"roles": ["actor"]}, schedule={"every": 1})
    with ProfilingCallback(config) as profiling:
        profiling.add_workers(role, local_worker(config, role))
        for step in (1, 2):
            profiling.on_step_begin(step)
            profiling.on_step_end()
    said = [message for message in caplog.messages if "no workers were added as 'actor'" in message]
    assert len(said) == (role == "critic")
    for step in (1, 2):
        assert [note in said for note in manifest(config, step).notes] == [True] * len(said)
