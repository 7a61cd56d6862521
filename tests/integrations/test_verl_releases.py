"""Other releases of verl: their real sources fit the hooks, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.wheels import PLUGIN, run_python, sources

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

HOOKED = (
    "verl.trainer.ppo.v1",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.utils.tracking",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.experimental.teacher_loop",
)


def program(*modules: str) -> str:
    """Return a program that imports the hooked classes and checks the support."""
    lines = [*(f"import {module}" for module in modules), f"import {PLUGIN} as plugin"]
    lines += ["plugin.check_support()", "print('supported without', plugin.left_out)"]
    return "\n".join(lines)


@pytest.mark.releases
def test_the_hooks_fit_0_9_0(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """The first release of 0.9 has everything that is hooked, V1 trainers and agent loops included."""
    folder = sources("verl==0.9.0", pytestconfig.cache)
    run = run_python("-c", program(*HOOKED), cwd=tmp_path, paths=(folder,))
    assert run.returncode == 0, run.stderr
    assert "supported without []" in run.stdout


@pytest.mark.releases
def test_0_8_is_refused_by_name(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A trainer of 0.8, which loads no plugins by itself, is refused when the plugin was named."""
    folder = sources("verl==0.8.0", pytestconfig.cache)
    run = run_python("-c", program("verl.trainer.ppo.ray_trainer"), cwd=tmp_path, paths=(folder,))
    assert run.returncode != 0
    assert "verl 0.8.0 is not supported; install verl>=0.9,<0.10" in run.stderr


@pytest.mark.releases
def test_0_8_is_refused_before_it_is_queued(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """The check of a command says so too; the run itself would ignore ``profiling`` in silence."""
    folder = sources("verl==0.8.0", pytestconfig.cache)
    run = run_python(
        *("-m", "verl_profiling.integrations.verl_check"),
        *("hydra.searchpath=[pkg://verl_profiling.conf]", "+profiling=e2e", f"hydra.run.dir={tmp_path}"),
        cwd=tmp_path,
        paths=(folder,),
    )
    assert run.returncode != 0
    assert "verl 0.8.0 is not supported" in run.stderr


def test_0_10_is_refused_by_name(tmp_path: Path) -> None:
    """A verl newer than the supported versions is refused, even if the hooks would fit."""
    text = f"import verl; verl.__version__ = '0.10.0.dev0'\n{program()}"
    run = run_python("-c", text, cwd=tmp_path)
    assert run.returncode != 0
    assert "verl 0.10.0.dev0 is not supported" in run.stderr


def test_a_hook_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Where a class has another name, verl is imported all the same, and profiling is refused with it."""
    text = (
        f"import {PLUGIN} as plugin, types\n"
        "hook = plugin._hook('verl_servers:hook_vllm_server', plugin._problems)\n"
        "hook(types.ModuleType('verl.renamed'))\n"
        "plugin.check_support()"
    )
    run = run_python("-c", text, cwd=tmp_path)
    assert run.returncode != 0
    assert "is not supported: verl.renamed:" in run.stderr
    assert "vLLMHttpServer" in run.stderr


def test_a_hook_of_the_rollout_that_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    """Where agent loops have another name, they are not recorded, and all else is."""
    text = (
        f"import {PLUGIN} as plugin, types\n"
        "hook = plugin._hook('verl_agent_loops:hook_agent_loops', plugin.left_out)\n"
        "hook(types.ModuleType('verl.renamed'))\n"
        "plugin.check_support()\n"
        "print(plugin.left_out)"
    )
    run = run_python("-c", text, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "verl.renamed" in run.stdout
    assert "AgentLoopWorker" in run.stdout
