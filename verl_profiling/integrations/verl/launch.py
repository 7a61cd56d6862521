"""Starts verl's processes under Nsight Systems, or with CUPTI reserved for torch.

verl starts the workers of a group under Nsight Systems if the group gets ``profile_steps`` and
``worker_nsight_options``. This module passes both for a profiled trainer, like verl's own profiler.
Rollout servers are plain Ray actors, and get the same options in their runtime environment.

If torch records kernels, a variable of the whole Ray job keeps NVTX from loading CUPTI. verl's own
profiler (``global_profiler.tool=torch``) sets the same variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from verl_profiling import clock
from verl_profiling.errors import ConfigError
from verl_profiling.files.machine import NO_INJECTION, VARIABLE
from verl_profiling.files.process_marks import SUBMITTED, created_ns
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.integrations.hooks import wrap
from verl_profiling.integrations.verl.bridge import TRAINING_ROLES, settings_without_checks
from verl_profiling.integrations.verl.workers import settings_of_server
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers.nsys_launch import nsys_runtime_env

_KEEP = "VERL_KEEP_NVTX_INJECTION"

_environment: dict[str, Any] = {}


def start_workers_under_nsys(settings: ProfilingConfig) -> None:
    """Make this process start its worker groups under Nsight Systems, if a training role has tool
    ``nsys``.

    For workers with several roles, the first role with this tool decides.

    Raises:
        ConfigError: The number of ranges does not follow from the settings.
        ToolUnavailableError: There is no ``nsys`` on this machine.
    """
    global _environment
    environments = (nsys_runtime_env(settings, role=role) for role in TRAINING_ROLES)
    _environment = next(filter(None, environments), {})


def hook_worker_groups(module: Any) -> None:
    """Pass verl's own options for Nsight Systems to the groups of a trainer."""
    wrap(module.RayWorkerGroup, "__init__", _made_under_nsys)


def hook_vllm_replica(module: Any) -> None:
    """Start the servers of a replica under Nsight Systems,
    if the role rollout has tool ``nsys``.
    """
    wrap(module.vLLMReplica, "launch_servers", _launched_under_nsys)


def hook_runtime_env(module: Any) -> None:
    """Keep NVTX from loading CUPTI, by a variable in the runtime environment of verl's Ray job."""
    wrap(module, "get_ppo_ray_runtime_env", _without_injection)


def _made_under_nsys(init: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    # Rollout and reward groups have a name prefix; groups of existing workers have no pool.
    if _environment and kwargs.get("resource_pool") is not None and "name_prefix" not in kwargs:
        kwargs["profile_steps"] = kwargs.get("profile_steps") or [0]
        kwargs["worker_nsight_options"] = dict(_environment["nsight"])
        kwargs["worker_env"] = {**(kwargs.get("worker_env") or {}), **_environment["env_vars"]}
    init(*args, **kwargs)


async def _launched_under_nsys(
    launch: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> None:
    settings = settings_of_server(self)
    environment = nsys_runtime_env(settings, role=ROLLOUT_ROLE) if settings is not None else {}
    if environment:
        self.server_class = _under_nsys(self.server_class, environment)
    await launch(self, *args, **kwargs)


def _under_nsys(actor_class: Any, environment: Mapping[str, Any]) -> Any:
    """Return a Ray actor class that adds an environment to the options of each actor."""

    def options(*, runtime_env: Mapping[str, Any], **others: Any) -> Any:
        env_vars = {**runtime_env.get("env_vars", {}), **environment["env_vars"]}
        return actor_class.options(
            runtime_env={**runtime_env, **environment, "env_vars": env_vars}, **others
        )

    return SimpleNamespace(options=options)


def _without_injection(get_environment: Callable[..., Any], config: Any = None) -> Any:
    environment = get_environment(config)
    environment["env_vars"].setdefault(SUBMITTED, str((created_ns() or clock.now_ns()) / 1e9))
    if config is None or os.environ.get(_KEEP) == "1":
        return environment
    with suppress(ConfigError):  # raised again where the run begins
        settings = settings_without_checks(config)
        if settings is not None and _records_kernels(settings):
            environment["env_vars"].setdefault(VARIABLE, NO_INJECTION)
    return environment


def _records_kernels(settings: ProfilingConfig) -> bool:
    """Return whether tool ``torch`` records a role and tool ``nsys``, which needs NVTX,
    records none.
    """
    roles = [settings.for_role(name) for name in (*TRAINING_ROLES, ROLLOUT_ROLE)]
    enabled = [role for role in roles if role.enable]
    launched = any(role.launched_tool is not None for role in enabled)
    return not launched and any("torch" in role.tool_names for role in enabled)
