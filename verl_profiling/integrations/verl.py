"""The verl plugin: profiles ``verl.trainer.main_ppo`` when its configuration has ``profiling``.

verl loads it in every process of a run, through the entry point in the group ``verl.plugins`` (or
``VERL_USE_EXTERNAL_MODULES=verl_profiling.integrations.verl``). That happens while ``verl`` itself
is being imported, so nothing of verl is imported here: each hook waits for the module it concerns.

The table below and docs/verl.md list what is hooked. Without ``profiling`` in the configuration the
hooks change nothing. No version of verl is refused: what does not fit is not recorded, by name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_profiling.integrations.hooks import Hook
from verl_profiling.integrations.post_import import when_imported

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


def _engine(config: Any) -> str | None:
    name: str | None = config.get("actor_rollout_ref", {}).get("rollout", {}).get("name")
    return name


def _vllm(config: Any) -> bool:
    return _engine(config) == "vllm"


def _sglang(config: Any) -> bool:
    return _engine(config) == "sglang"


def _megatron(config: Any) -> bool:
    return bool(config.get("actor_rollout_ref", {}).get("actor", {}).get("strategy") == "megatron")


HOOKS = (
    Hook(
        module="verl.utils.profiler",
        put_in="verl_trainer:hook_timers",
        records="steps, rollouts and the controller's stages",
        needed=True,
    ),
    Hook(
        module="verl.trainer.ppo.v1.trainer_base",
        put_in="verl_trainer:hook_v1_trainer",
        records="the runs of V1 trainers",
        needed=True,
        used_by=_v1,
    ),
    Hook(
        module="verl.trainer.ppo.v1.trainer_base",
        put_in="verl_trainer:hook_v1_rollout",
        records="the begin of a rollout, when prompts are sent out",
        used_by=_v1,
    ),
    Hook(
        module="verl.trainer.ppo.ray_trainer",
        put_in="verl_trainer:hook_v0_trainer",
        records="the runs of RayPPOTrainer",
        needed=True,
        used_by=_v0,
    ),
    Hook(
        module="verl.experimental.one_step_off_policy.ray_trainer",
        put_in="verl_async_trainer:check_one_step_off",
        records="steps of one-step-off trainers, and the rollout beside them",
        used_by=_one_step_off,
    ),
    Hook(
        module="verl.experimental.fully_async_policy.fully_async_trainer",
        put_in="verl_async_trainer:check_fully_async",
        records="parameter versions of fully asynchronous trainers",
        used_by=_fully_async,
    ),
    Hook(
        module="verl.experimental.fully_async_policy.fully_async_rollouter",
        put_in="verl_rollouter:check_rollouter",
        records="the rollouter's samples, queue and pauses (role rollouter)",
        used_by=_fully_async,
    ),
    Hook(
        module="verl.utils.tracking",
        put_in="verl_trainer:hook_tracking",
        records="verl's metrics in manifests, and the reports' numbers in verl's trackers",
    ),
    Hook(
        module="verl.trainer.constants_ppo",
        put_in="verl_nvtx:hook_runtime_env",
        records="kernels of GPUs, on images that have NVTX load CUPTI",
    ),
    Hook(
        module="verl.single_controller.ray.base",
        put_in="verl_nsys:hook_worker_groups",
        records="training workers with tool nsys",
    ),
    Hook(
        module="verl.workers.engine_workers",
        put_in="verl_training_workers:hook_workers",
        records="the roles actor, ref and critic",
    ),
    Hook(
        module="verl.workers.engine_workers",
        put_in="verl_training_workers:hook_actor_stages",
        records="stages of the actor and the reference model",
    ),
    Hook(
        module="verl.workers.engine_workers",
        put_in="verl_training_workers:hook_critic_stages",
        records="stages of the critic",
    ),
    Hook(
        module="verl.workers.engine_workers",
        put_in="verl_training_workers:hook_mini_batches",
        records="mini-batches",
    ),
    Hook(
        module="verl.workers.engine_workers",
        put_in="verl_training_workers:hook_checkpoints",
        records="stages of workers that save or load a checkpoint",
    ),
    Hook(
        module="verl.workers.engine.fsdp.transformer_impl",
        put_in="verl_training_workers:hook_fsdp_engine",
        records="micro-batches of FSDP engines",
    ),
    Hook(
        module="verl.workers.engine.fsdp.transformer_impl",
        put_in="verl_training_workers:hook_fsdp_offloading",
        records="what FSDP engines move between host and device",
    ),
    Hook(
        module="verl.workers.engine.megatron.transformer_impl",
        put_in="verl_training_workers:hook_megatron_offloading",
        records="what Megatron engines move between host and device",
        used_by=_megatron,
    ),
    Hook(
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        put_in="verl_servers:hook_vllm_server",
        records="the role rollout, with vLLM",
        used_by=_vllm,
    ),
    Hook(
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        put_in="verl_servers:hook_vllm_versions",
        records="policy versions of requests",
        used_by=_vllm,
    ),
    Hook(
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        put_in="verl_nsys:hook_vllm_replica",
        records="vLLM engines with tool nsys",
        used_by=_vllm,
    ),
    Hook(
        module="verl.workers.rollout.sglang_rollout.async_sglang_server",
        put_in="verl_servers:hook_sglang_server",
        records="the role rollout, with SGLang",
        used_by=_sglang,
    ),
    Hook(
        module="verl.workers.rollout.sglang_rollout.async_sglang_server",
        put_in="verl_servers:hook_sglang_versions",
        records="policy versions of requests",
        used_by=_sglang,
    ),
    Hook(
        module="verl.experimental.agent_loop.agent_loop",
        put_in="verl_agent_loops:hook_agent_loops",
        records="trajectories (role agent_loop)",
    ),
    Hook(
        module="verl.experimental.agent_loop.tool_agent_loop",
        put_in="verl_agent_loops:hook_tool_loop",
        records="tool calls of trajectories",
    ),
    Hook(
        module="verl.utils.profiler",
        put_in="verl_agent_loops:hook_simple_timer",
        records="what agent loops time themselves",
    ),
    Hook(
        module="verl.workers.rollout.llm_server",
        put_in="verl_clients:hook_clients",
        records="requests of trajectories",
    ),
    Hook(
        module="verl.experimental.teacher_loop.teacher_manager",
        put_in="verl_clients:hook_teachers",
        records="requests to teachers",
    ),
    Hook(
        module="verl.experimental.reward_loop.reward_loop",
        put_in="verl_rewards:hook_reward_loops",
        records="scoring (role reward)",
    ),
    Hook(
        module="verl.trainer.ppo.v1.agent_loop_tq",
        put_in="verl_replay_buffer:hook_dispatch",
        records="the dispatch of prompts",
        used_by=_v1,
    ),
    Hook(
        module="verl.trainer.ppo.v1.replay_buffer",
        put_in="verl_replay_buffer:hook_replay_buffer",
        records="polling the replay buffer, and the fate of trajectories",
        used_by=_v1,
    ),
    Hook(
        module="transfer_queue",
        put_in="verl_transfer_queue:hook_transfer_queue",
        records="waiting for TransferQueue, in the trainer and in agent loops",
        used_by=_v1,
    ),
    Hook(
        module="verl.utils.transferqueue_utils",
        put_in="verl_transfer_queue:hook_bridge",
        records="waiting for TransferQueue, in training workers",
        used_by=_v1,
    ),
)
"""Hooks of one module are put in from top to bottom."""


def untested() -> str | None:
    """Return a sentence on the version of verl, if nobody has tested it."""
    from verl import __version__ as version

    if version in TESTED:
        return None
    return f"verl {version} was not tested with this package, {' and '.join(TESTED)} were"


def _shorten_stops(module: ModuleType) -> None:
    from verl_profiling.integrations.verl_engines import hook_vllm_profiler

    hook_vllm_profiler(module)


for _hook in HOOKS:
    _hook.await_module()
when_imported("vllm.profiler.wrapper", _shorten_stops)  # where it does not fit, only time is lost
