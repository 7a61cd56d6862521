"""``with profiling:`` around a loop, and ``async with profiling:`` around one
that is a coroutine.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleet import TrainWorker
from test_callback import configured, following, local_worker, manifest

from verl_profiling import AsyncProfilingCallback, CaptureStateError
from verl_profiling.capture.protocol import CaptureStart, StartReply
from verl_profiling.capture.session import Session

FAILS_AT_STOP = "tools.test_third_party:FailsAtStop"


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize(("strict", "gone"), [(False, False), (True, False), (True, True)])
def test_what_the_loop_raises_goes_on_and_the_step_is_kept(
    tmp_path: Path, session: Session, caplog: Any, error: BaseException, strict: bool, gone: bool
) -> None:
    """It is the same object, also if settings are strict,
    and the tool fails or nothing can be written.
    """
    config = configured(tmp_path, strict=strict, tool=FAILS_AT_STOP)
    profiling = following(config)

    def loop() -> None:
        with profiling:
            profiling.on_step_begin(2)
            if gone:
                shutil.rmtree(config.save_path)
            raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert error.__context__ is None
    assert session.sink is None
    assert any(message.startswith("closing the capture after") for message in caplog.messages)
    if gone:
        assert not Path(config.save_path).exists()
    else:
        assert manifest(config).workers[0].reason == "stop raised OSError: device lost"


async def test_a_block_that_cannot_be_entered_is_not_left_half_open(
    tmp_path: Path, session: Session
) -> None:
    """The blocking callback is refused inside of an event loop,
    and works outside of it afterwards.
    """
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
        assert [artifact.status for artifact in manifest(config, step).workers[0].artifacts] == [
            "ok"
        ]


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

    async def start_capture(self, request: CaptureStart) -> StartReply:  # type: ignore[override]
        await asyncio.sleep(0.3)
        return super().start_capture(request)


async def test_a_hook_that_is_cancelled_ends_its_work_first(
    tmp_path: Path, session: Session
) -> None:
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
