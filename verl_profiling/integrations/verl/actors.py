"""Capture methods for verl's Ray actors: rollout servers, agent loop and reward loop workers, the rollouter.

A server gets its settings inside ``rollout.engine_kwargs``, which verl passes unchanged to every
server of the policy, and to no server of a reward model or a teacher.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from verl_profiling.integrations.hooks import misfits, wrap
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    RolloutCaptureMixin,
    SGLangCaptureMixin,
    VLLMCaptureMixin,
)

SETTINGS_KEY = "verl_profiling"
AGENT_LOOP, REWARD, ROLLOUTER = "agent_loop", "reward", "rollouter"
_METHODS = ("start_capture", "stop_capture", "read_watch")


def add_capture_methods(
    cls: type[Any],
    default: Any = None,
    *,
    awaited: bool = False,
    registered: Callable[[Any], Any] = lambda method: method,
) -> None:
    """Add the methods that the callback calls; each delegates to the object's ``_verl_profiling``.

    Args:
        cls: A class of verl, before ``ray.remote`` makes an actor of it.
        default: The mixin that replies until a process is set up.
        awaited: Whether the methods are coroutines. If not, the event loop's thread starts and stops a
            recording.
        registered: verl's decorator for each method.
    """
    for name in _METHODS:
        setattr(cls, name, registered((_awaited if awaited else _called)(name)))
    if default is not None:
        cls._verl_profiling = default


def _called(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._verl_profiling, name)(*args, **kwargs)

    return method


def _awaited(name: str) -> Callable[..., Any]:
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = getattr(self._verl_profiling, name)(*args, **kwargs)
        return await reply if inspect.isawaitable(reply) else reply

    return method


def add_actor_methods(actor_class: type[Any], role: str) -> None:
    """Add the capture methods and ``init_capture`` to a class of plain Ray actors."""

    def init_capture(self: Any, settings: ProfilingConfig, rank: int, world_size: int) -> list[str]:
        """Set this worker up; return the parts that are not recorded in its process."""
        self._verl_profiling = AgentLoopCaptureMixin()
        self._verl_profiling.init_capture(settings, role=role, rank=rank, world_size=world_size)
        return misfits()

    actor_class.init_capture = init_capture
    add_capture_methods(actor_class, AgentLoopCaptureMixin())


def rollout_processes(owner: Any, agent_loops: Any) -> dict[str, list[Any]]:
    """Return the handles of the agent loop workers and of the reward loop workers, by role.

    Args:
        owner: A trainer or a rollouter.
        agent_loops: The owner's agent loop manager.
    """
    rewards = getattr(owner, "reward_loop_manager", None)
    return {
        AGENT_LOOP: list(getattr(agent_loops, "agent_loop_workers", None) or ()),
        REWARD: list(getattr(rewards, "reward_loop_workers", None) or ()),
    }


def hook_vllm_server(module: Any) -> None:
    """Give ``vLLMHttpServer`` the capture methods, and its engine the arguments that it needs."""
    server_class = module.vLLMHttpServer
    wrap(server_class, "run_headless", _run_headless)
    if wrap(server_class, "run_server", _run_server):
        _add_server_methods(server_class)


def hook_sglang_server(module: Any) -> None:
    """Give ``SGLangHttpServer`` the capture methods."""
    if wrap(module.SGLangHttpServer, "launch_server", _launch_sglang):
        _add_server_methods(module.SGLangHttpServer)


def settings_of(holder: Any) -> Mapping[str, Any] | None:
    """Return the settings in the configuration of a server or a replica."""
    settings: Mapping[str, Any] | None = (holder.config.engine_kwargs or {}).get(SETTINGS_KEY)
    return settings


async def _run_server(run: Callable[..., Any], self: Any, args: Any) -> None:
    """Start an engine with the arguments that it needs to be captured."""
    _add_engine_args(self, args)
    await run(self, args)
    _set_up(self, VLLMCaptureMixin(), self.engine)


async def _run_headless(run: Callable[..., Any], self: Any, args: Any) -> None:
    """Start a replica's processes on a node other than its first, whose server has the engine."""
    _add_engine_args(self, args)
    await run(self, args)
    _set_up(self, VLLMCaptureMixin(), None)


async def _launch_sglang(launch: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    await launch(self, *args, **kwargs)
    _set_up(self, SGLangCaptureMixin(), self)


async def _noted_version(set_global_steps: Callable[..., Any], self: Any, global_steps: int) -> None:
    """Record the version of a server's new weights: the step that made them, as verl reports it."""
    await set_global_steps(self, global_steps)
    self._verl_profiling.set_policy_version(global_steps)


def _add_engine_args(server: Any, args: Any) -> None:
    for name, value in VLLMCaptureMixin.engine_args(settings_of(server)).items():
        setattr(args, name, value)


def _set_up(server: Any, capture: RolloutCaptureMixin, engine: Any) -> None:
    if (settings := settings_of(server)) is not None:
        capture.init_capture(
            settings,
            engine=engine,
            replica=server.replica_rank,
            node_rank=server.node_rank,
            devices=_devices_of_server(),
        )
    server._verl_profiling = capture


def _devices_of_server() -> list[str] | None:
    """Return the devices that verl reserved for this server's engine, even if it computes on a CPU."""
    from verl.utils.device import get_visible_devices_keyword

    given = os.environ.get(get_visible_devices_keyword(), "")
    return [device.strip() for device in given.split(",")] if given else None


async def _capture_misfits(self: Any) -> list[str]:
    """Return the parts that are not recorded in this process, each with the reason."""
    return misfits()


def _add_server_methods(server_class: type[Any]) -> None:
    # The default mixin replies if a subclass launches its engine by another method.
    add_capture_methods(server_class, RolloutCaptureMixin(), awaited=True)
    server_class.capture_misfits = _capture_misfits
    wrap(server_class, "set_global_steps", _noted_version)
