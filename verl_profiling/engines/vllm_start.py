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
    "cuda_settings",
    "cuda_variables",
    "first_iteration",
    "profiler_settings",
    "profiler_variables",
    "recorded_options",
    "recording_window",
    "version",
    "vllm_engine_args",
]

logger = logging.getLogger(__name__)

DIR_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
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
    if isinstance(tool, NsysTool):
        return _cuda_engine_args(window, role)
    if isinstance(tool, NpuTool):
        check_vllm_ascend()
    options = recorded_options(tool)
    spool = new_spool(config.local_folder)
    if find_spec("vllm.config.profiler") is None:
        if options.activities is not None:
            refuse_option(role, "activities", "null", f"vLLM {version()} records all that there is")
        known = _variables()
        variables = profiler_variables(options, window, spool)
        os.environ.update({name: value for name, value in variables.items() if name in known})
        return {}
    from vllm.config import ProfilerConfig

    if options.activities is not None and "torch_profiler_activities" not in _fields(ProfilerConfig):
        refuse_option(role, "activities", "null", f"vLLM {version()} records all that there is")
    return {"profiler_config": ProfilerConfig(**profiler_settings(options, window, spool))}


def recorded_options(tool: TorchTool | NpuTool) -> TorchOptions:
    """Return the options of vLLM's own profiler with which it records as a tool's options say.

    vllm-ascend takes vLLM's option for stacks as the one for modules of torch_npu.
    """
    if isinstance(tool, TorchTool):
        return tool.options
    return TorchOptions(stack=tool.options.modules, memory=tool.options.memory)


def _cuda_engine_args(window: RolloutOptions, role: str) -> dict[str, Any]:
    """Make the engine open ranges of Nsight Systems: ``cudaProfilerStart`` in each of its workers."""
    if find_spec("vllm.config.profiler") is None:
        known = _variables()
        if CUDA_VARIABLE not in known:
            raise ConfigError(
                f"roles.{role}.tool",
                f"vLLM {version()} has no mode for nsys; install vllm>=0.12, or set it to torch or spans",
            )
        variables = cuda_variables(window)
        os.environ.update({name: value for name, value in variables.items() if name in known})
        return {}
    from vllm.config import ProfilerConfig

    return {"profiler_config": ProfilerConfig(**cuda_settings(window))}


def cuda_settings(window: RolloutOptions) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig`` for Nsight Systems, from vLLM 0.13 on."""
    return {"profiler": "cuda", "delay_iterations": 0, "max_iterations": window.count or 0}


def cuda_variables(window: RolloutOptions) -> dict[str, str]:
    """Return the environment variables for Nsight Systems, before vLLM 0.13."""
    return {
        CUDA_VARIABLE: "1",
        "VLLM_PROFILER_DELAY_ITERS": "0",
        "VLLM_PROFILER_MAX_ITERS": str(window.count or 0),
    }


def profiler_settings(options: TorchOptions, window: RolloutOptions, spool: Path) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig``, which configures the profiler from vLLM 0.13 on."""
    settings: dict[str, Any] = {
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
        "delay_iterations": first_iteration(window, options.stack),
        "max_iterations": window.count or 0,
    }
    if options.activities is not None:
        settings["torch_profiler_activities"] = [_ACTIVITIES[name] for name in options.activities]
    return settings


def profiler_variables(options: TorchOptions, window: RolloutOptions, spool: Path) -> dict[str, str]:
    """Return the environment variables that configure the profiler before vLLM 0.13."""
    switches = {
        "VLLM_TORCH_PROFILER_WITH_STACK": options.stack,
        "VLLM_TORCH_PROFILER_RECORD_SHAPES": options.shapes,
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": options.memory,
        "VLLM_TORCH_PROFILER_WITH_FLOPS": options.flops,
        "VLLM_TORCH_PROFILER_USE_GZIP": False,
        "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL": False,
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": True,
        "VLLM_PROFILER_DELAY_ITERS": first_iteration(window, options.stack),
        "VLLM_PROFILER_MAX_ITERS": window.count or 0,
    }
    return {DIR_VARIABLE: str(spool), **{name: str(int(value)) for name, value in switches.items()}}


def first_iteration(window: RolloutOptions, stack: bool) -> int:
    """Return vLLM's ``delay_iterations``: the number of the first recorded iteration, 0 for at once."""
    return window.start + 1 if window.start or stack else 0


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
    stack = not isinstance(tool, NsysTool) and recorded_options(tool).stack
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
    return find_spec("vllm.config.profiler") is not None or "VLLM_PROFILER_MAX_ITERS" in _variables()


def _variables() -> set[str]:
    from vllm import envs

    return set(envs.environment_variables)


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def version() -> str:
    import vllm

    return str(vllm.__version__)
