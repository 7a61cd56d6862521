"""Capture methods for verl's rollout servers.

A server gets its settings inside ``rollout.engine_kwargs``, which verl passes unchanged to every
server of the policy, and to no server of a reward model or a teacher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from verl_profiling.integrations.hooks import misfits, wrap
from verl_profiling.integrations.verl.processes import add_capture_methods
from verl_profiling.workers import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

SETTINGS_KEY = "verl_profiling"


def hook_vllm_server(module: Any) -> None:
    """Give ``vLLMHttpServer`` the capture methods, and its engine the arguments that it needs."""
    server_class = module.vLLMHttpServer
    wrap(server_class, "run_headless", _run_headless)
    if wrap(server_class, "run_server", _run_server):
        _add_methods(server_class)


def hook_sglang_server(module: Any) -> None:
    """Give ``SGLangHttpServer`` the capture methods."""
    if wrap(module.SGLangHttpServer, "launch_server", _launch_sglang):
        _add_methods(module.SGLangHttpServer)


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


def _add_methods(server_class: type[Any]) -> None:
    # The default mixin replies if a subclass launches its engine by another method.
    add_capture_methods(server_class, RolloutCaptureMixin(), awaited=True)
    server_class.capture_misfits = _capture_misfits
    wrap(server_class, "set_global_steps", _noted_version)
