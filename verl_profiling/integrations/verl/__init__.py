"""The verl plugin: profiles ``verl.trainer.main_ppo`` when its configuration has ``profiling``.

verl loads it in every process of a run, through the entry point in the group ``verl.plugins`` (or
``VERL_USE_EXTERNAL_MODULES=verl_profiling.integrations.verl``). That happens while ``verl`` itself
is being imported, so nothing of verl is imported here: each hook waits for the module it concerns.

The table below and docs/verl.md list what is hooked. Without ``profiling`` in the configuration the
hooks change nothing. No version of verl is refused: what does not fit is not recorded, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_profiling.integrations.hooks import Hook

__all__ = ["HOOKS", "TESTED", "untested"]

TESTED = ("0.9.0", "0.9.1")
"""Versions of verl with which the tests are run; whole runs are of the last one."""


def _asynchronous(config: Any) -> bool:
    return "rollout" in config  # resources of engines that have processes of their own


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


_ENGINE = "actor_rollout_ref.rollout.name"

_RECORDS = {
    "verl.utils.profiler": {
        "trainer:hook_timers": "steps, rollouts and the controller's stages",
        "trajectories:hook_simple_timer": "what agent loops time themselves",
    },
    "verl.trainer.ppo.v1.trainer_base": {
        "trainer:hook_v1_trainer": "the runs of V1 trainers",
        "trainer:hook_v1_rollout": "the begin of a rollout, when prompts are sent out",
    },
    "verl.trainer.ppo.ray_trainer": {
        "trainer:hook_v0_trainer": "the runs of RayPPOTrainer",
    },
    "verl.experimental.one_step_off_policy.ray_trainer": {
        "async_trainer:check_one_step_off": "steps of one-step-off trainers, and the rollout beside them",
    },
    "verl.experimental.fully_async_policy.fully_async_trainer": {
        "async_trainer:check_fully_async": "parameter versions of fully asynchronous trainers",
    },
    "verl.experimental.fully_async_policy.fully_async_rollouter": {
        "async_trainer:check_rollouter": "the rollouter's samples, queue and pauses (role rollouter)",
    },
    "verl.utils.tracking": {
        "trainer:hook_tracking": "verl's metrics in manifests, and the reports' numbers in verl's trackers",
    },
    "verl.trainer.constants_ppo": {
        "launch:hook_runtime_env": "kernels of GPUs, on images that have NVTX load CUPTI",
    },
    "verl.single_controller.ray.base": {
        "launch:hook_worker_groups": "training workers with tool nsys",
    },
    "verl.workers.engine_workers": {
        "workers:hook_workers": "the roles actor, ref and critic",
        "workers:hook_actor_stages": "stages of the actor and the reference model",
        "workers:hook_critic_stages": "stages of the critic",
        "workers:hook_mini_batches": "mini-batches",
        "workers:hook_checkpoints": "stages of workers that save or load a checkpoint",
    },
    "verl.workers.engine.fsdp.transformer_impl": {
        "workers:hook_fsdp_engine": "micro-batches of FSDP engines",
        "workers:hook_offloading": "what FSDP engines move between host and device",
    },
    "verl.workers.engine.megatron.transformer_impl": {
        "workers:hook_offloading": "what Megatron engines move between host and device",
    },
    "verl.workers.rollout.vllm_rollout.vllm_async_server": {
        "servers:hook_vllm_server": "the role rollout, with vLLM",
        "servers:hook_versions": "policy versions of requests",
        "launch:hook_vllm_replica": "vLLM engines with tool nsys",
    },
    "verl.workers.rollout.sglang_rollout.async_sglang_server": {
        "servers:hook_sglang_server": "the role rollout, with SGLang",
        "servers:hook_versions": "policy versions of requests",
    },
    "verl.experimental.agent_loop.agent_loop": {
        "trajectories:hook_agent_loops": "trajectories (role agent_loop)",
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        "trajectories:hook_tool_loop": "tool calls of trajectories",
    },
    "verl.workers.rollout.llm_server": {
        "trajectories:hook_clients": "requests of trajectories",
    },
    "verl.experimental.teacher_loop.teacher_manager": {
        "trajectories:hook_teachers": "requests to teachers",
    },
    "verl.experimental.reward_loop.reward_loop": {
        "trajectories:hook_reward_loops": "scoring (role reward)",
    },
    "verl.trainer.ppo.v1.agent_loop_tq": {
        "trainer:hook_dispatch": "the dispatch of prompts",
    },
    "verl.trainer.ppo.v1.replay_buffer": {
        "trainer:hook_replay_buffer": "polling the replay buffer, and the fate of trajectories",
    },
    "transfer_queue": {
        "trainer:hook_transfer_queue": "waiting for TransferQueue, in the trainer and in agent loops",
    },
}
"""What is recorded: by module of verl, and by function of this package that is called with the module."""

_NEEDED = ("trainer:hook_timers", "trainer:hook_v1_trainer", "trainer:hook_v0_trainer")
"""Hooks without which nothing is recorded."""

_USED_BY = {
    "verl.trainer.ppo.v1.trainer_base": _v1,
    "verl.trainer.ppo.ray_trainer": _v0,
    "verl.experimental.one_step_off_policy.ray_trainer": _one_step_off,
    "verl.experimental.fully_async_policy.fully_async_trainer": _fully_async,
    "verl.experimental.fully_async_policy.fully_async_rollouter": _fully_async,
    "verl.workers.engine.megatron.transformer_impl": _chooses("actor_rollout_ref.actor.strategy", "megatron"),
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _chooses(_ENGINE, "vllm"),
    "verl.workers.rollout.sglang_rollout.async_sglang_server": _chooses(_ENGINE, "sglang"),
    "verl.trainer.ppo.v1.agent_loop_tq": _v1,
    "verl.trainer.ppo.v1.replay_buffer": _v1,
    "transfer_queue": _v1,
}
"""Which runs import a module, if not all do, by their configuration."""

HOOKS = tuple(
    Hook(
        module=module,
        put_in=put_in,
        records=records,
        needed=put_in in _NEEDED,
        used_by=_USED_BY.get(module, lambda config: True),
    )
    for module, hooks in _RECORDS.items()
    for put_in, records in hooks.items()
)
"""Hooks of one module are put in from top to bottom."""


def untested() -> str | None:
    """Return a sentence on the version of verl, if nobody has tested it."""
    from verl import __version__ as version

    if version in TESTED:
        return None
    return f"verl {version} was not tested with this package, {' and '.join(TESTED)} were"


for _hook in HOOKS:
    _hook.await_module()
