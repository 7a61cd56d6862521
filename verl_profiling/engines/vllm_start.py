"""Configures the profiler of a vLLM engine, which has to be done before the engine starts.

Before vLLM 0.13 that is done by environment variables, since then by ``profiler_config``. What each
version offers is read from its own code; docs/engines.md has the table.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_profiling.engines.adapter import (
    EngineTool,
    engine_tool,
    new_spool,
    refuse_option,
)
from verl_profiling.engines.ascend import check_vllm_ascend, why_not_counted
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.rollout import RolloutOptions
from verl_profiling.tools.npu import NpuTool
from verl_profiling.tools.nsys import NsysTool
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool

__all__ = [
    "CUDA_VARIABLE",
    "DIR_VARIABLE",
    "check_vllm",
    "first_iteration",
    "profiler_settings",
    "profiler_variables",
    "recording_window",
    "version",
    "vllm_engine_args",
]

logger = logging.getLogger(__name__)

DIR_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
_VARIABLES = {
    "delay_iterations": "VLLM_PROFILER_DELAY_ITERS",
    "max_iterations": "VLLM_PROFILER_MAX_ITERS",
    "torch_profiler_with_stack": "VLLM_TORCH_PROFILER_WITH_STACK",
    "torch_profiler_record_shapes": "VLLM_TORCH_PROFILER_RECORD_SHAPES",
    "torch_profiler_with_memory": "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    "torch_profiler_with_flops": "VLLM_TORCH_PROFILER_WITH_FLOPS",
    "torch_profiler_use_gzip": "VLLM_TORCH_PROFILER_USE_GZIP",
    "torch_profiler_dump_cuda_time_total": "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL",
    "ignore_frontend": "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM",
}
_ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}


def vllm_engine_args(config: ProfilingConfig, role: str) -> dict[str, Any]:
    """Return the arguments for ``AsyncEngineArgs`` or ``LLM`` with which the engine can be captured.

    Before vLLM 0.13 the profiler is configured by environment variables; these are set, and
    there is nothing to pass.

    Raises:
        ConfigError: The installed vLLM has no such option.
        ToolUnavailableError: vLLM is not installed.
    """
    settings = config.for_role(role)
    tool = engine_tool(settings, "vLLM", opens_ranges=True) if settings.enable else None
    if tool is None:
        return {}
    if find_spec("vllm") is None:
        raise ToolUnavailableError("engine_args: vLLM is not installed; pip install 'verl-profiling[vllm]'")
    window = recording_window(config.rollout, tool)
    if isinstance(tool, NpuTool):
        check_vllm_ascend()
    spool = new_spool(config.local_folder)
    chosen = isinstance(tool, TorchTool) and tool.options.activities is not None
    all_recorded = f"vLLM {version()} records all that there is"
    if find_spec("vllm.config.profiler") is None:
        known = _known_variables()
        if chosen:
            refuse_option(role, "activities", "null", all_recorded)
        if isinstance(tool, NsysTool) and CUDA_VARIABLE not in known:
            raise ConfigError(
                f"roles.{role}.tool",
                f"vLLM {version()} has no mode for nsys; install vllm>=0.12, or set it to torch or spans",
            )
        variables = profiler_variables(tool, window, spool)
        os.environ.update({name: value for name, value in variables.items() if name in known})
        return {}
    from vllm.config import ProfilerConfig

    fields = {field.name for field in dataclasses.fields(ProfilerConfig)}
    if chosen and "torch_profiler_activities" not in fields:
        refuse_option(role, "activities", "null", all_recorded)
    return {"profiler_config": ProfilerConfig(**profiler_settings(tool, window, spool))}


def recorded_options(tool: TorchTool | NpuTool) -> TorchOptions:
    """Return the options of vLLM's own profiler with which it records as a tool's options say.

    vllm-ascend takes vLLM's option for stacks as the one for modules of torch_npu.
    """
    if isinstance(tool, TorchTool):
        return tool.options
    return TorchOptions(stack=tool.options.modules, memory=tool.options.memory)


def profiler_settings(tool: EngineTool, window: RolloutOptions, spool: Path) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig``, which configures the profiler from vLLM 0.13 on."""
    settings: dict[str, Any] = {
        "delay_iterations": first_iteration(window, tool),
        "max_iterations": window.count or 0,
    }
    if isinstance(tool, NsysTool):
        return {"profiler": "cuda", **settings}
    options = recorded_options(tool)
    if options.activities is not None:
        settings["torch_profiler_activities"] = [_ACTIVITIES[name] for name in options.activities]
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(spool),
        "torch_profiler_with_stack": options.stack,
        "torch_profiler_record_shapes": options.shapes,
        "torch_profiler_with_memory": options.memory,
        "torch_profiler_with_flops": options.flops,
        # Compressing now, while the engine waits, takes far longer than compressing afterwards.
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        # The front end runs in this process, which the session may be recording.
        "ignore_frontend": True,
        **settings,
    }


def profiler_variables(tool: EngineTool, window: RolloutOptions, spool: Path) -> dict[str, str]:
    """Return the same as environment variables, which configure the profiler before vLLM 0.13."""
    settings = profiler_settings(tool, window, spool)
    place = {CUDA_VARIABLE: "1"} if isinstance(tool, NsysTool) else {DIR_VARIABLE: str(spool)}
    return place | {
        name: str(int(settings[field])) for field, name in _VARIABLES.items() if field in settings
    }


def first_iteration(window: RolloutOptions, tool: EngineTool) -> int:
    """Return vLLM's ``delay_iterations``: the number of the first recorded iteration, 0 for at once."""
    return window.start + 1 if window.start or _with_stacks(tool) else 0


def _with_stacks(tool: EngineTool) -> bool:
    return not isinstance(tool, NsysTool) and recorded_options(tool).stack


def check_vllm(tool: EngineTool, window: RolloutOptions) -> None:
    """Refuse what no vLLM records, before one is started.

    Raises:
        ConfigError: vLLM cannot record that window, or might open no range.
    """
    if isinstance(tool, NsysTool) and window.start:
        raise ConfigError(
            "rollout.start",
            f"{tool.name} numbers the ranges that were opened, and a rollout may end before this one is; "
            "set it to 0",
        )
    if window.by_stage:
        raise ConfigError(
            "rollout.by_stage", "vLLM cannot record prefill and decode separately; set it to false"
        )


def recording_window(rollout: RolloutOptions, tool: EngineTool) -> RolloutOptions:
    """Return the window of a rollout that is recorded.

    Raises:
        ConfigError: The installed vLLM cannot record that window, or might open no range.
    """
    stack = _with_stacks(tool)
    check_vllm(tool, rollout)
    engine, newer, counts = f"vLLM {version()}", "vllm>=0.12", _counts_iterations()
    if isinstance(tool, NpuTool) and (why := why_not_counted()):
        engine, newer, counts = *why, False
    if counts:
        return rollout.with_stacks() if stack else rollout
    if rollout.start or rollout.count is not None:
        key = "rollout.start" if rollout.start else "rollout.count"
        raise ConfigError(
            key, f"{engine} cannot count iterations; install {newer}, or use rollout.max_window_s"
        )
    if stack:
        logger.warning(
            "%s cannot count iterations, and its idle workers poll: a second of stacks can take a "
            "minute to write; set rollout.max_window_s, or install %s",
            engine,
            newer,
        )
    return rollout


def _counts_iterations() -> bool:
    return find_spec("vllm.config.profiler") is not None or "VLLM_PROFILER_MAX_ITERS" in _known_variables()


def _known_variables() -> set[str]:
    from vllm import envs

    return set(envs.environment_variables)


def version() -> str:
    import vllm

    return str(vllm.__version__)
