"""The watch in the loop's process: a summary of every step, though it waits for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from conftest import Pool
from fleet import Reborn, TrainWorker, WorkerGroup
from ray.exceptions import ActorUnavailableError
from test_callback import configured, following, local_worker, manifest, run, set_up

from verl_profiling import AsyncProfilingCallback, ProfilingCallback, ProfilingConfig, clock, stage
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.commands.trigger import find_job
from verl_profiling.controller.watch import Watch
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.watch.process_sums import WatchQuestion, WatchReading

Summaries = list[StepSummary]


def watched(tmp_path: Path, every: int = 2, **given: Any) -> ProfilingConfig:
    return configured(tmp_path, watch={"enable": True, "every": every}, **given)


def followed(
    config: ProfilingConfig, *roles: tuple[str, Any]
) -> tuple[ProfilingCallback, Summaries]:
    """Return a callback with workers, and the summaries that its listeners get."""
    callback = ProfilingCallback(config)
    for role, workers in roles:
        callback.add_workers(role, workers)
    whole: Summaries = []
    callback.watch.listeners.append(whole.append)
    return callback, whole


def names(uses: list[RankUse]) -> dict[str, list[str]]:
    """Return the names of the stages by lane."""
    return {use.lane: [*dict.fromkeys(name for name, *_ in use.each_run())] for use in uses}


def after_a_while(look: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether something holds before the time is up."""
    deadline = time.monotonic() + seconds
    while not look() and time.monotonic() < deadline:
        time.sleep(0.01)
    return look()


def test_every_step_of_a_local_worker_has_a_summary(tmp_path: Path, session: Session) -> None:
    """Captured or not: the stages of the loop and of the worker,
    and exposed times that add up to it.
    """
    config = watched(tmp_path)
    worker = local_worker(config)
    callback, whole = followed(config, ("actor", worker))
    run(callback, lambda step: worker.work(["update_actor", "save"]), steps=5)
    assert [summary.step for summary in whole] == [1, 2, 3, 4, 5]
    assert list(callback.watch.summaries) == whole
    for summary in whole:
        assert names(summary.loop) == {"controller": ["rollout", "update_actor"]}
        assert names(summary.workers) == {"actor_rank0": ["update_actor", "save"]}
        assert summary.policy_version == summary.step - 1
        assert sum(row.exposed_ns for row in summary.exposed) == summary.duration_ns
        _, (_, begin_ns, _, took_ns) = summary.loop[0].each_run()
        inside = [*summary.workers[0].each_run()]
        assert sum(inside_ns for *_, inside_ns in inside) <= took_ns
        assert summary.begin_ns <= begin_ns <= inside[0][1] <= summary.end_ns
        assert summary.loop[0].peak_bytes is None or summary.loop[0].peak_bytes > 1_000_000
    assert [summary.captured for summary in whole] == ["", "step_000002", "", "", ""]
    written = manifest(config)
    assert [span.name for span in written.stages] == ["rollout", "update_actor"]
    for begin_ns in (
        whole[1].begin_ns,
        written.begin_ns,
    ):  # what a capture takes to begin is no part of it
        assert written.rpcs[0].end_ns <= begin_ns <= written.stages[0].begin_ns
    assert whole[1].end_ns <= written.rpcs[1].begin_ns


def test_a_watch_that_judges_no_step_is_said_once_at_the_begin(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule captures every step, so nothing is left to the trigger."""
    watch = {"enable": True, "trigger": {}}
    config = configured(tmp_path, schedule={"every": 1}, watch=watch)
    callback = following(config)
    callback.on_train_begin()
    assert caplog.text.count("watch.trigger: never requests") == 1
    run(callback, lambda step: None, steps=2)
    assert caplog.text.count("watch.trigger: never requests") == 1


def test_without_the_watch_nobody_is_called_and_nothing_is_kept(tmp_path: Path, pool: Pool) -> None:
    """The calls of a run are those of before: nothing reads what workers keep,
    and they keep nothing.
    """
    config = configured(tmp_path)
    group = WorkerGroup(set_up(config, pool.sync[:2]))
    callback = following(config, group)
    run(callback, lambda step: ray.get([worker.work.remote() for worker in group.workers]), steps=5)
    assert group.calls == ["start_capture", "stop_capture"]
    assert callback.watch is None
    assert ray.get([worker.read_watch.remote(WatchQuestion()) for worker in group.workers]) == [
        None,
        None,
    ]
    assert not list(tmp_path.rglob("watch*"))


@pytest.mark.parametrize("grouped", [False, True])
def test_the_rings_of_ray_actors_are_read_every_few_steps(
    tmp_path: Path, pool: Pool, grouped: bool
) -> None:
    """By one call for each, or one for a group, and by the answers to the end of a capture."""
    config = watched(tmp_path, every=3)
    set_up(config, pool.sync)
    group = WorkerGroup(pool.sync)
    callback, whole = followed(config, ("actor", group if grouped else pool.sync))
    run(callback, lambda step: ray.get([worker.work.remote() for worker in pool.sync]), steps=8)
    if grouped:
        most = "at the begin, after steps 3 and 6, at the end, and to end the looks for hangs"
        assert group.calls.count("read_watch") == 5, most
    assert [summary.step for summary in whole] == list(range(1, 9))
    for summary in whole:
        assert names(summary.workers) == {
            f"actor_rank{rank}": ["update_actor"] for rank in range(3)
        }
        assert sum(row.exposed_ns for row in summary.exposed) == summary.duration_ns


def test_a_worker_that_never_answers_is_named_once_and_holds_up_nothing(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """The summaries of the others are complete without it;
    it is not asked again until it has answered.
    """
    timeouts = {"start_s": 0.5, "stop_s": 20, "finish_s": 20}
    config = watched(tmp_path, schedule={"steps": [100]}, timeouts=timeouts)
    set_up(config, pool.sync, switches=tmp_path)
    callback, whole = followed(config, ("actor", pool.sync))
    (tmp_path / "work").touch()
    hanging = pool.sync[2].work.remote()
    step, deadline_s = 0, time.monotonic() + 60

    def run_step(workers: list[Any]) -> None:
        nonlocal step
        assert time.monotonic() < deadline_s
        step += 1
        callback.on_step_begin(step)
        with callback.stage("update_actor"):
            ray.get([worker.is_idle.remote() for worker in workers])
            time.sleep(0.02)
        callback.on_step_end()

    while len(whole) < 8:
        run_step(pool.sync[:2])
    assert [summary.step for summary in whole[:8]] == list(range(1, 9))
    said = "\n".join(caplog.messages)
    assert len(re.findall("actor rank 2.* has not replied to read_watch", said)) == 1, said
    (tmp_path / "work").unlink()
    ray.get(hanging)
    while set(names(whole[-1].workers)) != {"actor_rank0", "actor_rank1", "actor_rank2"}:
        run_step(pool.sync)
    callback.on_train_end()


def test_a_worker_that_is_dead_is_named_once_and_holds_up_nothing(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps before have its stages; it is named by role and rank,
    though it was never captured.
    """
    config = watched(tmp_path, every=1, schedule={"steps": [100]})
    ray.get(pool.sync[0].set_up.remote(config, "critic"))
    actor = ray.remote(num_cpus=0)(Reborn).remote(config)
    callback, whole = followed(config, ("actor", actor), ("critic", pool.sync[0]))
    for step in range(1, 6):
        callback.on_step_begin(step)
        if step == 3:
            assert after_a_while(lambda: len(whole) == 2)
            ray.kill(actor)
        workers = [pool.sync[0], actor] if step < 3 else [pool.sync[0]]
        ray.get([worker.pass_stages.remote([f"stage{step}"]) for worker in workers])
        callback.on_step_end()
    callback.on_train_end()
    found = {summary.step: names(summary.workers) for summary in whole}
    assert list(found) == list(range(1, 6))
    assert found[1] == {"actor_rank0": ["stage1"], "critic_rank0": ["stage1"]}
    assert found[5] == {"critic_rank0": ["stage5"]}
    [dead] = [record.message for record in caplog.records if "is not read" in record.message]
    assert "ActorDiedError" in dead
    assert "actor rank 0 (pid " in dead


class _Restarting(TrainWorker):
    def read_watch(self, question: WatchQuestion) -> WatchReading:
        self.calls["read_watch"] += bool(question.steps)
        raise ActorUnavailableError("it restarts", None)


def test_workers_that_restart_are_waited_for_together(tmp_path: Path, session: Session) -> None:
    """One pause after another would use up the time, and nobody would be called again."""
    workers = [_Restarting() for _ in range(20)]
    config = watched(tmp_path, every=1, schedule={"steps": [100]}, timeouts={"start_s": 1.0})
    callback, _ = followed(config, ("actor", workers))
    calls: list[int] = []
    callback.watch.listeners.append(
        lambda _: calls.append(min(one.calls["read_watch"] for one in workers))
    )
    run(callback, lambda step: after_a_while(lambda: len(calls) == step - 1), steps=2)
    assert calls[0] > 1


def test_the_end_of_training_is_not_held_up_by_a_worker_that_hangs(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that raised because a worker hangs must end, whatever the timeouts of captures are."""
    monkeypatch.setattr("verl_profiling.controller.controller.LAST_READ_S", 1.0)
    config = watched(tmp_path, schedule={"steps": [100]})
    set_up(config, pool.sync[:2], switches=tmp_path)
    callback, whole = followed(config, ("actor", pool.sync[:2]))
    callback.on_step_begin(1)
    ray.get(pool.sync[0].work.remote())
    (tmp_path / "work").touch()
    hanging = pool.sync[1].work.remote()
    callback.on_step_end()
    begin_s = time.monotonic()
    callback.on_train_end()
    assert time.monotonic() - begin_s < 10
    (tmp_path / "work").unlink()
    ray.get(hanging)
    assert [names(summary.workers) for summary in whole] == [{"actor_rank0": ["update_actor"]}]


def test_clocks_that_differ_are_corrected(tmp_path: Path, pool: Pool) -> None:
    """A worker whose clock is an hour ahead has its stages in the right steps,
    but for the error.
    """
    config = watched(tmp_path, every=2, schedule={"steps": [100]})
    ray.get(pool.sync[0].set_up.remote(config, "actor", 0, clock_ns=3600 * 10**9))
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1))
    callback, whole = followed(config, ("actor", pool.sync[:2]))

    def work(step: int) -> None:
        time.sleep(0.1)  # more than an answer's way, by which the difference is known
        ray.get([worker.work.remote([f"stage{step}"]) for worker in pool.sync[:2]])
        time.sleep(0.1)

    run(callback, work, steps=4)
    found = [
        (lane, stage, abs(int(stage.removeprefix("stage")) - summary.step))
        for summary in whole
        for lane, stages in names(summary.workers).items()
        for stage in stages
    ]
    assert max(apart for *_, apart in found) <= 1, "an answer may take long on a busy machine"
    assert all(sum(lane == f"actor_rank{rank}" for lane, *_ in found) >= 3 for rank in (0, 1)), (
        found
    )
    ray.get([worker.set_up.remote(config) for worker in pool.sync[:2]])


class Silent:
    """A worker without a ring: a user's own class."""

    def start_capture(self, request: Any) -> None:
        """Answer nothing."""

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> None:
        """Answer nothing."""


class Answers(Silent):
    """A worker that answers what it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    def read_watch(self, question: WatchQuestion) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def reading(steps: bytes) -> WatchReading:
    """Return a reading as a damaged worker may send it."""
    return WatchReading(
        identity=WorkerIdentity(role="actor"),
        process=ProcessId.current(),
        steps=steps,
        received_ns=0,
        replied_ns=0,
    )


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Silent(), "no attribute 'read_watch'"),
        (Answers(ValueError("broken")), "ValueError: broken"),
        (Answers(asyncio.CancelledError()), "CancelledError"),
        (Answers(reading(b"no steps")), "cannot be read"),
        (Answers(reading(msgspec.msgpack.encode([None] * 1000))), "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named_once_and_the_account_is_complete_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, worker: Any, said: str
) -> None:
    """A user's own class, a wrong answer, damaged bytes: the loop does not notice."""
    config = watched(tmp_path, every=1, schedule={"steps": [100]})
    callback, whole = followed(config, ("actor", worker))
    run(callback, lambda step: None, steps=4)
    [found] = [message for message in caplog.messages if message.startswith("watch:")]
    assert said in found
    assert [names(summary.loop) for summary in whole] == [
        {"controller": ["rollout", "update_actor"]}
    ] * 4
    assert {row.leader for row in whole[0].exposed if row.name} == {""}


def test_a_listener_that_raises_is_said_once_and_the_others_hear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is done with a summary is no matter of the training loop."""
    config = watched(tmp_path, every=1, schedule={"steps": [100]})
    callback, whole = followed(config)

    def broken(summary: StepSummary) -> None:
        raise OSError("no space left")

    callback.watch.listeners.insert(0, broken)
    run(callback, lambda step: None, steps=3)
    assert len(whole) == 3
    assert [record.message for record in caplog.records].count(
        "watch: step 1: OSError: no space left"
    ) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_mistake_of_the_watch_is_no_matter_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Of whatever kind it is, unless the settings are strict."""

    def fails(*given: object) -> None:
        raise KeyError("a mistake")

    fails.__name__ = "step_ends"
    profiling = ProfilingCallback(watched(tmp_path, strict=strict))
    with (
        monkeypatch.context() as broken,
        pytest.raises(KeyError) if strict else contextlib.nullcontext(),
    ):
        broken.setattr(Watch, "step_ends", fails)
        run(profiling, lambda step: None, steps=2)
    profiling.on_train_end()
    assert ("profiling failed, training goes on: KeyError: 'a mistake'" in caplog.text) != strict


def test_the_account_of_an_aimed_capture_has_the_others_too(tmp_path: Path, pool: Pool) -> None:
    """They were not called at its end, and their stages are waited for until they are read."""
    config = watched(tmp_path, every=3, schedule={"steps": []}, tool="spans")
    set_up(config, pool.sync)
    callback, whole = followed(config, ("actor", pool.sync[:2]), ("critic", pool.sync[2:]))
    callback.on_train_begin()
    for step in range(1, 5):
        if step == 2:
            find_job(Path(config.save_path)).ask(CaptureSelection(roles=("critic",)), 1)
        callback.on_step_begin(step)
        with callback.stage("update"):
            ray.get([worker.work.remote() for worker in pool.sync])
        callback.on_step_end()
    callback.on_train_end()
    assert [summary.captured for summary in whole] == ["", "step_000002", "", ""]
    assert [len(summary.workers) for summary in whole] == [3] * 4


def test_workers_that_are_never_due_are_read_with_captures_alone(
    tmp_path: Path, session: Session
) -> None:
    config = watched(tmp_path, every=0)
    worker = local_worker(config)
    callback, whole = followed(config, ("actor", worker))
    run(callback, lambda step: worker.work(), steps=3)
    assert [names(summary.workers) for summary in whole] == [
        {},
        {"actor_rank0": ["update_actor"]},
        {},
    ]


def test_what_lies_between_steps_belongs_to_none(tmp_path: Path, session: Session) -> None:
    """Validation after a step, for one; what begins in the last moment of a step is in the next."""
    config = watched(tmp_path, every=1, schedule={"steps": [100]})
    worker = local_worker(config)
    callback, whole = followed(config, ("actor", worker))
    now_ns = time.time_ns()

    def tick(what: Callable[..., object], *given: Any) -> None:
        nonlocal now_ns
        what(*given)
        now_ns += 20_000_000

    def works(name: str) -> None:
        with stage(name):
            tick(len, name)

    rollout = callback.stage("rollout")
    with clock.replaced(lambda: now_ns, clock.domain()):
        callback.on_train_begin()
        tick(callback.on_step_begin, 1)
        tick(works, "update")
        tick(callback.on_step_end)
        tick(works, "validate")
        tick(callback.on_step_begin, 2)
        tick(works, "update")
        rollout.__enter__()
        tick(callback.on_step_end)
        tick(callback.on_step_begin, 3)
        tick(rollout.__exit__, None, None, None)
        callback.on_step_end()
        callback.on_train_end()
    assert [names(summary.workers) for summary in whole] == [
        {"actor_rank0": ["update"]},
        {"actor_rank0": ["update"]},
        {"actor_rank0": []},
    ]
    assert [names(summary.loop) for summary in whole] == [
        {"controller": []},
        {"controller": []},
        {"controller": ["rollout"]},
    ]


def test_a_loop_without_step_ends_has_accounts_from_begin_to_begin(tmp_path: Path) -> None:
    """A step that did not end, ends when the next one begins;
    the last one at the end of training.
    """
    config = watched(tmp_path, every=1, schedule={"steps": [100]})
    callback, whole = followed(config)
    for step in range(1, 4):
        callback.on_step_begin(step)
        with callback.stage("update"):
            pass
    callback.on_train_end()
    assert [summary.step for summary in whole] == [1, 2, 3]
    assert [names(summary.loop) for summary in whole] == [{"controller": ["update"]}] * 3


def test_only_as_many_steps_are_kept_as_the_settings_say(tmp_path: Path) -> None:
    """Whatever a run's length, and however seldom its workers are read."""
    config = configured(
        tmp_path, schedule={"steps": [10**9]}, watch={"enable": True, "steps": 5, "every": 1000}
    )
    callback, whole = followed(config)
    run(callback, lambda step: None, steps=100)
    assert [summary.step for summary in callback.watch.summaries] == [96, 97, 98, 99, 100]
    assert [summary.step for summary in whole] == list(range(1, 101))


def test_an_async_loop_has_accounts_with_generation_beside_the_steps(
    tmp_path: Path, pool: Pool
) -> None:
    """Its workers are read without a wait; the stage ``rollout`` covers the generation alone."""
    config = watched(tmp_path, every=2, schedule={"steps": [3]})
    set_up(config, pool.sync[:1])
    whole: Summaries = []

    async def loop() -> None:
        callback = AsyncProfilingCallback(config)
        callback.add_workers("actor", pool.sync[:1])
        callback.watch.listeners.append(whole.append)
        async with callback:
            for step in range(1, 6):
                await callback.on_step_begin(step, policy_version=10 + step)
                await callback.on_rollout_begin(in_background=True)
                callback.on_generation_begin()
                with callback.stage("update_actor"):
                    await asyncio.sleep(0.005)
                    await pool.sync[0].work.remote()
                callback.on_generation_end()
                callback.on_stages_end()
                await asyncio.sleep(0.02)
                await callback.on_rollout_end()
                await callback.on_step_end()

    asyncio.run(loop())
    assert [(summary.step, summary.policy_version) for summary in whole] == [
        (n, 10 + n) for n in range(1, 6)
    ]
    for summary in whole:
        assert names(summary.loop) == {"controller": ["rollout", "update_actor"]}
        assert names(summary.workers) == {"actor_rank0": ["update_actor"]}
        assert {"update_actor", ""} <= {row.name for row in summary.exposed}
    assert manifest(config, 3).complete
