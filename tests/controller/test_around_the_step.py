"""What the loop's process does before and after a captured step is in the step's manifest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from conftest import Pool
from fleet import TrainWorker, once_all_hang
from test_callback import configured, following, manifest

from verl_profiling import ProfilingCallback
from verl_profiling.capture.protocol import StopReply
from verl_profiling.capture.session import Session
from verl_profiling.manifest import Manifest


class SlowToStop(TrainWorker):
    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        time.sleep(0.05)
        return super().stop_capture(capture_id, finish_s)


def outside(written: Manifest) -> list[tuple[str, int]]:
    return [(span.name, span.depth) for span in written.around_the_step]


def callback_of(config: Any) -> ProfilingCallback:
    worker = SlowToStop()
    worker.set_up(config, "actor", 0)
    callback = following(config, worker)
    callback.on_train_begin()
    return callback


def validated_step(callback: ProfilingCallback, step: int) -> None:
    """Run a step that the loop validates afterwards."""
    callback.on_step_begin(step)
    callback.on_step_end()
    with callback.stage("validate"), callback.stage("generate"):
        time.sleep(0.01)


PAUSES = [("capture_start", 0), ("capture_stop", 0), ("write", 1)]
VALIDATED = [*PAUSES, ("validate", 0), ("generate", 1)]


@pytest.mark.parametrize("ends", ["next step", "next capture", "end of training"])
def test_the_pauses_and_what_followed_are_known_once_the_loop_goes_on(
    tmp_path: Path, session: Session, ends: str
) -> None:
    """Until then the manifest has the pauses, in this order around the step and its calls."""
    config = configured(tmp_path, schedule={"steps": [2, 3] if ends == "next capture" else [2]})
    callback = callback_of(config)
    validated_step(callback, 1)
    validated_step(callback, 2)
    first = manifest(config)
    assert outside(first) == PAUSES
    if ends == "end of training":
        callback.on_train_end()
    else:
        validated_step(callback, 3)
    written = manifest(config)
    assert outside(written) == VALIDATED
    start, stop, write, validate, _ = written.around_the_step
    assert start.begin_ns <= written.rpcs[0].begin_ns
    assert written.rpcs[0].end_ns <= start.end_ns <= written.begin_ns
    assert written.end_ns <= stop.begin_ns <= written.rpcs[1].begin_ns
    assert (
        written.rpcs[1].end_ns <= write.begin_ns <= write.end_ns <= stop.end_ns <= validate.begin_ns
    )
    assert stop.end_ns - stop.begin_ns >= 5e7
    assert first.around_the_step[1].end_ns <= stop.end_ns
    assert not any(span.failed for span in written.around_the_step)
    assert written == msgspec.structs.replace(first, around_the_step=written.around_the_step)
    callback.on_train_end()
    assert outside(manifest(config)) == VALIDATED


def test_numbers_that_come_meanwhile_are_kept(tmp_path: Path, session: Session) -> None:
    """What ``add_metrics`` brings after validation
    and what followed the step do not replace each other.
    """
    config = configured(tmp_path)
    callback = callback_of(config)
    validated_step(callback, 2)
    callback.add_metrics(2, {"val/reward": 0.5})
    callback.on_step_begin(3)
    assert outside(manifest(config)) == VALIDATED
    assert manifest(config).metrics == {"val/reward": 0.5}


def test_stages_of_steps_that_are_not_captured_go_nowhere(tmp_path: Path, session: Session) -> None:
    """One that goes on when the next step begins, ends there."""
    config = configured(tmp_path)
    callback = callback_of(config)
    callback.on_step_begin(2)
    callback.on_step_end()
    with callback.stage("prefetch"):
        callback.on_step_begin(3)
    validated_step(callback, 3)
    callback.on_train_end()
    assert outside(manifest(config)) == [*PAUSES, ("prefetch", 0)]


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_engines_and_workers_stop_at_the_same_time(tmp_path: Path, pool: Pool, mode: str) -> None:
    """A rollout that is recorded until the step ends, as a window or a whole,
    is not waited for first.
    """
    config = configured(tmp_path, roles={"rollout": {"mode": mode}})
    switch = tmp_path / "stop"
    ray.get(
        [
            actor.set_up.remote(config, role, switches=tmp_path)
            for actor, role in zip(pool.sync, ("actor", "rollout"), strict=False)
        ]
    )
    callback = following(config, pool.sync[0])
    callback.add_rollout(pool.sync[1])
    callback.on_train_begin()
    callback.on_step_begin(2)
    callback.on_rollout_begin()
    switch.touch()
    waiting = once_all_hang(tmp_path, "stop", 2, switch.unlink)
    callback.on_step_end()
    waiting.join()
    written = manifest(config)
    assert {worker.name: worker.status for worker in written.workers} == {
        "actor_rank0": "ok",
        "rollout_rank0": "ok",
    }
    stops = [rpc for rpc in written.rpcs if rpc.method == "stop_capture"]
    assert len(stops) == 2
    assert max(rpc.begin_ns for rpc in stops) < min(rpc.end_ns for rpc in stops)
    callback.on_train_end()
