"""The environment that verl gives to all workers of a run:
NVTX is kept out of CUPTI where torch records.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from integrations.wheels import run_python
from verl_profiling.files.machine import NO_INJECTION, VARIABLE
from verl_profiling.integrations.verl.launch import hook_runtime_env


def config_of(profiling: Any) -> Any:
    """Return the parts of a verl configuration that matter here."""
    config = {
        "trainer": {"device": "cuda"},
        "global_profiler": {
            "tool": None,
            "steps": None,
            "profile_continuous_steps": False,
            "save_path": "o",
        },
        "actor_rollout_ref": {"rollout": {"name": "vllm"}},
    }
    return OmegaConf.create({**config, **({} if profiling is None else {"profiling": profiling})})


def environment(profiling: Any, given: dict[str, str] | None = None) -> dict[str, str]:

    def get_ppo_ray_runtime_env(config: Any = None) -> Any:
        return {"env_vars": dict(given or {"NCCL_DEBUG": "WARN"})}

    module = SimpleNamespace(get_ppo_ray_runtime_env=get_ppo_ray_runtime_env)
    hook_runtime_env(module)
    variables: dict[str, str] = module.get_ppo_ray_runtime_env(config_of(profiling))["env_vars"]
    return variables


@pytest.mark.parametrize(
    ("profiling", "expected"),
    [
        ({"enable": True}, True),
        ({"enable": True, "tool": "spans", "roles": {"rollout": {"tool": "torch"}}}, True),
        ({"enable": True, "tool": "spans"}, False),
        ({"enable": True, "tool": "nsys"}, False),
        ({"enable": True, "roles": {"rollout": {"tool": "nsys"}}}, False),
        ({"enable": False}, False),
        ({"enable": True, "tool": "no such tool"}, False),
        (None, False),
    ],
)
def test_the_variable_is_set_where_torch_records(profiling: Any, expected: bool) -> None:
    """Not without profiling, nor beside Nsight Systems; wrong settings are refused later,
    by the run.
    """
    assert (environment(profiling).get(VARIABLE) == NO_INJECTION) == expected
    assert environment(profiling)["NCCL_DEBUG"] == "WARN"


def test_verls_way_to_keep_the_inherited_value_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_KEEP_NVTX_INJECTION", "1")
    assert VARIABLE not in environment({"enable": True})


PROGRAM = """
import os, subprocess, sys
import ray
from omegaconf import OmegaConf
from verl.trainer.main_ppo import get_ppo_ray_runtime_env

config = OmegaConf.create({"profiling": {"enable": True}, "global_profiler": {"tool": None}})
ray.init(num_cpus=1, include_dashboard=False, runtime_env=get_ppo_ray_runtime_env(config))
show = [sys.executable, "-c", "import os; print(os.environ['NVTX_INJECTION64_PATH'])"]

@ray.remote(num_cpus=0)
def started():
    return subprocess.run(show, capture_output=True, text=True).stdout.strip()

of_its_own = {"env_vars": {"WORLD_SIZE": "1"}}
print(ray.get(started.options(runtime_env=of_its_own).remote()))
"""


@pytest.mark.verl
def test_processes_of_workers_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an image that names CUPTI: workers with an environment of their own,
    and what these start.
    """
    pytest.importorskip("verl")
    monkeypatch.setenv(VARIABLE, "/usr/local/cuda/lib64/libcupti.so")
    run = run_python("-c", PROGRAM, cwd=tmp_path)
    assert run.stdout.splitlines()[-1:] == [NO_INJECTION], run.stderr[-3000:]
