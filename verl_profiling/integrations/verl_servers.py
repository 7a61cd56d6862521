"""Capture methods for verl's rollout servers.

A server gets its settings inside ``rollout.engine_kwargs``, which verl passes unchanged to every
server of the policy, and to no server of a reward model or a teacher.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.integrations.verl_nsys import hook_vllm_replica
from verl_profiling.workers import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

__all__ = ["SETTINGS_KEY", "hook_sglang_server", "hook_vllm_server"]

SETTINGS_KEY = "verl_profiling"


def hook_vllm_server(module: Any) -> None:
    """Give ``vLLMHttpServer`` the capture methods, and its engine the arguments that it needs."""
    server_class = module.vLLMHttpServer
    run_server, run_headless = server_class.run_server, server_class.run_headless

    @functools.wraps(run_server)
    async def captured_run_server(self: Any, args: Any) -> None:
        settings = _settings_of(self)
        _add_engine_args(settings, args)
        await run_server(self, args)
        _set_up(self, VLLMCaptureMixin(), self.engine, settings)

    @functools.wraps(run_headless)
    async def captured_run_headless(self: Any, args: Any) -> None:
        settings = _settings_of(self)
        _add_engine_args(settings, args)
        await run_headless(self, args)
        _set_up(self, VLLMCaptureMixin(), None, settings)

    server_class.run_server = captured_run_server
    server_class.run_headless = captured_run_headless
    _add_methods(server_class)
    hook_vllm_replica(module, SETTINGS_KEY)


def hook_sglang_server(module: Any) -> None:
    """Give ``SGLangHttpServer`` the capture methods."""
    server_class = module.SGLangHttpServer
    launch_server = server_class.launch_server

    @functools.wraps(launch_server)
    async def captured_launch_server(self: Any, *args: Any, **kwargs: Any) -> None:
        await launch_server(self, *args, **kwargs)
        _set_up(self, SGLangCaptureMixin(), self, _settings_of(self))

    server_class.launch_server = captured_launch_server
    _add_methods(server_class)


def _settings_of(server: Any) -> Mapping[str, Any] | None:
    settings: Mapping[str, Any] | None = (server.config.engine_kwargs or {}).get(SETTINGS_KEY)
    return settings


def _add_engine_args(settings: Mapping[str, Any] | None, args: Any) -> None:
    for name, value in VLLMCaptureMixin.engine_args(settings).items():
        setattr(args, name, value)


def _set_up(
    server: Any, capture: RolloutCaptureMixin, engine: Any, settings: Mapping[str, Any] | None
) -> None:
    if settings is not None:
        capture.init_capture(
            settings,
            engine=engine,
            replica=server.replica_rank,
            node_rank=server.node_rank,
            devices=_devices_of_server(),
        )
    server._verl_profiling = capture


def _devices_of_server() -> list[str] | None:
    """Return the devices that verl gave to this server's engine: those of its workers, on a CPU too."""
    from verl.utils.device import get_visible_devices_keyword

    given = os.environ.get(get_visible_devices_keyword(), "")
    return [device.strip() for device in given.split(",")] if given else None


async def _start_capture(self: Any, request: CaptureRequest) -> StartReply:
    """Start or join a capture. The callback calls this."""
    capture: RolloutCaptureMixin = self._verl_profiling
    return await capture.start_capture(request)


async def _stop_capture(self: Any, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
    """Stop a capture. The callback calls this."""
    capture: RolloutCaptureMixin = self._verl_profiling
    return await capture.stop_capture(capture_id, finish_s)


def _add_methods(server_class: type[Any]) -> None:
    server_class.start_capture = _start_capture
    server_class.stop_capture = _stop_capture
    server_class._verl_profiling = RolloutCaptureMixin()  # until a subclass sets it up, if it does
    set_global_steps = server_class.set_global_steps

    @functools.wraps(set_global_steps)
    async def noted_set_global_steps(self: Any, global_steps: int) -> None:
        # verl notifies every server of new weights, and numbers them by the step that made them.
        await set_global_steps(self, global_steps)
        self._verl_profiling.set_policy_version(global_steps)

    server_class.set_global_steps = noted_set_global_steps
