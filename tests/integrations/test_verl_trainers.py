"""verl's other trainers in real runs on CPU: both asynchronous ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.verl_runs import PLUGINS, run_verl

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

PROMPTS, SAMPLES = 8, 2
VALIDATED = 4


def test_an_own_trainer_is_profiled_by_the_mixin(tmp_path: Path) -> None:
    """Once; a capture across weight updates names every policy version."""
    colocate = run_verl(
        tmp_path,
        "profiling=e2e",
        "profiling.schedule.continuous=true",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.test_freq=2",
        f"data.val_max_samples={VALIDATED}",
        "data.max_response_length=96",  # long enough to be interrupted by a weight update
        "actor_rollout_ref.rollout.max_model_len=160",
        PLUGINS=f"{PLUGINS},integrations.own_trainer",
    )
    assert colocate.code == 0, colocate.output[-4000:]
    assert "the own trainer's loop runs" in colocate.output
    assert sorted(path.name for path in colocate.save_path.glob("step_*")) == ["step_000002"]
    assert colocate.manifest(2).complete
    manifest = colocate.manifest(2)
    assert manifest.steps == [2, 3]
    assert (manifest.policy_version, manifest.metrics["policy_version/end"]) == (1, 3)
    rollout = colocate.worker(2, "rollout")
    assert rollout.policy_versions == [1, 2, 3]
    assert [(a.step, a.policy_versions) for a in rollout.artifacts] == [(2, [1, 2, 3])]
    assert rollout.requests
    assert {request.policy_version for request in rollout.requests} <= {1, 2, 3}
    names = [span.name for span in manifest.stages]
    assert names.count("rollout") == names.count("update_weights") == 2


def test_step_and_policy_version_are_on_every_rollout_artifact(tmp_path: Path) -> None:
    """Each window of generation is a separate artifact,
    with its step and the version of its weights.
    """
    separate = run_verl(
        tmp_path,
        "profiling=discrete",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipes.verl_grpo_cpu.file_weights",
        "ray_kwargs.ray_init.num_gpus=2",
        # Without hybrid engines, a log call of verl 0.9.1 at level INFO raises (it passes `flush`).
        VERL_LOGGING_LEVEL="WARN",
    )
    assert separate.code == 0, separate.output[-4000:]
    for step in (2, 3):
        manifest = separate.manifest(step)
        rollouts = [worker for worker in manifest.workers if worker.identity.role == "rollout"]
        assert {worker.status for worker in rollouts} == {"ok"}
        rollout = rollouts[-1]  # verl's main has another before it, which serves validation
        assert (manifest.step, rollout.step, rollout.policy_versions) == (step, step, [step - 1])
        assert manifest.policy_version == step - 1
        assert manifest.metrics["policy_version/end"] == step
        assert [(a.stage, a.occurrence, a.status) for a in rollout.artifacts] == [
            ("rollout", 1, "ok"),
            ("rollout", 2, "ok"),
        ]
        assert {(a.step, *a.policy_versions) for a in rollout.artifacts} == {(step, step - 1)}
        assert {request.policy_version for request in rollout.requests} <= {step - 1}
