"""Starts verl's workers and servers under Nsight Systems, with verl's own means.

verl starts the workers of a group under Nsight Systems if the group is given ``profile_steps`` and
``worker_nsight_options``. Its trainer does so for its own profiler. Here both are added to the groups
that a profiled trainer makes, with the number of ranges that the ``nsys`` tool will open. Servers are
plain Ray actors, and get the same in their runtime environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.integrations.verl_servers import SETTINGS_KEY
from verl_profiling.integrations.wrapping import wrap
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools import nsys
from verl_profiling.tools.nsys import nsys_runtime_env

__all__ = ["expected_ranges", "hook_vllm_replica", "hook_worker_groups", "start_workers_under_nsys"]

_TRAINING = ("actor", "ref", "critic")

_environment: dict[str, Any] = {}


def expected_ranges(config: Any, settings: ProfilingConfig) -> dict[str, int]:
    """Return, for each role that records with Nsight Systems, how many ranges a process opens.

    Raises:
        ConfigError: The number is not known, or verl cannot start that role under it.
    """
    found = {}
    for role in (*_TRAINING, ROLLOUT_ROLE):
        chosen = settings.for_role(role)
        if not chosen.enable or chosen.launched_tool is None:
            continue
        key, device = f"roles.{role}.tool", config.trainer.device
        if device != "cuda":
            raise ConfigError(key, f"nsys records CUDA devices, and trainer.device is {device!r}")
        engine = config.actor_rollout_ref.rollout.name
        if role == ROLLOUT_ROLE and engine != "vllm":
            raise ConfigError(
                key, f"nsys records vLLM engines, not {engine}; set profiling.roles.rollout.tool=torch"
            )
        found[role] = nsys.expected_ranges(chosen, settings.schedule)
    return found


def start_workers_under_nsys(settings: ProfilingConfig) -> None:
    """Make this process start its worker groups under Nsight Systems from now on, if the settings say so.

    Workers shared by several roles are started for the first of these roles that is profiled.

    Raises:
        ConfigError: The settings do not say how many ranges there will be.
        ToolUnavailableError: There is no ``nsys`` on this machine.
    """
    global _environment
    environments = (nsys_runtime_env(settings, role=role) for role in _TRAINING)
    _environment = next(filter(None, environments), {})


def hook_worker_groups(module: Any) -> None:
    """Pass verl's own options for Nsight Systems to the groups of a trainer."""
    wrap(module.RayWorkerGroup, "__init__", _made_under_nsys)


def _made_under_nsys(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Groups of rollout and reward replicas have a name; groups that are looked up have no pool.
        if _environment and kwargs.get("resource_pool") is not None and "name_prefix" not in kwargs:
            kwargs["profile_steps"] = kwargs.get("profile_steps") or [0]
            kwargs["worker_nsight_options"] = dict(_environment["nsight"])
            kwargs["worker_env"] = {**(kwargs.get("worker_env") or {}), **_environment["env_vars"]}
        original(self, *args, **kwargs)

    return init


def hook_vllm_replica(module: Any) -> None:
    """Start the servers of a replica under Nsight Systems, if the settings in its configuration say so."""
    wrap(module.vLLMReplica, "launch_servers", _launching_under_nsys)


def _launching_under_nsys(launch_servers: Callable[..., Any]) -> Callable[..., Any]:
    async def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        settings = (self.config.engine_kwargs or {}).get(SETTINGS_KEY)
        environment = nsys_runtime_env(settings, role=ROLLOUT_ROLE) if settings is not None else {}
        if environment:
            self.server_class = StartedUnderNsys(self.server_class, environment)
        await launch_servers(self, *args, **kwargs)

    return launch


class StartedUnderNsys:
    """A Ray actor class whose actors are started under Nsight Systems, whatever their other options.

    Args:
        actor_class: What ``ray.remote`` made of a class.
        environment: What :func:`~verl_profiling.tools.nsys.nsys_runtime_env` returned.
    """

    def __init__(self, actor_class: Any, environment: Mapping[str, Any]) -> None:
        self._actor_class = actor_class
        self._environment = environment

    def options(self, *, runtime_env: Mapping[str, Any], **options: Any) -> Any:
        """Return the class with options, as Ray does."""
        env_vars = {**runtime_env.get("env_vars", {}), **self._environment["env_vars"]}
        merged = {**runtime_env, **self._environment, "env_vars": env_vars}
        return self._actor_class.options(runtime_env=merged, **options)
