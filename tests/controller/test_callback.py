"""The callback: from the loop's hooks to the step folder."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Pool
from example_loops import settings, spans, train
from fleet import CoroutineWorker, TrainWorker, WorkerGroup

from verl_profiling import ConfigError, ProfilingCallback, ProfilingConfig, stage
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest
from verl_profiling.steps.check import check
from verl_profiling.workers import CaptureMixin, RequestLog, RolloutCaptureMixin

Work = Callable[[int], object]


def configured(tmp_path: Path, **given: Any) -> ProfilingConfig:
    """Return settings that capture step 2 with spans only, unless told otherwise."""
    defaults = {
        "tool": "spans",
        "save_path": str(tmp_path / "run"),
        "schedule": {"steps": [2]},
        "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
    }
    return settings(**{**defaults, **given})


def run(callback: ProfilingCallback, work: Work, steps: int = 3) -> None:
    callback.on_train_begin()
    for step in range(1, steps + 1):
        callback.on_step_begin(step, policy_version=step - 1)
        callback.on_rollout_begin()
        callback.on_rollout_end({"rollout/seconds": 0.5})
        with callback.stage("update_actor"):
            work(step)
        callback.on_step_end({"reward": step / 10, "text": "no number"})
    callback.on_train_end()


def pass_steps(callback: ProfilingCallback, *steps: int) -> None:
    """Run steps in which nothing happens."""
    for step in steps:
        callback.on_step_begin(step)
        callback.on_step_end()


def train_through(config: ProfilingConfig, *steps: int) -> ProfilingCallback:
    """Run a whole training of such steps with a worker of this process."""
    with following(config) as callback:
        pass_steps(callback, *steps)
    return callback


def manifest(config: ProfilingConfig, step: int = 2) -> Manifest:
    return read_manifest(Path(config.save_path) / f"step_{step:06d}")


def local_worker(
    config: ProfilingConfig, role: str = "actor", rank: int = 0, **more: Any
) -> TrainWorker:
    worker = TrainWorker()
    worker.set_up(config, role, rank, **more)
    return worker


def set_up(
    config: ProfilingConfig, workers: list[Any], role: str = "actor", **more: Any
) -> list[Any]:
    """Set Ray actors up as the ranks of a role; return them."""
    ray.get(
        [worker.set_up.remote(config, role, rank, **more) for rank, worker in enumerate(workers)]
    )
    return workers


def following(config: ProfilingConfig, workers: Any = None) -> ProfilingCallback:
    """Return a callback over the ranks of an actor, by default one worker of this process."""
    callback = ProfilingCallback(config)
    callback.add_workers("actor", local_worker(config) if workers is None else workers)
    return callback


def test_a_disabled_callback_does_nothing(tmp_path: Path, caplog: Any) -> None:
    """No workers are looked at, no folder is made, and every hook may be called."""
    config = {"enable": False, "save_path": str(tmp_path / "run"), "tool": "not_installed:Tool"}
    callback = following(config, object())
    callback.add_rollout(None)
    run(callback, lambda step: None)
    callback.on_exception(ValueError("x"))
    callback.on_step_end()
    callback.on_rollout_end()
    assert (caplog.messages, callback.last_folder) == ([], None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_a_step_of_a_local_worker_is_captured(tmp_path: Path, session: Session, mode: str) -> None:
    """Step 2, and only step 2, has a folder with a trace, the worker's result and the manifest."""
    config = configured(tmp_path, tool="torch", mode=mode)
    callback = following(config, worker := local_worker(config))
    run(callback, lambda step: worker.work())
    folder = Path(config.save_path) / "step_000002"
    artifact = (
        "actor_rank0.torch.json.gz" if mode == "e2e" else "actor_rank0.update_actor.torch.json.gz"
    )
    assert sorted(path.name for path in Path(config.save_path).iterdir()) == [
        "run.json",
        "step_000002",
    ]
    found = {path.name for path in folder.iterdir()}
    assert found == {artifact, "actor_rank0.result.json", "manifest.json"}
    assert callback.last_folder == folder
    assert spans(folder / artifact, "aten::addmm")
    written = manifest(config)
    assert [(worker.name, worker.status, worker.mode) for worker in written.workers] == [
        ("actor_rank0", "ok", mode)
    ]
    assert [a.status for a in written.workers[0].artifacts] == ["ok"]


def test_the_manifest_tells_the_step(tmp_path: Path, session: Session) -> None:
    """Step, policy version, stages, calls, metrics that are numbers, in the order of time."""
    config = configured(tmp_path)
    callback = following(config, worker := local_worker(config))
    run(callback, lambda step: worker.work(["a", "b"]))
    written = manifest(config)
    assert (written.step, written.steps, written.policy_version, written.complete) == (
        2,
        [2],
        1,
        True,
    )
    assert written.metrics == {"rollout/seconds": 0.5, "reward": 0.2}
    assert [span.name for span in written.stages] == ["rollout", "update_actor"]
    assert [(rpc.worker, rpc.method, rpc.ok) for rpc in written.rpcs] == [
        ("actor_rank0", "start_capture", True),
        ("actor_rank0", "stop_capture", True),
    ]
    [result] = written.workers
    assert [span.name for span in result.stages] == ["a", "b"]
    update = written.stages[1]
    assert not any(span.failed for span in written.stages)
    assert (
        written.rpcs[0].end_ns <= written.begin_ns <= update.begin_ns <= result.stages[0].begin_ns
    )
    assert result.stages[1].end_ns <= update.end_ns <= written.end_ns <= written.rpcs[1].begin_ns
    assert [clock.samples for clock in written.clocks] == [0]
    run_info = json.loads((Path(config.save_path) / "run.json").read_text())
    assert ProfilingConfig.from_any(run_info["config"]) == config
    assert run_info["run_id"] == written.run_id
    assert "torch" in run_info["versions"]


def test_a_continuous_capture_is_one_folder_that_tells_its_steps_apart(
    tmp_path: Path, session: Session
) -> None:
    """Each step's begin, end, version, stages and metrics are its own;
    what lies between is in none.
    """
    config = configured(tmp_path, schedule={"steps": [2, 3, 5], "continuous": True})
    callback = following(config, worker := local_worker(config))
    for step, version in ((2, 7), (3, 9), (4, 9), (5, 9)):
        callback.on_step_begin(step, version)
        with callback.stage("update_actor"):
            worker.work([f"step{step}"])
        callback.on_step_end({"loss": step})
        with callback.stage("validate"):
            pass
        callback.add_metrics(step, {"reward": 10 * step})
    callback.on_train_end()
    assert worker.counts() == {"start_capture": 2, "stop_capture": 2}, "step 4 makes no call"
    assert [span.name for span in manifest(config, 5).workers[0].stages] == ["step5"]
    found = manifest(config, 2)
    assert [span.name for span in found.workers[0].stages] == ["step2", "step3"]
    first, second = found.step_spans
    assert [(span.step, span.policy_version) for span in (first, second)] == [(2, 7), (3, 9)]
    assert [span.metrics for span in (first, second)] == [
        {"loss": 2, "reward": 20},
        {"loss": 3, "reward": 30},
    ]
    assert (
        first.begin_ns
        == found.begin_ns
        < first.end_ns
        <= second.begin_ns
        < second.end_ns
        == found.end_ns
    )
    assert (found.steps, found.metrics) == ([2, 3], {"loss": 3, "reward": 30})
    update, validate, _ = found.stages
    assert first.begin_ns <= update.begin_ns <= update.end_ns <= first.end_ns
    assert first.end_ns <= validate.begin_ns <= validate.end_ns <= second.begin_ns


def test_a_warm_up_step_runs_the_tool_and_leaves_nothing(tmp_path: Path, session: Session) -> None:
    """Its recording is thrown away, and it makes no folder."""
    config = configured(
        tmp_path, tool="torch", schedule={"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    )
    callback = following(config, worker := local_worker(config))
    recording: dict[int, bool] = {}

    def work(step: int) -> None:
        import torch

        recording[step] = torch.autograd.profiler._is_profiler_enabled
        worker.work()

    run(callback, work, steps=4)
    assert recording == {1: False, 2: True, 3: True, 4: False}
    assert sorted(path.name for path in Path(config.save_path).iterdir()) == [
        "run.json",
        "step_000003",
    ]


@pytest.mark.parametrize("added", ["actor", "ref"])
def test_a_class_of_two_roles_is_recorded_as_what_it_was_added(
    tmp_path: Path, session: Session, added: str
) -> None:
    """Whichever role its class names last; the settings are that role's."""
    roles = {"actor": {"tool": "torch"}, "ref": {"mode": "discrete", "stages": ["ref_log_prob"]}}
    config = configured(tmp_path, roles=roles)
    worker = local_worker(config, "actor")
    worker.also(config, "ref")
    callback = ProfilingCallback(config)
    callback.add_workers(added, worker)
    run(callback, lambda step: worker.work(["ref_log_prob", "update_actor"]))
    [result] = manifest(config).workers
    other = {"actor": "ref", "ref": "actor"}[added]
    assert (result.name, result.roles) == (f"{added}_rank0", [added, other])
    assert result.identity.role == added
    assert (result.mode, result.tools) == {
        "actor": ("e2e", ["torch"]),
        "ref": ("discrete", ["spans"]),
    }[added]


def test_the_role_that_is_on_is_recorded_where_the_other_is_off(
    tmp_path: Path, session: Session
) -> None:
    """Also when the worker was added under the one that is off."""
    config = configured(tmp_path)
    worker = local_worker(configured(tmp_path, enable=False), "actor")
    worker.also(config, "ref")
    callback = following(config, worker)
    run(callback, lambda step: worker.work())
    [result] = manifest(config).workers
    assert (result.name, result.status) == ("ref_rank0", "ok")


@pytest.mark.parametrize("given", [{"enable": False}, {"roles": {"actor": {"enable": False}}}])
def test_a_worker_whose_role_is_off_says_so(
    tmp_path: Path, session: Session, caplog: Any, given: dict[str, Any]
) -> None:
    """The loop's settings are on and the worker's own are not: nothing failed,
    and nothing is silent.
    """
    config = configured(tmp_path)
    callback = following(config, local_worker(configured(tmp_path, **given)))
    run(callback, lambda step: None)
    written = manifest(config)
    assert written.workers == []
    [note] = written.notes
    assert note == (
        "no worker of role actor is captured: "
        "switched off for role actor in the settings passed to init_capture"
    )
    assert caplog.messages == [note]


def test_workers_that_are_added_again_take_the_place_of_the_first(
    tmp_path: Path, session: Session
) -> None:
    """Even in a captured step; of a worker of two roles the other role stays."""
    config = configured(tmp_path, schedule={"steps": [1, 2]})
    first, second = local_worker(config), local_worker(config)
    second.also(config, "ref")
    callback = following(config, first)
    callback.add_workers("ref", first)
    callback.on_step_begin(1)
    callback.add_workers("actor", second)
    callback.add_workers("ref", second)
    callback.on_step_end()
    callback.on_step_begin(2)
    callback.on_step_end()
    callback.on_train_end()
    assert (first.counts()["start_capture"], second.counts()["start_capture"]) == (1, 1)
    for step in (1, 2):
        assert [(worker.status, worker.roles) for worker in manifest(config, step).workers] == [
            ("ok", ["actor", "ref"])
        ]


def test_a_callback_without_workers_says_so(tmp_path: Path, session: Session, caplog: Any) -> None:
    """Once, at the first step that is captured; in every manifest;
    and the check exits with a finding.
    """
    config = configured(tmp_path, schedule={"steps": [2, 3]})
    callback = ProfilingCallback(config)
    callback.on_train_begin()
    pass_steps(callback, 1)
    assert not caplog.messages
    callback.on_step_begin(2)
    [said] = caplog.messages
    assert said.startswith("no workers and no rollout were added to the callback")
    callback.on_step_end()
    pass_steps(callback, 3)
    callback.on_train_end()
    assert caplog.messages == [said]
    assert [manifest(config, step).notes for step in (2, 3)] == [[said], [said]]
    found = check(Path(config.save_path))
    assert not found.ok
    assert sum(said in entry.reason for entry in found.artifacts) == 2


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([], "role 'actor' has no workers"),
        (
            object(),
            r"worker 0 of role 'actor' \(object\) is no object or actor handle with start_capture",
        ),
        ([CaptureMixin(), object()], r"worker 1 of role 'actor'"),
        (CaptureMixin, r"worker 0 of role 'actor' \(type\) is no object or actor handle"),
        (ray.remote(CaptureMixin), r"worker 0 of role 'actor' \(ActorClass\(CaptureMixin\)\)"),
    ],
)
def test_what_cannot_be_driven_is_refused(tmp_path: Path, workers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        following(configured(tmp_path), workers)


def test_a_note_that_is_no_text_leaves_the_manifest_readable(
    tmp_path: Path, session: Session
) -> None:
    config = configured(tmp_path)
    with following(config) as callback:
        callback.add_note(3)  # type: ignore[arg-type]
        pass_steps(callback, 1, 2)
    assert "3" in manifest(config, 2).notes


@pytest.mark.parametrize(
    ("first", "second"), [("my/role", "my role"), ("x" * 80 + "a", "x" * 80 + "b")]
)
def test_roles_whose_files_would_have_the_same_names_are_refused(first: str, second: str) -> None:
    """When they are added, before one overwrites the other's traces."""
    callback = ProfilingCallback({"enable": True, "tool": "spans"})
    callback.add_workers(first, CaptureMixin())
    with pytest.raises(ConfigError, match="files of the same names"):
        callback.add_workers(second, CaptureMixin())


class _HangingWorker(CoroutineWorker):
    async def start_capture(self, request: Any) -> Any:
        await asyncio.sleep(3600)


def test_a_coroutine_that_hangs_in_its_own_loop_is_waited_for_once(tmp_path: Path) -> None:
    """It goes on when its event loop runs again; later steps find the worker busy."""
    config = settings(
        save_path=str(tmp_path), schedule={"steps": [1, 2, 3]}, timeouts={"start_s": 0.5}
    )
    loop = asyncio.new_event_loop()
    callback = ProfilingCallback(config)
    callback.add_rollout([_HangingWorker(config)], loop=loop)
    pass_steps(callback, 1, 2, 3)
    reasons = [read_manifest(tmp_path / f"step_{step:06d}").workers[0].reason for step in (1, 2, 3)]
    assert "start_capture did not return within 0.5 s" in reasons[0]
    assert all("start_capture was not waited for" in reason for reason in reasons[1:])
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_coroutine_worker_is_driven_from_an_ordinary_loop(
    tmp_path: Path, session: Session, own_loop: bool
) -> None:
    """It needs no event loop of the user's; ``loop=`` names the running one that it belongs to."""
    config = configured(tmp_path)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    callback = ProfilingCallback(config)
    callback.add_rollout([CoroutineWorker(config)], loop=loop if own_loop else None)
    try:
        run(callback, lambda step: None)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert manifest(config).workers[0].status == "ok"


def test_rollout_windows_follow_the_hooks_in_discrete_mode(
    tmp_path: Path, session: Session
) -> None:
    """A replica records from ``on_rollout_begin`` to ``on_rollout_end``,
    each time they are called.
    """
    config = configured(tmp_path, tool="torch", roles={"rollout": {"mode": "discrete"}})
    worker = local_worker(config, "rollout")
    callback = ProfilingCallback(config)
    callback.add_rollout([worker])
    callback.on_train_begin()
    callback.on_step_begin(2)
    train()
    assert worker.counts() == {}
    for _ in range(2):
        callback.on_rollout_begin()
        with stage("generate"):
            train()
        callback.on_rollout_end()
    train()
    callback.on_step_end()
    callback.on_train_end()
    written = manifest(config)
    [result] = written.workers
    assert [(a.path, a.stage, a.occurrence, a.status) for a in result.artifacts] == [
        ("rollout_rank0.rollout.torch.json.gz", "rollout", 1, "ok"),
        ("rollout_rank0.rollout.2.torch.json.gz", "rollout", 2, "ok"),
    ]
    assert [span.name for span in result.stages] == ["generate", "generate"]
    for artifact in result.artifacts:
        assert (
            len(spans(Path(config.save_path) / "step_000002" / artifact.path, "aten::addmm")) == 1
        )
    windows = [span for span in written.stages if span.name == "rollout"]
    for artifact, window in zip(result.artifacts, windows, strict=True):
        assert artifact.end_ns - artifact.begin_ns > 0
        assert window.begin_ns < artifact.end_ns


class BoundGroup(WorkerGroup):
    """A group as verl's ``spawn`` makes it: the actors know its
    methods under a prefixed name only.
    """

    def __init__(self, workers: list[Any]) -> None:
        super().__init__(workers)
        for method in ("start_capture", "stop_capture"):
            setattr(self, method, functools.partial(super().execute_all_async, method))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise AttributeError(f"the actor has no {method_name}, only actor_{method_name}")


def test_ray_actors_record_a_step_together(tmp_path: Path, pool: Pool) -> None:
    """Two ranks, a threaded actor, and an async one, which goes on to serve requests:
    all in one manifest.
    """
    config = configured(tmp_path, tool="torch")
    actors = pool.sync[:2]
    set_up(config, actors)
    set_up(config, [pool.asynchronous], "rollout")
    set_up(config, [pool.threaded], "critic")
    callback = following(config, actors)
    callback.add_workers("critic", pool.threaded)
    callback.add_rollout([pool.asynchronous])
    everyone = [*actors, pool.asynchronous, pool.threaded]
    running = []

    def work(step: int) -> None:
        running.extend(pool.asynchronous.generate.remote(0.3) for _ in range(3) if step == 1)
        ray.get([actor.work.remote() for actor in everyone])
        ray.get([pool.asynchronous.generate.remote() for _ in range(3)])

    run(callback, work)
    assert ray.get(running) == ["text"] * 3
    written = manifest(config)
    assert {result.name: result.status for result in written.workers} == {
        "actor_rank0": "ok",
        "actor_rank1": "ok",
        "critic_rank0": "ok",
        "rollout_rank0": "ok",
    }
    assert len({result.identity.pid for result in written.workers}) == 4
    update = next(span for span in written.stages if span.name == "update_actor")
    for result in written.workers:
        [artifact] = result.artifacts
        assert artifact.status == "ok"
        path = Path(config.save_path) / "step_000002" / artifact.path
        assert spans(path, "aten::addmm")
        assert spans(path, "update_actor")[0]["cat"] == "user_annotation"
        for span in result.stages:
            assert update.begin_ns <= span.begin_ns <= span.end_ns <= update.end_ns
    generated = [
        span for result in written.workers for span in result.stages if span.name == "generate"
    ]
    assert len(generated) == 3
    starts = [count["start_capture"] for count in ray.get([a.counts.remote() for a in everyone])]
    assert starts == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [WorkerGroup, BoundGroup])
def test_a_worker_group_is_called_by_its_convention(
    tmp_path: Path, pool: Pool, kind: type[WorkerGroup]
) -> None:
    """Once per start and once per stop, for any number of workers and of roles that it has."""
    config = configured(tmp_path)
    group = kind(set_up(config, pool.sync[:2]))
    callback = following(config, group)
    callback.add_workers("ref", kind(pool.sync[:2]))
    set_up(config, [pool.sync[2]], "critic")
    callback.add_workers("critic", pool.sync[2])
    callback.add_workers("reward", [pool.sync[2]])
    run(callback, lambda step: None, steps=5)
    assert group.calls == ["start_capture", "stop_capture"]
    assert (
        ray.get([actor.counts.remote() for actor in pool.sync])
        == [{"start_capture": 1, "stop_capture": 1}] * 3
    )
    assert [(result.name, result.roles) for result in manifest(config).workers] == [
        ("actor_rank0", ["actor", "ref"]),
        ("actor_rank1", ["actor", "ref"]),
        ("critic_rank0", ["critic", "reward"]),
    ]


@pytest.mark.parametrize(("ranks", "names"), [("1", ["actor_rank1"]), ("7", [])])
def test_ranks_that_are_not_selected_have_no_entry(
    tmp_path: Path, pool: Pool, caplog: Any, ranks: str, names: list[str]
) -> None:
    """A selection that matches nobody is in the manifest and in the log."""
    config = configured(tmp_path, select={"ranks": ranks})
    run(following(config, set_up(config, pool.sync[:2])), lambda step: None)
    written = manifest(config)
    assert [result.name for result in written.workers] == names
    assert len(written.notes) == (not names)
    for note in written.notes:
        assert "matches none of 2 workers of role actor" in note
        assert note in caplog.messages


def test_unknown_roles_in_the_settings_are_noted(
    tmp_path: Path, session: Session, caplog: Any
) -> None:
    """In ``select.roles`` and in ``roles``, with a guess, once;
    workers may come when training has begun.
    """
    roles = {"select": {"roles": ["actor", "acctor"]}, "roles": {"rolout": {"mode": "discrete"}}}
    config = configured(tmp_path, schedule={"every": 1}, **roles)
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", local_worker(config))
        pass_steps(callback, 1, 2)
    selected, unused = manifest(config, 1).notes
    assert selected.startswith(
        "select.roles: no workers were added as 'acctor'; did you mean 'actor'?"
    )
    assert unused.startswith("roles: no workers were added as 'rolout'")
    assert manifest(config, 2).notes == [selected, unused]
    assert [caplog.messages.count(note) for note in (selected, unused)] == [1, 1]


def test_roles_that_are_not_selected_are_not_called(tmp_path: Path, session: Session) -> None:
    """No call at all reaches a role that is left out."""
    config = configured(tmp_path, select={"roles": ["actor"]})
    callback = following(config)
    callback.add_workers("critic", critic := TrainWorker())
    run(callback, lambda step: None)
    assert critic.counts() == {}
    assert [result.name for result in manifest(config).workers] == ["actor_rank0"]


def test_workers_with_another_clock_are_put_on_the_controllers(tmp_path: Path, pool: Pool) -> None:
    """The offset is found within its bound, and again at the end, for clocks that drift;
    it corrects.
    """
    true_ns, drift_ns = -3600 * 1_000_000_000, 500_000_000
    config = configured(tmp_path, tool="torch")
    set_up(config, pool.sync[:1])
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1, clock_ns=true_ns))
    callback = following(config, pool.sync[:2])

    def work(step: int) -> None:
        ray.get([actor.work.remote(seconds=0.05) for actor in pool.sync[:2]])
        if step == 2:
            ray.get(pool.sync[1].drift.remote(drift_ns))

    try:
        run(callback, work)
    finally:
        ray.get(pool.sync[1].set_up.remote(config, "actor", 1))
    written = manifest(config)
    here, there = sorted(written.clocks, key=lambda clock: clock.samples)
    assert (here.samples, here.offset_ns, here.error_ns) == (0, 0, 0)
    assert there.clock_domain == "shifted"
    assert there.samples > 2
    assert abs(there.offset_ns - true_ns) <= there.error_ns
    assert abs(there.closing_offset_ns - true_ns - drift_ns) <= there.closing_error_ns
    assert 0 < there.error_ns < 5_000_000_000
    shifted = next(result for result in written.workers if result.identity.rank == 1)
    update = next(span for span in written.stages if span.name == "update_actor")
    [span] = shifted.stages
    assert abs(span.begin_ns - update.begin_ns) > 3_000_000_000_000
    offset_ns = written.offset_ns(shifted.identity)
    slack_ns = there.error_ns + drift_ns
    assert update.begin_ns - slack_ns <= span.begin_ns - offset_ns
    assert span.end_ns - offset_ns <= update.end_ns + slack_ns
    assert [a.status for result in written.workers for a in result.artifacts] == ["ok", "ok"]


class Server(RolloutCaptureMixin):
    """A replica with an engine of its own, in the process of the loop."""

    def __init__(self, config: ProfilingConfig, replica: int) -> None:
        self.requests = RequestLog()
        self.init_capture(config, replica=replica, requests=self.requests)

    def generate(self) -> None:
        for number in range(2):
            with self.requests.open(id=f"{number}", prompt_tokens=3) as request:
                request.response_tokens = 4


@pytest.mark.parametrize("steps", [[2], [2, 3]])
def test_requests_and_versions_of_all_rollout_windows_reach_the_manifest(
    tmp_path: Path, session: Session, steps: list[int]
) -> None:
    """A step may generate several times, as DAPO does;
    of several steps each window knows its own.
    """
    schedule = {"steps": steps, "continuous": True}
    config = configured(tmp_path, mode="discrete", tool="torch", schedule=schedule)
    server = Server(config, 0)
    callback = ProfilingCallback(config)
    callback.add_rollout([server])
    windows = [(2, 1), (2, 2), (2, 3)] if len(steps) == 1 else [(2, 1), (3, 2)]
    for step in steps:
        callback.on_step_begin(step)
        for version in (version for of_step, version in windows if of_step == step):
            server.set_policy_version(version)
            callback.on_rollout_begin()
            server.generate()
            callback.on_rollout_end()
        callback.on_step_end()
    callback.on_train_end()
    [result] = manifest(config).workers
    versions = [version for _, version in windows]
    assert (result.step, result.policy_versions) == (2, versions)
    assert [request.policy_version for request in result.requests] == [
        one for one in versions for _ in "ab"
    ]
    assert [(a.step, *a.policy_versions) for a in result.artifacts] == windows


@pytest.mark.parametrize("order", [("actor", "rollout"), ("rollout",)])
def test_replicas_that_share_a_process_lose_no_request(
    tmp_path: Path, session: Session, order: tuple[str, ...]
) -> None:
    """Whichever object of the process was added first: the recording is one,
    the requests are each one's.
    """
    config = configured(tmp_path)
    worker, servers = (
        local_worker(config, "actor"),
        [Server(config, replica) for replica in range(2)],
    )
    callback = ProfilingCallback(config)
    for role in order:
        if role == "actor":
            callback.add_workers("actor", worker)
        else:
            callback.add_rollout(servers)
    run(callback, lambda step: [server.generate() for server in servers])
    [result] = manifest(config).workers
    assert sorted((request.replica, request.id) for request in result.requests) == [
        (0, "0"),
        (0, "1"),
        (1, "0"),
        (1, "1"),
    ]
    assert result.policy_versions == [1]
