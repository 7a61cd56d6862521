"""Other releases of verl, and verl with a change: what does not fit is named,
and nothing is refused.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from integrations.wheels import PLUGIN, run_python, sources
from verl_profiling.integrations.verl.versions import TESTED

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

HOOKED = (
    "verl.trainer.ppo.v1",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.utils.tracking",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


IMPORT = f"from {PLUGIN}.versions import untested"


def program(*modules: str) -> str:
    """Return a program that imports the hooked classes and says what does not fit."""
    lines = [*(f"import {module}" for module in modules), f"import {PLUGIN} as plugin"]
    lines += ["from verl_profiling.integrations.hooks import misfits, usable", IMPORT]
    lines += ["print(untested(), misfits(), usable(plugin.parts_of({})))"]
    return "\n".join(lines)


def check(folder: Path | None, tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Check a command with the sources of some verl, or with the installed one."""
    return run_python(
        *("-m", "verl_profiling.integrations.verl.dry_run"),
        *(
            "hydra.searchpath=[pkg://verl_profiling.conf]",
            "+profiling=e2e",
            f"hydra.run.dir={tmp_path}",
        ),
        *(
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        ),
        *(
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "algorithm.adv_estimator=grpo",
        ),
        *overrides,
        cwd=tmp_path,
        paths=(folder,) if folder is not None else (),
    )


@pytest.mark.releases
@pytest.mark.parametrize("version", TESTED[:-1])
def test_the_hooks_fit_earlier_releases(
    version: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """They have everything that is hooked, V1 trainers and agent loops included."""
    folder = sources(f"verl=={version}", pytestconfig.cache)
    run = run_python("-c", program(*HOOKED), cwd=tmp_path, paths=(folder,))
    assert run.returncode == 0, run.stderr
    assert "None [] True" in run.stdout


@pytest.mark.releases
def test_0_8_says_what_it_does_not_have(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A trainer of 0.8, which loads no plugins by itself, is hooked when the plugin was named."""
    folder = sources("verl==0.8.0", pytestconfig.cache)
    run = run_python("-c", program("verl.trainer.ppo.ray_trainer"), cwd=tmp_path, paths=(folder,))
    assert run.returncode == 0, run.stderr
    tested = " and ".join(TESTED)
    assert f"verl 0.8.0 was not tested with this package, {tested} were" in run.stdout
    assert "there is no verl.trainer.ppo.v1.trainer_base" in run.stdout


def changed(tmp_path: Path, module: str, old: str, new: str) -> Path:
    """Return the folder of a verl that is the installed one,
    but for a few letters in one module.
    """
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    folder = tmp_path / "sources"
    shutil.copytree(installed, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder


def test_every_hook_that_the_command_uses_fits(tmp_path: Path) -> None:
    """The check says which version it is, and warns of nothing that is not recorded."""
    run = check(None, tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.search(r"a tested version of verl|verl .* was not tested", run.stdout)
    assert "not recorded: " not in run.stdout


def test_the_check_ends_with_what_will_be_captured_and_leaves_nothing(tmp_path: Path) -> None:
    """Its last line names steps and roles, and no folder is left."""
    chosen = (
        "profiling.schedule.steps=[2,9]",
        "trainer.total_training_steps=8",
        "profiling.mode=discrete",
    )
    run = check(None, tmp_path, *chosen)
    assert run.returncode == 0, run.stderr
    assert "step 9" not in run.stdout, "the run ends before it"
    assert run.stdout.splitlines()[-1].startswith(
        "will be captured: step 2 of actor, rollout, agent_loop, reward"
    )
    assert not list(tmp_path.iterdir())


def test_the_check_names_what_is_not_recorded(tmp_path: Path) -> None:
    """A method that has another name costs what depends on it, and the command may run."""
    folder = changed(
        tmp_path, "verl.experimental.agent_loop.tool_agent_loop", "_call_tool", "_run_tool"
    )
    run = check(folder, tmp_path)
    assert run.returncode == 0, run.stderr
    (row,) = [
        line for line in run.stdout.splitlines() if line.startswith("warning: not recorded: ")
    ]
    assert "tool calls of trajectories" in row
    assert "has no ToolAgentLoop._call_tool" in run.stdout


def test_the_check_fails_where_nothing_would_be_recorded(tmp_path: Path) -> None:
    folder = changed(tmp_path, "verl.utils.profiler.__init__", "marked_timer", "stage_timer")
    for name in ("nvtx_profile", "performance", "mstx_profile"):
        path = folder / f"verl/utils/profiler/{name}.py"
        path.write_text(path.read_text().replace("marked_timer", "stage_timer"))
    run = check(folder, tmp_path)
    assert run.returncode != 0
    assert "profiling: nothing would be recorded" in run.stderr
    assert "not recorded: steps, rollouts and the controller's stages" in run.stdout
