"""A real verl run with LoRA, offloading and checkpoints, started again to go on from its last one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from integrations.run_contract import inside
from integrations.verl_runs import REFERENCE, Run, run_verl

pytestmark = [pytest.mark.verl, pytest.mark.timeout(2400)]

SETTINGS = (
    *REFERENCE,
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.rollout.load_format=safetensors",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "trainer.resume_mode=auto",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "data.val_max_samples=4",
)
STEPS = ((0, 1), (0, 2), (1, 3))
STAGES = {"old_log_prob", "ref_log_prob", "update_actor", "update_weights", "save_checkpoint"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two steps, and a run that is resumed for the third: it records into a folder of its own."""
    folder = tmp_path_factory.mktemp("resume")
    checkpoints = f"trainer.default_local_dir={folder / 'checkpoints'}"
    first = run_verl(
        folder,
        *SETTINGS,
        checkpoints,
        "trainer.total_training_steps=2",
        "profiling.schedule.steps=[1,2,3,50]",
    )
    second = run_verl(folder, *SETTINGS, checkpoints, "profiling.schedule.steps=[2,3,60]")
    return first, replace(second, save_path=second.save_path / "run_2")


def test_the_reference_of_lora_is_the_worker_without_its_adapter(runs: tuple[Run, Run]) -> None:
    """Each stage of the worker lies inside the controller's of that name, checkpoints included."""
    for number, step in STEPS:
        controller = {span.name: span for span in runs[number].manifest(step).stages if not span.depth}
        own = [span for span in runs[number].worker(step, "actor").stages if not span.depth]
        assert {span.name for span in own} == STAGES
        assert len(own) == len(STAGES)
        for span in own:
            outer = controller[span.name]
            assert outer.begin_ns <= span.begin_ns <= span.end_ns <= outer.end_ns


def test_moving_weights_is_a_part_of_the_stage(runs: tuple[Run, Run]) -> None:
    """Parameters and optimizer are kept elsewhere, and are moved inside of the update."""
    spans = runs[0].worker(2, "actor").stages
    for name in ("load_model", "load_optimizer"):  # where the device is the CPU, both ways are called so
        assert inside(spans, name, "update_actor")
