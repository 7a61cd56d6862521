"""The verl plugin: profiles ``verl.trainer.main_ppo`` when its configuration has ``profiling``.

verl loads it in every process of a run, through the entry point in the group ``verl.plugins`` (or
``VERL_USE_EXTERNAL_MODULES=verl_profiling.integrations.verl``). That happens while ``verl`` itself
is being imported, so nothing of verl is imported here: each hook runs once its module is imported.

The table below and docs/verl.md list what is hooked. Without ``profiling`` in the configuration the
hooks change nothing. Any version of verl is accepted: a part whose hook does not fit is not recorded, and a
warning lists it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_profiling.integrations.hooks import Hook

__all__ = ["HOOKS", "TESTED", "untested"]

TESTED = ("0.9.0", "0.9.1")
"""Versions of verl that the tests run with; end-to-end runs use only the newest of them."""


def _always(config: Any) -> bool:
    return True


def _asynchronous(config: Any) -> bool:
    return "rollout" in config  # a block for the GPUs of rollout engines outside of the training processes


def _fully_async(config: Any) -> bool:
    return "async_training" in config


def _one_step_off(config: Any) -> bool:
    return _asynchronous(config) and not _fully_async(config)


def _v1(config: Any) -> bool:
    return bool(config.get("trainer", {}).get("use_v1", True)) and not _asynchronous(config)


def _v0(config: Any) -> bool:
    return not _v1(config)


def _chooses(path: str, name: str) -> Callable[[Any], bool]:
    def chosen(config: Any) -> bool:
        for key in path.split("."):
            config = config.get(key, {})
        return bool(config == name)

    return chosen


_megatron = _chooses("actor_rollout_ref.actor.strategy", "megatron")
_vllm, _sglang = (_chooses("actor_rollout_ref.rollout.name", name) for name in ("vllm", "sglang"))

_RECORDS = {
    ("verl.utils.profiler", _always): {
        "trainer:hook_timers": "steps, rollouts and the controller's stages",
        "trajectories:hook_simple_timer": "what agent loops time themselves",
    },
    ("verl.trainer.ppo.v1.trainer_base", _v1): {
        "trainer:hook_v1_trainer": "the runs of V1 trainers",
        "trainer:hook_v1_rollout": "the begin of a rollout, when prompts are sent out",
    },
    ("verl.trainer.ppo.ray_trainer", _v0): {
        "trainer:hook_v0_trainer": "the runs of RayPPOTrainer",
    },
    ("verl.experimental.one_step_off_policy.ray_trainer", _one_step_off): {
        "async_trainer:check_one_step_off": "steps of one-step-off trainers, and the rollout beside them",
    },
    ("verl.experimental.fully_async_policy.fully_async_trainer", _fully_async): {
        "async_trainer:check_fully_async": "parameter versions of fully asynchronous trainers",
    },
    ("verl.experimental.fully_async_policy.fully_async_rollouter", _fully_async): {
        "async_trainer:check_rollouter": "the rollouter's samples, queue and pauses (role rollouter)",
    },
    ("verl.utils.tracking", _always): {
        "trainer:hook_tracking": "verl's metrics in manifests, and the reports' numbers in verl's trackers",
    },
    ("verl.trainer.constants_ppo", _always): {
        "launch:hook_runtime_env": "GPU kernels, on images whose NVTX loads CUPTI",
    },
    ("verl.single_controller.ray.base", _always): {
        "launch:hook_worker_groups": "training workers with tool nsys",
    },
    ("verl.workers.engine_workers", _always): {
        "workers:hook_workers": "the roles actor, ref and critic",
        "workers:hook_stages": "stages of the roles actor, ref and critic",
    },
    ("verl.workers.engine.fsdp.transformer_impl", _always): {
        "workers:hook_fsdp_engine": "micro-batches of FSDP engines",
        "workers:hook_offloading": "what FSDP engines move between host and device",
    },
    ("verl.workers.engine.megatron.transformer_impl", _megatron): {
        "workers:hook_offloading": "what Megatron engines move between host and device",
    },
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", _vllm): {
        "servers:hook_vllm_server": "the role rollout and its policy versions, with vLLM",
        "launch:hook_vllm_replica": "vLLM engines with tool nsys",
    },
    ("verl.workers.rollout.sglang_rollout.async_sglang_server", _sglang): {
        "servers:hook_sglang_server": "the role rollout and its policy versions, with SGLang",
    },
    ("verl.experimental.agent_loop.agent_loop", _always): {
        "trajectories:hook_agent_loops": "trajectories (role agent_loop)",
    },
    ("verl.experimental.agent_loop.tool_agent_loop", _always): {
        "trajectories:hook_tool_loop": "tool calls of trajectories",
    },
    ("verl.workers.rollout.llm_server", _always): {
        "trajectories:hook_clients": "requests of trajectories",
    },
    ("verl.experimental.teacher_loop.teacher_manager", _always): {
        "trajectories:hook_teachers": "requests to teachers",
    },
    ("verl.experimental.reward_loop.reward_loop", _always): {
        "trajectories:hook_reward_loops": "scoring (role reward)",
    },
    ("verl.trainer.ppo.v1.agent_loop_tq", _v1): {
        "trainer:hook_dispatch": "the dispatch of prompts",
    },
    ("verl.trainer.ppo.v1.replay_buffer", _v1): {
        "trainer:hook_replay_buffer": "polling the replay buffer",
    },
    ("transfer_queue", _v1): {
        "trainer:hook_transfer_queue": "waiting for TransferQueue, in the trainer and in agent loops",
    },
}
"""The recorded part of a run for each hook function.

Grouped by the module of verl that the function is called with, and by which runs import that module.
"""

_NEEDED = ("trainer:hook_timers", "trainer:hook_v1_trainer", "trainer:hook_v0_trainer")
"""Hooks without which nothing is recorded."""

HOOKS = tuple(
    Hook(
        module=module,
        put_in=put_in,
        records=records,
        needed=put_in in _NEEDED,
        used_by=used_by,
    )
    for (module, used_by), hooks in _RECORDS.items()
    for put_in, records in hooks.items()
)
"""All hooks. Those of one module are applied in this order."""


def untested() -> str | None:
    """Return a warning if the installed version of verl is untested, else ``None``."""
    from verl import __version__ as version

    if version in TESTED:
        return None
    return f"verl {version} was not tested with this package, {' and '.join(TESTED)} were"


for _hook in HOOKS:
    _hook.await_module()
