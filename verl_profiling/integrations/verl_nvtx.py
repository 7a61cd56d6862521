"""Keeps NVTX out of CUPTI in verl's workers, where torch is to record their kernels.

verl does that itself if its own profiler is set to torch (``global_profiler.tool``), by the environment of
the whole Ray job. Here the same is done for the settings of this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from verl_profiling.errors import ConfigError
from verl_profiling.integrations.verl_config import settings_without_checks
from verl_profiling.integrations.wrapping import wrap
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools.nvtx_injection import NO_INJECTION, VARIABLE, injected_cupti

__all__ = ["hook_runtime_env", "injection_notice"]

_KEEP = "VERL_KEEP_NVTX_INJECTION"
_ROLES = ("actor", "ref", "critic", "rollout")


def hook_runtime_env(module: Any) -> None:
    """Add the variable to the environment with which verl starts Ray."""
    wrap(module, "get_ppo_ray_runtime_env", _without_injection)


def injection_notice(settings: ProfilingConfig) -> str:
    """Return what is done about NVTX in a run with these settings, or what is wrong; empty for nothing."""
    if not _records_kernels(settings):
        return ""
    if not _kept():
        return f"workers are started with {VARIABLE}={NO_INJECTION}, so that torch can record kernels"
    wrong = injected_cupti()
    return f"warning: {_KEEP}=1: {wrong}" if wrong else ""


def _without_injection(original: Callable[..., Any]) -> Callable[..., Any]:
    def get(config: Any = None) -> Any:
        environment = original(config)
        try:
            settings = None if config is None or _kept() else settings_without_checks(config)
        except ConfigError:  # which is raised where the run begins
            settings = None
        if settings is not None and _records_kernels(settings):
            environment["env_vars"].setdefault(VARIABLE, NO_INJECTION)
        return environment

    return get


def _kept() -> bool:
    return os.environ.get(_KEEP, "0") == "1"


def _records_kernels(settings: ProfilingConfig) -> bool:
    """Return whether torch records a role, and Nsight Systems none: that comes by the same variable."""
    roles = [chosen for role in _ROLES if (chosen := settings.for_role(role)).enable]
    tools = {tool.name for chosen in roles for tool in chosen.tools}
    return "torch" in tools and not any(chosen.launched_tool for chosen in roles)
