"""The verl plugin: profiles ``verl.trainer.main_ppo`` when its configuration has ``profiling``.

verl imports this package in every process of a run, by the entry point in the group
``verl.plugins`` or by ``VERL_USE_EXTERNAL_MODULES=verl_profiling.integrations.verl``. At that time
``verl`` itself is being imported, so no module of verl is imported here. Each hook is applied after
the import of its module.

The table below and docs/verl.md list the hooks. Without ``profiling`` in the configuration, the
hooks change nothing. Any version of verl is accepted: if a hook does not fit, its part of the run
is not recorded, and a warning lists the part.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from verl_profiling.integrations import warn_of_broken_package

if TYPE_CHECKING:
    from verl_profiling.integrations.hooks import Hook

__all__ = ["HOOKS"]

logger = logging.getLogger(__name__)

EVERY = ""
"""The part of verl that every run uses."""


def parts_of(config: Any) -> set[str]:
    """Return the parts of verl that a run uses: trainers, backend and engine, besides
    :data:`EVERY`. For example ``{"", "v1", "fsdp", "vllm"}``.
    """
    apart = (
        "rollout" in config
    )  # a block for the GPUs of rollout engines outside of the training processes
    if "async_training" in config:
        trainers = {"v0", "fully_async"}
    elif apart:
        trainers = {"v0", "one_step_off"}
    else:
        trainers = {"v1" if config.get("trainer", {}).get("use_v1", True) else "v0"}
    policy = config.get("actor_rollout_ref", {})
    settings = (policy.get("actor", {}).get("strategy"), policy.get("rollout", {}).get("name"))
    return {EVERY, *trainers, *filter(None, settings)}


RECORDS = {
    ("verl.utils.profiler", EVERY): {
        "trainer:hook_timers": "steps, rollouts and the controller's stages",
        "trajectories:hook_simple_timer": "the timers of agent loops",
    },
    ("verl.trainer.ppo.v1.trainer_base", "v1"): {
        "trainer:hook_v1_trainer": "the runs of V1 trainers",
        "trainer:hook_v1_rollout": "the begin of a rollout, when prompts go to the engines",
    },
    ("verl.trainer.ppo.ray_trainer", "v0"): {
        "trainer:hook_v0_trainer": "the runs of RayPPOTrainer",
    },
    ("verl.experimental.one_step_off_policy.ray_trainer", "one_step_off"): {
        "async_trainer:check_one_step_off": "steps and background rollouts of one-step-off "
        "trainers",
    },
    ("verl.experimental.fully_async_policy.fully_async_trainer", "fully_async"): {
        "async_trainer:check_fully_async": "parameter versions of fully asynchronous trainers",
    },
    ("verl.experimental.fully_async_policy.fully_async_rollouter", "fully_async"): {
        "async_trainer:check_rollouter": "the rollouter's samples, queue and pauses (role "
        "rollouter)",
    },
    ("torchdata.stateful_dataloader.stateful_dataloader", EVERY): {
        "trainer:hook_data_loader": "waiting for the data loader",
    },
    ("verl.checkpoint_engine.base", EVERY): {
        "trainer:hook_weight_sync": "the parts of weight updates",
    },
    ("verl.utils.tracking", EVERY): {
        "trainer:hook_tracking": "verl's metrics in manifests, and the reports' numbers in "
        "verl's trackers",
    },
    ("verl.trainer.constants_ppo", EVERY): {
        "launch:hook_runtime_env": "GPU kernels, on images whose NVTX loads CUPTI",
    },
    ("verl.single_controller.ray.base", EVERY): {
        "launch:hook_worker_groups": "training workers with tool nsys",
    },
    ("verl.workers.engine_workers", EVERY): {
        "workers:hook_workers": "the roles actor, ref and critic",
        "workers:hook_stages": "stages of the roles actor, ref and critic",
    },
    ("verl.workers.engine.fsdp.transformer_impl", EVERY): {
        "workers:hook_fsdp_engine": "micro-batches of FSDP engines",
        "workers:hook_work": "the work of FSDP engines' batches",
        "workers:hook_offloading": "offloading of FSDP engines between host and device",
    },
    ("verl.workers.engine.megatron.transformer_impl", "megatron"): {
        "workers:hook_work": "the work of Megatron engines' batches",
        "workers:hook_offloading": "offloading of Megatron engines between host and device",
    },
    ("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "vllm"): {
        "weight_buckets:hook_vllm_buckets": "the buckets of weight updates, with vLLM",
    },
    ("verl.workers.rollout.sglang_rollout.sglang_rollout", "sglang"): {
        "weight_buckets:hook_sglang_buckets": "the buckets of weight updates, with SGLang",
    },
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", "vllm"): {
        "workers:hook_vllm_server": "the role rollout and its policy versions, with vLLM",
        "launch:hook_vllm_replica": "vLLM engines with tool nsys",
    },
    ("verl.workers.rollout.sglang_rollout.async_sglang_server", "sglang"): {
        "workers:hook_sglang_server": "the role rollout and its policy versions, with SGLang",
    },
    ("verl.experimental.agent_loop.agent_loop", EVERY): {
        "trajectories:hook_agent_loops": "trajectories (role agent_loop)",
    },
    ("verl.experimental.agent_loop.tool_agent_loop", EVERY): {
        "trajectories:hook_tool_loop": "tool calls of trajectories",
    },
    ("verl.workers.rollout.llm_server", EVERY): {
        "trajectories:hook_clients": "requests of trajectories",
    },
    ("verl.experimental.reward_loop.reward_loop", EVERY): {
        "trajectories:hook_reward_loops": "scoring (role reward)",
    },
    ("verl.trainer.ppo.v1.agent_loop_tq", "v1"): {
        "trainer:hook_dispatch": "the dispatch of prompts",
    },
    ("verl.trainer.ppo.v1.replay_buffer", "v1"): {
        "trainer:hook_replay_buffer": "polling the replay buffer",
    },
    ("transfer_queue", "v1"): {
        "trainer:hook_transfer_queue": "waiting for TransferQueue, in the trainer and in "
        "agent loops",
    },
}
"""The hook functions, each with the part of a run that it records.

The keys are the hooked module of verl, and the part of verl with that module.
"""

_NEEDED = ("trainer:hook_timers", "trainer:hook_v1_trainer", "trainer:hook_v0_trainer")
"""Hooks without which nothing is recorded."""


def _await_modules() -> tuple[Hook, ...]:
    """Let each hook wait for the import of its module; return the hooks in the table's order."""
    from verl_profiling.integrations.hooks import Hook

    hooks = []
    for (module, part), functions in RECORDS.items():
        for put_in, records in functions.items():
            needed = put_in in _NEEDED
            hook = Hook(module=module, put_in=put_in, records=records, needed=needed, part=part)
            hook.await_module()
            hooks.append(hook)
    return tuple(hooks)


def _warn_of_other_verl() -> None:
    """Warn if the verl that is being imported lacks modules without which nothing is recorded.

    The hooks of such modules never run, so they cannot warn themselves.
    """
    from verl_profiling.integrations.hooks import usable

    if not usable({EVERY}) or not (usable({"v0"}) or usable({"v1"})):
        from verl_profiling.integrations.verl.versions import TESTED

        logger.warning(
            "verl_profiling profiles nothing of this verl, which runs on (%s); install verl %s",
            "; ".join(str(hook.problem) for hook in HOOKS if hook.needed and hook.problem),
            " or ".join(TESTED),
        )


HOOKS: tuple[Hook, ...] = ()
try:
    HOOKS = _await_modules()
    if "verl" in sys.modules:
        _warn_of_other_verl()
except Exception as _error:  # e.g. of a dependency; verl would not show it
    warn_of_broken_package(_error)
