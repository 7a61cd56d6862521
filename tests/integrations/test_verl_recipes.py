"""The recipes' commands and verl's own examples, against verl's real configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.verl_runs import search_path
from verl_profiling.files.run_files import read_manifest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


def run_script(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a recipe with this interpreter."""
    return subprocess.run(
        command,
        env={**os.environ, "PYTHON": sys.executable, "HYDRA_FULL_ERROR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("verl_grpo_cpu/run.sh", "e2e profile of actor, rollout, agent_loop, reward in"),
        ("verl_agent_cpu/run.sh", "e2e profile of actor, rollout, agent_loop, reward in"),
        ("verl_agent_cpu/run_gpu.sh", "e2e profile of actor, ref, rollout, agent_loop, reward in"),
        ("verl_grpo_gpu/run_e2e.sh", "e2e profile of actor, ref, rollout"),
        ("verl_grpo_gpu/run_discrete.sh", "discrete profile of actor, ref, rollout"),
        ("verl_grpo_gpu/run_megatron.sh", "e2e profile of actor, ref, rollout"),
        ("verl_grpo_gpu/run_nsys.sh", "e2e profile of actor, ref, rollout, agent_loop, reward in"),
        ("verl_grpo_npu/run_e2e.sh", "e2e profile of actor, ref, rollout, agent_loop, reward in"),
        (
            "verl_grpo_npu/run_discrete.sh",
            "discrete profile of actor, ref, rollout, agent_loop, reward in",
        ),
    ],
)
def test_dry_runs_check_the_configuration(script: str, says: str, tmp_path: Path) -> None:
    """A dry run prints the command, and verl's own check and this package's find nothing wrong."""
    run = run_script(str(ROOT / "recipes" / script), f"hydra.run.dir={tmp_path}", DRY_RUN="1")
    assert run.returncode == 0, run.stderr
    assert "python -m verl.trainer.main_ppo --config-dir" in run.stdout
    assert says in run.stdout


@pytest.mark.parametrize(
    ("trainer", "main", "roles"),
    [
        ("one_step_off", "one_step_off_policy.main_ppo", "actor, rollout, agent_loop, reward in"),
        ("fully_async", "fully_async_policy.fully_async_main", "agent_loop, reward, rollouter in"),
    ],
)
def test_asynchronous_trainers_are_checked_too(
    trainer: str, main: str, roles: str, tmp_path: Path
) -> None:
    """Their own main module is printed, and verl's check of it finds nothing wrong."""
    script = str(ROOT / "recipes/verl_async_cpu/run.sh")
    run = run_script(script, f"hydra.run.dir={tmp_path}", TRAINER=trainer, DRY_RUN="1")
    assert run.returncode == 0, run.stderr
    assert f"python -m verl.experimental.{main} --config-dir" in run.stdout
    assert roles in run.stdout
    assert "not recorded: " not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-m", "verl.trainer.sft_trainer"), "SFT is profiled by verl's own profiler"),
        (("-m", "verl.trainer.main_po"), "verl.trainer.main_ppo"),
        (("-m",), "-m : "),
        (("-m", ".x"), "-m .x: cannot be imported: "),
        (
            ("-m", "recipes.custom_worker"),
            "recipes.custom_worker: has no function under @hydra.main",
        ),
        (("-m", "recipes.custom_worker.score"), "as its configuration has no actor_rollout_ref"),
    ],
)
def test_other_main_modules_are_refused_by_name(arguments: tuple[str, ...], says: str) -> None:
    """SFT has no steps to profile; a name that is misspelt is told verl's;
    another loop is none of verl's.
    """
    run = run_script(sys.executable, "-m", "verl_profiling.integrations.verl.dry_run", *arguments)
    assert run.returncode == 1
    assert says in run.stderr


OWN_MAIN = """
import hydra

@hydra.main(config_path=".", config_name="own", version_base=None)
def main(config):
    raise SystemExit("training began")

if __name__ == "__main__":
    main()
"""
OLDER_VLLM = """
from vllm.config import ProfilerConfig
del ProfilerConfig.__dataclass_fields__["max_iterations"]
"""
OWN_CONFIG = """
hydra: {searchpath: [pkg://verl.trainer.config]}
defaults: [ppo_trainer, _self_]
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor: {ppo_micro_batch_size_per_gpu: 1}
  rollout: {name: vllm, log_prob_micro_batch_size_per_gpu: 1}
trainer: {n_gpus_per_node: 1, total_training_steps: 4}
"""


def check_own_main(
    folder: Path, config: str, *overrides: str, main: str = OWN_MAIN
) -> subprocess.CompletedProcess[str]:
    """Check a recipe that has a main module and a configuration of its own."""
    (folder / "own_recipe").mkdir()
    (folder / "own_recipe" / "train.py").write_text(main)
    (folder / "own_recipe" / "own.yaml").write_text(config)
    command = (
        sys.executable,
        "-m",
        "verl_profiling.integrations.verl.dry_run",
        "-m",
        "own_recipe.train",
    )
    return run_script(*command, *overrides, PYTHONPATH=search_path(folder))


def test_a_main_module_of_ones_own_needs_no_search_path(tmp_path: Path) -> None:
    """Its configuration is composed as in the run,
    and finds the group although it has a path of its own.
    """
    run = check_own_main(tmp_path, OWN_CONFIG, "+profiling=e2e", "profiling.schedule.steps=[2,3]")
    assert run.returncode == 0, run.stderr
    assert "python -m own_recipe.train +profiling=e2e" in run.stdout
    assert "will be captured: steps 2, 3 of actor, rollout, agent_loop, reward" in run.stdout


def test_an_option_that_the_installed_vllm_lacks_is_refused(tmp_path: Path) -> None:
    """Each engine would refuse it when all GPUs have been waited for."""
    overrides = ("+profiling=e2e", "+profiling.rollout.count=4")
    run = check_own_main(tmp_path, OWN_CONFIG, *overrides, main=OLDER_VLLM + OWN_MAIN)
    assert run.returncode == 1
    assert "profiling: rollout.count: vLLM" in run.stderr
    assert "training began" not in run.stdout + run.stderr


def test_a_word_in_the_place_of_settings_is_one_clear_sentence(tmp_path: Path) -> None:
    """``profiling: e2e`` beside the defaults is no group: the message says so once,
    with the remedy.
    """
    run = check_own_main(tmp_path, f"{OWN_CONFIG}profiling: e2e\n")
    assert run.returncode == 1
    [line] = [line for line in run.stderr.splitlines() if line.startswith("profiling: ")]
    assert line.count("profiling: ") == 1
    assert "is the text 'e2e'" in line
    assert "+profiling=e2e" in line


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("global_profiler.steps=[2]", "verl's own profiler is switched on too"),
        ("profiling.mode=both", "profiling: mode"),
        (
            "profiling.tool=nsys",
            "roles.actor.tool: nsys records CUDA devices, and trainer.device is 'cpu'",
        ),
    ],
)
def test_dry_runs_refuse_what_would_fail(override: str, says: str, tmp_path: Path) -> None:
    """A command that the trainer would refuse is refused before it is queued,
    with the key named.
    """
    script = ROOT / "recipes/verl_grpo_cpu/run.sh"
    run = run_script(str(script), f"hydra.run.dir={tmp_path}", override, DRY_RUN="1")
    assert run.returncode != 0
    assert says in run.stderr


def test_a_worker_of_ones_own_is_profiled(tmp_path: Path) -> None:
    """A class on verl's single controller with the capture mixin is captured,
    one trace per rank; the plugin for engines changes nothing.
    """
    run = run_script(
        str(ROOT / "recipes/custom_worker/run.sh"),
        f"profiling.save_path={tmp_path / 'out'}",
        f"hydra.run.dir={tmp_path}",
        VERL_PROFILING_RUN=str(tmp_path / "plugin"),
    )
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "plugin").exists()
    manifest = read_manifest(tmp_path / "out" / "step_000002")
    assert [(w.name, w.status) for w in manifest.workers] == [
        ("reward_rank0", "ok"),
        ("reward_rank1", "ok"),
    ]
    for worker in manifest.workers:
        assert [(span.name, span.depth) for span in worker.stages] == [
            ("reward", 0),
            ("batch", 1),
            ("batch", 1),
        ]
