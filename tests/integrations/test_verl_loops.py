"""Loops of one's own on verl's real trainer classes, without workers:
``fit`` as a function or coroutine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import Manifest, StageSpan

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

BASES = ("ray_trainer:RayPPOTrainer", "v1.trainer_base:PPOTrainer")


def trainer_class(place: str, mixin: bool, **members: Any) -> type[Any]:
    """Return a subclass of one of verl's trainers that has these members."""
    import verl_profiling.integrations.verl  # noqa: F401

    module, _, name = place.partition(":")
    module = module if module.startswith("verl.") else f"verl.trainer.ppo.{module}"
    base = getattr(pytest.importorskip(module), name)
    from verl_profiling.integrations.verl.trainer import ProfilingTrainerMixin

    def init(self: Any, config: Any) -> None:
        self.config, self.global_steps, self.timing = config, 0, {}

    bases = (ProfilingTrainerMixin, base) if mixin else (base,)
    cls = type("OwnTrainer", bases, {"__init__": init, **members})
    cls.__abstractmethods__ = frozenset()
    return cls


def config_of(folder: Path, **settings: Any) -> Any:
    """Return what a trainer without workers reads of verl's configuration;
    steps 1 and 2 are profiled.
    """
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "profiling": {
                "enable": True,
                "save_path": str(folder),
                "schedule": {"steps": [1, 2]},
                "roles": {"rollout": {"enable": False}},
                **settings,
            },
            "global_profiler": {"steps": None},
            "trainer": {"use_v1": False, "resume_mode": "disable"},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "engine_kwargs": {}}},
        }
    )


def manifest(folder: Path, step: int) -> Manifest:
    return read_manifest(folder / f"step_{step:06d}")


def of_name(found: Manifest, name: str) -> list[StageSpan]:
    return [span for span in found.stages if span.name == name]


def timer(name: str, timing: dict[str, float]) -> Any:
    """Return one of verl's timers, as verl's modules see it."""
    from verl.utils.profiler import marked_timer

    return marked_timer(name, timing)


def steps(self: Any) -> None:
    for self.global_steps in (1, 2):
        self.timing = {}
        with timer("step", self.timing):
            with timer(
                "start_profile", self.timing
            ):  # verl's own profiler is off: that is no stage
                pass
            with timer("gen", self.timing):
                time.sleep(0.02)
            with timer("update_actor", self.timing):
                time.sleep(0.02)


def sync_fit(self: Any) -> str:
    steps(self)
    return "trained"


async def async_fit(self: Any) -> str:
    """Train in a coroutine whose steps are no coroutines."""
    await asyncio.sleep(0)
    steps(self)
    await asyncio.sleep(0)
    return "trained"


@pytest.mark.parametrize("place", BASES)
@pytest.mark.parametrize("mixin", [True, False], ids=["mixin", "plain"])
@pytest.mark.parametrize("fit", [sync_fit, async_fit])
def test_any_fit_is_profiled(
    place: str, mixin: bool, fit: Callable[..., Any], tmp_path: Path
) -> None:
    """A ``fit`` of one's own is profiled while it runs, returns what it returns,
    and stays what it was.
    """
    trainer = trainer_class(place, mixin, fit=fit)(config_of(tmp_path))
    assert asyncio.iscoroutinefunction(trainer.fit) == asyncio.iscoroutinefunction(fit)
    outcome = trainer.fit()
    assert (asyncio.run(outcome) if asyncio.iscoroutine(outcome) else outcome) == "trained"
    for step in (1, 2):
        found = manifest(tmp_path, step)
        assert found.complete
        assert [span.name for span in found.stages] == ["rollout", "update_actor"]
        assert found.policy_version == step - 1
    last = of_name(manifest(tmp_path, 2), "update_actor")[0]
    assert last.end_ns - last.begin_ns == pytest.approx(
        trainer.timing["update_actor"] * 1e9, abs=1e6
    )


class Batch:
    """Four samples, as verl's batches have them."""

    meta_info = {"global_token_num": [10, 20, 30, 40]}

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("place", BASES)
def test_the_watch_knows_what_the_training_takes(place: str, tmp_path: Path) -> None:
    """The samples of all updates of a step, and their tokens."""

    def fit(self: Any) -> None:
        for self.global_steps in (1, 2, 3):
            with timer("step", self.timing):
                for _ in range(self.global_steps):
                    assert self._update_actor(Batch()) == "updated"

    members = {"fit": fit, "_update_actor": lambda self, batch: "updated"}
    settings = {"schedule": {"steps": []}, "watch": {"enable": True}}
    trainer_class(place, False, **members)(config_of(tmp_path, **settings)).fit()
    found = {line.step: (line.taken, line.taken_tokens) for line in WatchLogReader(tmp_path).read()}
    assert found == {1: (4, 100), 2: (8, 200), 3: (12, 300)}


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
def test_an_exception_inside_the_coroutine_passes(error: BaseException, tmp_path: Path) -> None:
    """Whatever leaves the coroutine passes, a cancellation too, and what was recorded is kept."""

    async def fit(self: Any) -> None:
        self.global_steps = 1
        with timer("step", self.timing), timer("update_actor", self.timing):
            await asyncio.sleep(0)
            raise error

    trainer = trainer_class(BASES[0], True, fit=fit)(config_of(tmp_path))
    with pytest.raises(type(error)) as caught:
        asyncio.run(trainer.fit())
    assert caught.value is error or isinstance(error, asyncio.CancelledError)
    found = manifest(tmp_path, 1)
    assert not found.complete
    assert any(type(error).__name__ in note for note in found.notes)
    assert of_name(found, "update_actor")[0].failed


class Replica:
    """A rollout replica that takes its time."""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await asyncio.sleep(0.03)

    async def sleep(self) -> None:
        await asyncio.sleep(0.05)

    release_kv_cache = resume_kv_cache = resume_generation = sleep


def manager() -> Any:
    """Return verl's manager of weight updates, with two replicas and no processes."""
    base = pytest.importorskip("verl.checkpoint_engine.base")
    made = object.__new__(base.CheckpointEngineManager)
    made.replicas = [Replica(), Replica()]
    return made


def sync_weights(self: Any) -> None:
    """Call verl's manager as its synchronous trainers do."""
    self.global_steps = 1
    updates = manager()
    with timer("step", self.timing), timer("update_weights", self.timing):
        updates.abort_replicas()
        updates.release_kv_cache_replicas()
        updates.resume_kv_cache_replicas()
        updates.resume_generation_replicas()


async def sync_weights_in_coroutine(self: Any) -> None:
    """Await it, as the fully asynchronous trainer does."""
    self.global_steps = 1
    updates = manager()
    with timer("step", self.timing), timer("update_weights", self.timing):
        await updates.abort_replicas()
        await updates.release_kv_cache_replicas()
        await updates.resume_kv_cache_replicas()
        await updates.resume_generation_replicas()


@pytest.mark.parametrize("fit", [sync_weights, sync_weights_in_coroutine])
def test_the_parts_of_a_weight_update_are_stages(fit: Callable[..., Any], tmp_path: Path) -> None:
    """Each once, for all replicas together, inside ``update_weights``; the watch has their sums."""
    config = config_of(tmp_path, watch={"enable": True})
    outcome = trainer_class(BASES[0], True, fit=fit)(config).fit()
    if asyncio.iscoroutine(outcome):
        asyncio.run(outcome)
    found = manifest(tmp_path, 1)
    parts = ["abort", "release_kv_cache", "resume", "resume"]
    assert [(span.name, span.depth) for span in found.stages] == [
        ("update_weights", 0),
        *((part, 1) for part in parts),
    ]
    assert found.stages[1].end_ns - found.stages[1].begin_ns >= 30_000_000
    (line,) = WatchLogReader(tmp_path).read()
    sums = {total.name: total for total in line.spans}
    assert (sums["update_weights/abort"].runs, sums["update_weights/resume"].runs) == (1, 2)


class Actors:
    """A worker group that has sent its weights at once."""

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        import ray

        return [ray.put({})]


def test_steps_without_a_weight_update_keep_the_version(ray_cluster: None, tmp_path: Path) -> None:
    """The warm-up of a critic: a step has the version that the engines got last."""

    def fit(self: Any) -> None:
        updates = manager()
        updates.backend, updates.actor_wg = "naive", Actors()
        updates.update_weights(0)
        for self.global_steps in (1, 2, 3):
            with timer("step", self.timing):
                if self.global_steps == 3:
                    updates.update_weights(3)

    trainer_class(BASES[0], False, fit=fit)(
        config_of(tmp_path, schedule={"steps": [2, 3]}, tool="spans")
    ).fit()
    versions = []
    for step in (2, 3):
        found = manifest(tmp_path, step)
        versions.append((found.policy_version, found.metrics["policy_version/end"]))
    assert versions == [(0, 0), (0, 3)]


@pytest.mark.parametrize(("place", "loads"), [(BASES[0], ["load_prompts"]), (BASES[1], [])])
def test_batches_and_logging_are_stages_between_steps(
    place: str, loads: list[str], tmp_path: Path
) -> None:
    """Verl's own data loader and tracker: V0 waits for batches, V1 loads a step's in one stage."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    tracking = pytest.importorskip("verl.utils.tracking")
    seen: list[list[int]] = []

    def fit(self: Any) -> None:
        loader = loaders.StatefulDataLoader([1, 2, 3, 4], batch_size=2, collate_fn=list)
        tracker = tracking.Tracking("project", "run", default_backend=["console"], config={})
        for self.global_steps, batch in enumerate(loader, 1):
            seen.append(batch)
            with timer("step", self.timing), timer("update_actor", self.timing):
                pass
            tracker.log({"loss": 1.0}, step=self.global_steps)
        assert loader.state_dict()["_num_yielded"] == 2

    trainer_class(place, True, fit=fit)(config_of(tmp_path)).fit()
    assert seen == [[1, 2], [3, 4]]
    around = [span.name for span in manifest(tmp_path, 1).around_the_step]
    assert [name for name in around if name in ("log_metrics", "load_prompts")] == [
        "log_metrics",
        *loads,
    ]


ONE_STEP_OFF = "verl.experimental.one_step_off_policy.ray_trainer:OneStepOffRayTrainer"


class TrainingStopException(Exception):
    """What verl's trainer ends by."""


def test_the_wait_for_a_batch_that_does_not_come_is_no_step(tmp_path: Path) -> None:
    """A fully asynchronous trainer learns in ``fit_step`` that there is none;
    the watch has no summary.
    """

    async def fit(self: Any) -> None:
        try:
            while True:
                await self.fit_step()
        except TrainingStopException:
            pass

    async def fit_step(self: Any) -> None:
        self.calls += 1
        with timer("step", self.timing):
            if self.calls > 4:
                raise TrainingStopException
            with timer("update_actor", self.timing):
                await asyncio.sleep(0)
            self.current_param_version = self.calls // 2

    members = {"fit": fit, "fit_step": fit_step, "current_param_version": 0, "calls": 0}
    config = config_of(tmp_path, watch={"enable": True}, schedule={"steps": [100]})
    asyncio.run(trainer_class(ONE_STEP_OFF, False, **members)(config).fit())
    assert {line.step for line in WatchLogReader(tmp_path).read()} == {1, 2}
