"""The two ways to call SGLang's profiler: its tokenizer manager, or its HTTP server."""

from __future__ import annotations

import asyncio
import inspect
import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from verl_profiling.errors import CaptureStateError, ToolUnavailableError

__all__ = ["HTTPCalls", "ManagerCalls", "SGLangCalls"]

_TIMEOUT_S = 30.0
_INSTALL = "install sglang>=0.5.3"
_SERVER_ARGS = ("tp_size", "pp_size", "dp_size", "enable_dp_attention", "device")


class SGLangCalls(ABC):
    """The calls that start and stop the profiler of one SGLang engine.

    Attributes:
        offers: Names of the options that its ``start_profile`` takes.
        server_args: The settings it runs with.
    """

    offers: frozenset[str]
    server_args: dict[str, Any]

    @abstractmethod
    async def start(self, options: dict[str, Any]) -> None:
        """Start profiling, or arm a window."""

    @abstractmethod
    async def stop(self) -> bool:
        """Stop and write; return whether it was recording."""

    def ended(self) -> dict[str, int]:
        """Return the exit codes of SGLang's processes that have ended, as far as this process can see."""
        return {}


class ManagerCalls(SGLangCalls):
    """Calls a tokenizer manager on its own event loop.

    ``start_profile`` takes keywords up to 0.5.14 and one request object from 0.5.15 on.

    Raises:
        ToolUnavailableError: This SGLang is too old.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        if not callable(getattr(manager, "start_profile", None)):
            raise ToolUnavailableError(f"this SGLang's tokenizer manager has no start_profile; {_INSTALL}")
        parameters = inspect.signature(manager.start_profile).parameters
        self._request_class: Callable[..., Any] | None = None
        if "req" in parameters:
            from sglang.srt.managers.io_struct import ProfileReq

            self._request_class = ProfileReq
            parameters = inspect.signature(ProfileReq).parameters
        self.offers = frozenset(parameters)
        # Read one by one: from 0.5.23 on they are not in vars().
        self.server_args = {name: getattr(manager.server_args, name, None) for name in _SERVER_ARGS}

    async def start(self, options: dict[str, Any]) -> None:
        if self._request_class is None:
            await self._on_its_loop(lambda: self._manager.start_profile(**options))
        else:
            request = self._request_class(**options)
            await self._on_its_loop(lambda: self._manager.start_profile(request))

    async def stop(self) -> bool:
        try:
            await self._on_its_loop(self._manager.stop_profile)
        except RuntimeError as error:
            if "not in progress" not in str(error):
                raise
            return False
        return True

    def ended(self) -> dict[str, int]:
        # Only the watchdog of newer versions holds the processes. One second later it ends this process, too,
        # unless SGLang was given a custom_sigquit_handler.
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        named = zip(getattr(watchdog, "_names", ()), getattr(watchdog, "_processes", ()), strict=False)
        return {name: process.exitcode for name, process in named if process.exitcode is not None}

    async def _on_its_loop(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Await a call on the event loop on which the manager receives the scheduler's answers.

        That is the loop of its first call; on any other, an answer never arrives.
        """
        loop: asyncio.AbstractEventLoop | None = getattr(self._manager, "event_loop", None)

        async def run() -> None:
            await call()

        if loop is None or loop is asyncio.get_running_loop():
            await run()
        elif loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
        else:
            await asyncio.to_thread(loop.run_until_complete, run())


class HTTPCalls(SGLangCalls):
    """Calls an SGLang server that shares this file system.

    Args:
        url: Its address, e.g. ``http://127.0.0.1:30000``.

    Raises:
        CaptureStateError: It does not answer.
        ToolUnavailableError: It has no profiler to start.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        schemas = self._get("/openapi.json").get("components", {}).get("schemas", {})
        if "ProfileReqInput" in schemas:
            properties = schemas["ProfileReqInput"]["properties"]
        elif "ProfileReq" in schemas:
            properties = schemas["ProfileReq"]["properties"]
        else:
            raise ToolUnavailableError(f"{url} has no /start_profile; {_INSTALL}")
        self.offers = frozenset(properties)
        self.server_args = self._get("/get_server_info")

    async def start(self, options: dict[str, Any]) -> None:
        await asyncio.to_thread(self._send, "/start_profile", options)

    async def stop(self) -> bool:
        try:
            await asyncio.to_thread(self._send, "/stop_profile", {})
        except urllib.error.HTTPError as error:
            if error.code != 500:  # the server's answer when it is not recording
                raise
            return False
        return True

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError) as error:
            raise CaptureStateError(
                f"init_capture: {self._url}{path} does not answer ({error}); is it an SGLang server, and up?"
            ) from error
        return found

    def _send(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request):
                pass
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            raise CaptureStateError(
                f"{self._url}{path} does not answer any more ({error}). SGLang ends its server when one of "
                "its processes dies; the server's log says why"
            ) from error
