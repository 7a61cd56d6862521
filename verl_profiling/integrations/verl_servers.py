"""Capture methods for verl's rollout servers.

A server gets its settings inside ``rollout.engine_kwargs``, which verl passes unchanged to every
server of the policy, and to no server of a reward model or a teacher.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.integrations.hooks import misfits
from verl_profiling.integrations.wrapping import wrap
from verl_profiling.watch.reading import WatchReading
from verl_profiling.workers import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

__all__ = [
    "SETTINGS_KEY",
    "hook_sglang_server",
    "hook_sglang_versions",
    "hook_vllm_server",
    "hook_vllm_versions",
]

SETTINGS_KEY = "verl_profiling"

Function = Callable[..., Any]


def hook_vllm_server(module: Any) -> None:
    """Give ``vLLMHttpServer`` the capture methods, and its engine the arguments that it needs."""
    server_class = module.vLLMHttpServer
    wrap(server_class, "run_headless", functools.partial(_started_vllm, "run_headless"))
    if wrap(server_class, "run_server", functools.partial(_started_vllm, "run_server")):
        _add_methods(server_class)


def hook_vllm_versions(module: Any) -> None:
    """Note the policy version of each request of a ``vLLMHttpServer``."""
    wrap(module.vLLMHttpServer, "set_global_steps", _noted_version)


def hook_sglang_server(module: Any) -> None:
    """Give ``SGLangHttpServer`` the capture methods."""
    if wrap(module.SGLangHttpServer, "launch_server", _started_sglang):
        _add_methods(module.SGLangHttpServer)


def hook_sglang_versions(module: Any) -> None:
    """Note the policy version of each request of a ``SGLangHttpServer``."""
    wrap(module.SGLangHttpServer, "set_global_steps", _noted_version)


def _started_vllm(name: str, run: Function) -> Function:
    """Start an engine with the arguments it needs; only the server of the first node has it."""

    async def captured_run(self: Any, args: Any) -> None:
        settings = _settings_of(self)
        _add_engine_args(settings, args)
        await run(self, args)
        _set_up(self, VLLMCaptureMixin(), self.engine if name == "run_server" else None, settings)

    return captured_run


def _started_sglang(launch_server: Function) -> Function:
    async def captured_launch_server(self: Any, *args: Any, **kwargs: Any) -> None:
        await launch_server(self, *args, **kwargs)
        _set_up(self, SGLangCaptureMixin(), self, _settings_of(self))

    return captured_launch_server


def _noted_version(set_global_steps: Function) -> Function:
    """Note the new weights that verl notifies a server of, by the step that made them."""

    async def noted_set_global_steps(self: Any, global_steps: int) -> None:
        await set_global_steps(self, global_steps)
        self._verl_profiling.set_policy_version(global_steps)

    return noted_set_global_steps


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


def _read_watch(self: Any, since_ns: int | None = None) -> WatchReading | None:
    """Return what the watch keeps of this process. The callback calls this."""
    capture: RolloutCaptureMixin = self._verl_profiling
    return capture.read_watch(since_ns)


async def _capture_misfits(self: Any) -> list[str]:
    """Return what is not recorded in this process, each with the reason."""
    return misfits()


def _add_methods(server_class: type[Any]) -> None:
    server_class.start_capture = _start_capture
    server_class.stop_capture = _stop_capture
    server_class.read_watch = _read_watch
    server_class.capture_misfits = _capture_misfits
    server_class._verl_profiling = RolloutCaptureMixin()  # until a subclass sets it up, if it does
