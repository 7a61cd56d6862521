"""Refuses rollouts of verl that cannot be captured, from the configuration, before a server starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from verl_profiling.engines.adapter import engine_tool
from verl_profiling.engines.ascend import has_vllm_ascend
from verl_profiling.engines.sglang import SGLangAdapter, check_sglang
from verl_profiling.engines.vllm import VLLMAdapter
from verl_profiling.engines.vllm_start import check_vllm, vllm_engine_args
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools.npu import NpuTool
from verl_profiling.tools.nsys import NsysTool

__all__ = ["check_installed_engine", "check_rollout", "device_of"]

_ENGINES = {"vllm": VLLMAdapter.name, "sglang": SGLangAdapter.name}
_SWITCHED_OFF = "set profiling.roles.rollout.enable=false"


def check_rollout(config: Any, settings: ProfilingConfig) -> None:
    """Refuse engines, tools and windows with which the servers would refuse to start.

    Raises:
        ConfigError: There is no adapter for the engine, or it cannot record what the settings say.
    """
    chosen = settings.for_role(ROLLOUT_ROLE)
    if not chosen.enable:
        return
    rollout, device = config.actor_rollout_ref.rollout, device_of(config)
    why = _why_not(rollout)
    if why:
        raise ConfigError("actor_rollout_ref.rollout", f"{why}; {_SWITCHED_OFF}")
    engine = _ENGINES[rollout.name]
    tool = engine_tool(chosen, engine, opens_ranges=True)
    if tool is None:
        return
    if (device == "npu") != (tool.name == "npu"):
        right = "npu" if device == "npu" else "torch"
        raise ConfigError(
            f"roles.{ROLLOUT_ROLE}.tool",
            f"{tool.name} records nothing of {engine} where trainer.device is {device!r}; set "
            f"profiling.roles.rollout.tool={right}, or profiling.roles.rollout.enable=false",
        )
    if rollout.name == "vllm":
        check_vllm(tool, settings.rollout)
    elif not isinstance(tool, NsysTool):
        own = (rollout.get("engine_kwargs") or {}).get("sglang") or {}
        ranks = 1 if own.get("enable_dp_attention") else int(rollout.get("data_parallel_size") or 1)
        device = str(own.get("device") or device)
        check_sglang(tool, settings.rollout, ROLLOUT_ROLE, device=device, dp_ranks=ranks)


def check_installed_engine(config: Any, settings: ProfilingConfig) -> str:
    """Check also what depends on the version of the engine; return why that was not possible, if so.

    Raises:
        ConfigError: The installed vLLM cannot record what the settings say.
        ToolUnavailableError: A package that it needs for that is not installed.
    """
    engine, chosen = config.actor_rollout_ref.rollout.name, settings.for_role(ROLLOUT_ROLE)
    if not chosen.enable:
        return ""
    absent = engine if find_spec(engine) is None else ""
    if (
        engine == "vllm"
        and isinstance(engine_tool(chosen, _ENGINES[engine], opens_ranges=True), NpuTool)
        and not has_vllm_ascend()
    ):
        absent = "vllm-ascend"
    if absent:
        return f"{absent} is not installed here, and was not asked what its version records"
    if engine == "vllm":
        vllm_engine_args(settings, ROLLOUT_ROLE)
    return ""


def device_of(config: Any) -> str:
    """Return the kind of device that verl computes on."""
    return str((config.get("trainer") or {}).get("device") or "cuda")


def _why_not(rollout: Any) -> str:
    if rollout.name not in _ENGINES:
        return f"{rollout.name} cannot be captured ({choices_hint(rollout.name, _ENGINES)})"
    if (rollout.get("disaggregation") or {}).get("enabled"):
        return "replicas that are split into prefill and decode servers cannot be captured"
    return ""
