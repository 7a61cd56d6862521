"""The callback for loops that are coroutines: the same captures,
and an event loop that is never blocked.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray
from conftest import Pool
from example_loops import spans
from fleet import CoroutineWorker
from test_callback import configured, local_worker, manifest, set_up

from verl_profiling import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.capture.session import Session


async def test_local_workers_of_both_kinds_are_captured(tmp_path: Path, session: Session) -> None:
    """Ordinary methods and coroutines run on the thread of the event loop."""
    config = configured(tmp_path, tool="torch")
    rollout = CoroutineWorker(config)
    actor = local_worker(config, reset=False)
    callback = AsyncProfilingCallback(config)
    callback.add_workers("actor", actor)
    callback.add_rollout([rollout])

    await callback.on_train_begin()
    for step in (1, 2, 3):
        await callback.on_step_begin(step)
        await callback.on_rollout_begin()
        await callback.on_rollout_end({"rollout/seconds": 0.5})
        with callback.stage("update_actor"):
            actor.work()
        await callback.on_step_end({"reward": step / 10})
    await callback.on_train_end()
    written = manifest(config)
    [result] = written.workers
    assert set(result.roles) == {"actor", "rollout"}
    assert result.status == "ok"
    assert spans(Path(config.save_path) / "step_000002" / result.artifacts[0].path, "aten::addmm")
    assert written.metrics == {"rollout/seconds": 0.5, "reward": 0.2}
    assert [(span.name, span.failed) for span in written.stages] == [
        ("rollout", False),
        ("update_actor", False),
    ]
    counts = actor.counts()
    assert counts["start_capture"] == 1
    assert counts["stop_capture"] in (1, 2), "a second one asks for what was still being compressed"


async def test_the_event_loop_is_free_while_a_remote_worker_stops(
    tmp_path: Path, pool: Pool
) -> None:
    """It is the loop that lets the worker stop, some turns later."""
    config = configured(tmp_path, tool="torch")
    set_up(config, pool.sync[:2])
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1, switches=tmp_path))
    callback = AsyncProfilingCallback(config)
    callback.add_workers("actor", pool.sync[:2])
    await callback.on_step_begin(2)
    await asyncio.gather(*(actor.work.remote() for actor in pool.sync[:2]))
    (tmp_path / "stop").touch()

    async def let_go() -> None:
        while not list(tmp_path.glob("stop_hangs_*")):
            await asyncio.sleep(0.01)
        (tmp_path / "stop").unlink()

    turns = asyncio.create_task(let_go())
    await callback.on_step_end()
    assert turns.done()
    await callback.on_train_end()
    assert [(w.name, w.status, w.artifacts[0].status) for w in manifest(config).workers] == [
        ("actor_rank0", "ok", "ok"),
        ("actor_rank1", "ok", "ok"),
    ]


async def test_a_rollout_may_begin_and_end_in_different_tasks(
    tmp_path: Path, session: Session
) -> None:
    """Loops wrap hooks in tasks and timeouts; the stage of the rollout is whole all the same."""
    config = configured(tmp_path)
    callback = AsyncProfilingCallback(config)
    callback.add_workers("actor", local_worker(config))
    await callback.on_step_begin(2)
    await asyncio.create_task(callback.on_rollout_begin())
    await asyncio.sleep(0.02)
    await asyncio.wait_for(callback.on_rollout_end(), 5)
    with callback.stage("update_actor"):
        await asyncio.sleep(0.02)
    await callback.on_step_end()
    rollout, update = manifest(config).stages
    assert [(span.name, span.failed, span.depth) for span in (rollout, update)] == [
        ("rollout", False, 0),
        ("update_actor", False, 0),
    ]
    assert rollout.end_ns <= update.begin_ns


async def test_a_rollout_beside_the_step_encloses_none_of_its_stages(tmp_path: Path) -> None:
    """What the loop does while generation runs in another task is as outermost
    as generation itself.
    """
    callback = AsyncProfilingCallback(configured(tmp_path))
    async with callback:
        await callback.on_step_begin(2)
        await callback.on_rollout_begin(in_background=True)
        callback.on_generation_begin()
        with callback.stage("update_actor"):
            callback.on_generation_end()
        await callback.on_rollout_end()
        await callback.on_step_end()
    found = manifest(configured(tmp_path)).stages
    assert [(span.name, span.depth, span.failed) for span in found] == [
        ("rollout", 0, False),
        ("update_actor", 0, False),
    ]


async def test_a_step_may_be_over_before_its_capture_is_closed(tmp_path: Path) -> None:
    """What the loop does between the two lies outside of the step;
    the rollout beside it ends with it.
    """
    callback = AsyncProfilingCallback(configured(tmp_path))
    async with callback:
        callback.on_stages_end()  # of no step: nothing
        callback.on_generation_begin()
        await callback.on_step_begin(2)
        await callback.on_rollout_begin(in_background=True)
        callback.on_generation_begin()
        callback.on_generation_end()
        callback.on_stages_end()
        with callback.stage("validate"):
            await asyncio.sleep(0.02)
        callback.on_stages_end()
        await callback.on_step_end({"reward": 1.0})
    found = manifest(configured(tmp_path))
    assert found.complete
    assert found.metrics == {"reward": 1.0}
    (rollout,) = found.stages
    assert (rollout.name, rollout.failed) == ("rollout", False)
    assert rollout.end_ns <= found.end_ns + 1_000_000
    (validation,) = (span for span in found.around_the_step if span.name == "validate")
    assert found.end_ns <= validation.begin_ns


async def test_hooks_that_are_no_coroutines_may_be_allowed_to_block(tmp_path: Path) -> None:
    """A coroutine that calls functions only can be profiled; its loop stands still in the hooks."""
    with ProfilingCallback(configured(tmp_path), blocks_event_loop=True) as callback:
        callback.on_step_begin(2)
        with callback.stage("update_actor"):
            await asyncio.sleep(0)
        callback.on_step_end()
    assert manifest(configured(tmp_path)).complete
