"""The verl plugin: profiles ``verl.trainer.main_ppo`` when its configuration has ``profiling``.

verl loads it in every process of a run, through the entry point in the group ``verl.plugins`` (or
``VERL_USE_EXTERNAL_MODULES=verl_profiling.integrations.verl``). That happens while ``verl`` itself
is being imported, so nothing of verl is imported here: each hook waits for the module it concerns.

The table below and docs/verl.md list what is hooked. Without ``profiling`` in the configuration the
hooks change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.integrations.post_import import when_imported
from verl_profiling.integrations.wrapping import left_out

__all__ = ["check_support"]

logger = logging.getLogger(__name__)

_HOOKS = {
    "verl.utils.profiler": "verl_trainer:hook_timers",
    "verl.utils.tracking": "verl_trainer:hook_tracking",
    "verl.trainer.ppo.v1.trainer_base": "verl_trainer:hook_v1_trainer",
    "verl.trainer.ppo.ray_trainer": "verl_trainer:hook_v0_trainer",
    "verl.single_controller.ray.base": "verl_nsys:hook_worker_groups",
    "verl.workers.engine_workers": "verl_training_workers:hook_workers",
    "verl.workers.engine.fsdp.transformer_impl": "verl_training_workers:hook_fsdp_engine",
    "verl.workers.rollout.vllm_rollout.vllm_async_server": "verl_servers:hook_vllm_server",
    "verl.workers.rollout.sglang_rollout.async_sglang_server": "verl_servers:hook_sglang_server",
}
_TRAJECTORY_HOOKS = {
    "verl.experimental.agent_loop.agent_loop": "verl_agent_loops:hook_agent_loops",
    "verl.experimental.agent_loop.tool_agent_loop": "verl_agent_loops:hook_tool_loop",
    "verl.experimental.reward_loop.reward_loop": "verl_rewards:hook_reward_loops",
    "verl.experimental.teacher_loop.teacher_manager": "verl_clients:hook_teachers",
    "verl.trainer.ppo.v1.agent_loop_tq": "verl_replay_buffer:hook_dispatch",
    "verl.trainer.ppo.v1.replay_buffer": "verl_replay_buffer:hook_replay_buffer",
    "verl.utils.profiler": "verl_agent_loops:hook_simple_timer",
    "verl.utils.transferqueue_utils": "verl_transfer_queue:hook_bridge",
    "verl.workers.rollout.llm_server": "verl_clients:hook_clients",
    "transfer_queue": "verl_transfer_queue:hook_transfer_queue",
}
"""What shows where a rollout waits. A verl without one of these is profiled all the same, and says so."""
_SUPPORTED = "0.9."
_problems: list[str] = []


def check_support() -> None:
    """Refuse a version of verl that is not supported.

    Raises:
        ToolUnavailableError: The version is another, or a hook of this process did not fit it.
    """
    from verl import __version__ as version

    if _problems or not version.startswith(_SUPPORTED):
        raise ToolUnavailableError(
            f"profiling: verl {version} is not supported{': ' if _problems else ''}{'; '.join(_problems)}; "
            "install verl>=0.9,<0.10"
        )


def _hook(place: str, problems: list[str]) -> Callable[[ModuleType], None]:
    """Return the function to call with an imported module of verl.

    A verl without that class must not fail just because this package is installed, so an error is
    kept until profiling is asked for.
    """
    module_name, _, function_name = place.partition(":")

    def apply(module: ModuleType) -> None:
        try:
            getattr(import_module(f"verl_profiling.integrations.{module_name}"), function_name)(module)
        except (AttributeError, ImportError) as error:
            problems.append(f"{module.__name__}: {error}")
            logger.debug("%s: %s", module.__name__, error)

    return apply


for _hooks, _kept in ((_HOOKS, _problems), (_TRAJECTORY_HOOKS, left_out)):
    for _module, _place in _hooks.items():
        when_imported(_module, _hook(_place, _kept))
