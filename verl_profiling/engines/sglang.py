"""The SGLang adapter: ``Engine``, an object with a ``tokenizer_manager``, or a server's URL.

The call that starts SGLang's profiler has all options of the capture, and the output folder. The
signature of the call shows whether an SGLang takes one object or keyword arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from verl_profiling.engines.adapter import (
    EngineAdapter,
    ReplayedEngine,
    at_least,
    check_options,
    how_processes_ended,
    refuse_option,
)
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.sglang_requests import watch_manager
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.run_files import is_recording, rank_of_recording
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import BYTES_OF
from verl_profiling.settings.config import ProfilingConfig, RolloutOptions
from verl_profiling.tools.base import Tool, imported

_PATCHES = "_apply_patches"  # SGLang before 0.5.23 calls it in torch_npu; later ones need none
_NOT_RECORDING = "not in progress"
_KEY_NEEDED = (
    "; the server asks for an API key, and captures send none: pass its Engine or tokenizer "
    "manager instead of the URL, or start it without --api-key and --admin-api-key"
)
_MOST_BYTES = 1000  # of an answer, in the reason of a failure
_SERVER_ARGS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "enable_dp_attention",
    "device",
    "nnodes",
    "base_gpu_id",
    "gpu_id_step",
)

_ACTIVITIES = {"cpu": "CPU", "cuda": "GPU", "xpu": "XPU", "npu": "GPU"}
_TRACE = re.compile(
    r"-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-\d+)?(?:-(?P<stage>\w+))?"
    r"\.trace\.json\.gz$"
)
_PARTS = {"EXTEND": "prefill", "DECODE": "decode"}
_MERGED = "merged-"


class SGLangAdapter(EngineAdapter):
    """Starts and stops the profilers of SGLang's schedulers.

    Args:
        engine: An ``Engine``, an object with a ``tokenizer_manager``, or a server's URL.
        config: All settings.
        identity: Role, rank and host of the replica.
        tool: The tool that records the engine.

    Raises:
        CaptureStateError: The engine has no tokenizer manager, or the server does not answer.
        ConfigError: SGLang does not support the settings, or would crash with them.
        ToolUnavailableError: This SGLang is too old.
    """

    name = "SGLang"
    window_options = ("profile_by_stage", "merge_profiles")
    profilers = {
        "torch": {"memory": (False,)},
        "npu": {
            "level": ("level1",),
            "aic_metrics": ("PipeUtilization", None),
            "memory": (False,),
            "modules": (False,),
        },
    }

    def __init__(
        self, engine: Any, config: ProfilingConfig, identity: WorkerIdentity, tool: Tool
    ) -> None:
        super().__init__(engine, config, identity, tool)
        if config.rollout.profile_by_stage:
            self.parts = tuple(_PARTS.values())
        if tool.options.stack or config.rollout.profile_by_stage:
            self.window = config.rollout.with_count()
        self._manager = manager = manager_of(engine, identity)
        self._calls = (
            HTTPCalls(engine, config.timeouts.start_s) if manager is None else ManagerCalls(manager)
        )
        server = self._calls.server_args
        self.device = str(server.get("device") or "cuda")
        self._tp = _number(server, "tp_size", 1)
        self._pp = _number(server, "pp_size", 1)
        self.data_ranks = _data_parallel_ranks(server)
        self.ranks = self._tp * self._pp * self.data_ranks
        if server.get("quantization"):
            self.number_bytes = 0
        else:  # "auto" is the type of the model's configuration
            self.number_bytes = BYTES_OF.get(str(server.get("dtype")))
        if manager is not None:  # behind a URL, devices are those of another process's environment
            # SGLang's launcher chooses devices by this rule.
            first, step = _number(server, "base_gpu_id", 0), _number(server, "gpu_id_step", 1)
            here = self.ranks // _number(server, "nnodes", 1)
            self.device_numbers = range(first, first + here * step, step)
        if self.on_npu:
            _check_sglang_reaches_torch_npu()
        self.check(tool, self.window, identity.role, server)
        self._options = self._start_options()

    @classmethod
    def accepts(cls, engine: Any) -> bool:
        return isinstance(engine, str) or hasattr(engine, "tokenizer_manager")

    @classmethod
    def node_rank(cls, engine: Any) -> int:
        return getattr(getattr(engine, "server_args", None), "node_rank", 0)

    @classmethod
    def watch(cls, engine: Any, log: RequestLog, identity: WorkerIdentity) -> None:
        if (manager := manager_of(engine, identity)) is not None:
            watch_manager(manager, log)

    @classmethod
    def for_replay(cls, options: Mapping[str, Any], recorded: Mapping[str, Any]) -> ReplayedEngine:
        arguments = imported("sglang.srt.server_args", "sglang", "sglang").ServerArgs
        check_options(arguments, options, cls.name)
        import sglang

        engine = sglang.Engine(**options)
        manager = engine.tokenizer_manager

        async def generate(id: str, prompt: list[int], tokens: int) -> None:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True}
            await engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=id)

        model = manager.model_config
        facts = model.vocab_size, model.hf_config.to_dict(), manager.tokenizer
        return ReplayedEngine(engine, generate, manager.flush_cache, *facts)

    @classmethod
    def check(
        cls, tool: Tool, window: RolloutOptions, role: str, arguments: Mapping[str, Any]
    ) -> None:
        if window.start:
            raise ConfigError(
                "rollout.start",
                "SGLang counts iterations from the engine's start and does not publish the "
                "count; leave it out",
            )
        if tool.engine_profiler == "npu":
            for name in cls.window_options:
                if getattr(window, name):
                    raise ConfigError(
                        f"rollout.{name}", "SGLang does not have it with torch_npu; leave it out"
                    )
            if _data_parallel_ranks(arguments) > 1:
                raise ConfigError(
                    f"roles.{role}.tool",
                    "SGLang has data-parallel ranks, and the files of torch_npu are named by rank "
                    "alone; set the tool to spans, or use enable_dp_attention",
                )
            return
        device = str(arguments.get("device") or "cuda")
        for name in tool.options.activities or ():
            if name not in _offered(device):
                why = f"{name} ends an SGLang that runs on {device}"
                refuse_option(tool, role, "activities", "null", why)

    async def start(self) -> None:
        await self._calls.start(self._options)

    async def stop(self) -> str | None:
        try:
            await self._calls.stop()
        except Exception as error:
            if not self.window.bounded:
                raise
            await self._disarm()
            # By URL, SGLang answers alike to a stop that fails and to one of a window that is not
            # open.
            if _NOT_RECORDING not in str(error):
                return f"the recording window never began, or its stop failed: {error}"
        return None

    async def settle(self) -> None:
        try:
            await self._calls.stop()
        except Exception:
            await self._disarm()

    def died(self) -> str:
        # Older versions have no watchdog, which holds the engine's processes.
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        named = zip(
            getattr(watchdog, "_names", ()), getattr(watchdog, "_processes", ()), strict=False
        )
        return how_processes_ended({name: process.exitcode for name, process in named})

    def identify(self, path: Path) -> int | None:
        if self.on_npu:
            return (rank_of_recording(path) or 0) if is_recording(path) else None
        match = _TRACE.search(path.name)
        if match is None:
            return None
        tp, dp, pp = (int(match[name] or 0) for name in ("tp", "dp", "pp"))
        return ((dp if self.data_ranks > 1 else 0) * self._pp + pp) * self._tp + tp

    def part_of(self, path: Path) -> str | None:
        match = _TRACE.search(path.name)
        if len(self.parts) == 1 or match is None:
            return ""
        return _PARTS.get(match["stage"])

    def merged_in(self, paths: Iterable[Path]) -> Path | None:
        return next((path for path in paths if path.name.startswith(_MERGED)), None)

    async def _disarm(self) -> None:
        """Cancel a requested recording that has not begun: it could begin in a later capture.

        SGLang forgets such a request only when a recording stops, so an empty recording is made and
        discarded. It replaces one that runs.
        """
        await self._calls.start(
            {
                "output_dir": str(self.spool / "discarded"),
                "activities": ["CPU"],
                "with_stack": False,
                "record_shapes": False,
            }
        )
        await self._calls.stop()

    def _start_options(self) -> dict[str, Any]:
        """Return the arguments of ``start_profile`` that are the same in every capture."""
        options = self.tool.options
        activities = options.activities or _offered(self.device)
        arguments: dict[str, Any] = {
            "output_dir": str(self.spool),
            "activities": [_ACTIVITIES[name] for name in activities],
            "with_stack": options.stack,
            "record_shapes": options.shapes,
        }
        if self.window.merge_profiles:
            arguments["merge_profiles"] = True
        if self.window.profile_by_stage:
            arguments |= {"profile_by_stage": True, "num_steps": self.window.count}
        elif self.window.count is not None:
            # From a start step on, num_steps is exact in every version; without one, versions
            # before 0.5.16 record one forward pass less. 1 is always the next one.
            arguments |= {"start_step": 1, "num_steps": self.window.count}
        return arguments


def _check_sglang_reaches_torch_npu() -> None:
    """Check that SGLang can use the profiler of torch_npu.

    Raises:
        ToolUnavailableError: SGLang uses a function that the installed torch_npu does not have. A
            start of its profiler would raise, and end all processes of SGLang.
    """
    torch_npu = sys.modules.get("torch_npu")
    if not (
        torch_npu is None or hasattr(torch_npu, _PATCHES) or at_least("sglang", "0.5.23", True)
    ):
        raise ToolUnavailableError(
            f"init_capture: SGLang {metadata.version('sglang')} starts torch_npu's profiler by "
            f"{_PATCHES}, which torch_npu {torch_npu.__version__} does not have; install the "
            "torch_npu that this SGLang names, or set roles.rollout.tool to spans"
        )


def _data_parallel_ranks(arguments: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks with schedulers of their own."""
    return 1 if arguments.get("enable_dp_attention") else _number(arguments, "dp_size", 1)


def _number(arguments: Mapping[str, Any], name: str, default: int) -> int:
    return int(arguments.get(name) or default)


def _offered(device: str) -> tuple[str, ...]:
    """Return the activities of torch's profiler that SGLang can record on a type of device."""
    return {"cpu": ("cpu",), "xpu": ("cpu", "xpu")}.get(device, ("cpu", "cuda"))


def manager_of(engine: Any, identity: WorkerIdentity) -> Any | None:
    """Return the object of SGLang that takes an engine's requests; ``None`` for a server's URL.

    Raises:
        CaptureStateError: The engine has no tokenizer manager.
    """
    if isinstance(engine, str):
        return None
    manager = getattr(engine, "tokenizer_manager", None)
    if manager is None:
        raise CaptureStateError(
            f"init_capture: this {type(engine).__name__} has no tokenizer manager ({identity}); "
            "on the nodes of a replica other than its first, pass node_rank"
        )
    return manager


class ManagerCalls:
    """Calls a tokenizer manager on its own event loop.

    ``start_profile`` takes keywords up to 0.5.14 and one request object from 0.5.15 on.

    Attributes:
        server_args: Settings of the running SGLang.

    Raises:
        ToolUnavailableError: This SGLang is too old.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        if not callable(getattr(manager, "start_profile", None)):
            raise ToolUnavailableError(
                "this SGLang's tokenizer manager has no start_profile; install sglang>=0.5.3"
            )
        self._start_profile = manager.start_profile
        self._takes_object = "req" in inspect.signature(manager.start_profile).parameters
        # Read one by one: from 0.5.23 on they are not in vars().
        self.server_args = {name: getattr(manager.server_args, name, None) for name in _SERVER_ARGS}

    async def start(self, options: dict[str, Any]) -> None:
        """Start profiling now, or at a later iteration."""
        if self._takes_object:
            from sglang.srt.managers.io_struct import ProfileReq

            options = {"req": ProfileReq(**options)}
        await self._on_its_loop(partial(self._start_profile, **options))
        self._manager.start_profile = _refuse_second_start

    async def stop(self) -> None:
        """Stop profiling and write the traces; raise if SGLang does not record."""
        self._manager.start_profile = self._start_profile
        await self._on_its_loop(self._manager.stop_profile)

    async def _on_its_loop(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Await a call on the event loop on which the manager receives the scheduler's replies.

        The manager uses the loop of its first call; on any other loop, a reply never arrives.
        """
        loop: asyncio.AbstractEventLoop | None = getattr(self._manager, "event_loop", None)

        if loop is None or loop is asyncio.get_running_loop():
            await call()
        elif loop.is_running():
            # Cancelled, the manager would wait for the reply forever, and no later call would be
            # sent.
            await asyncio.shield(
                asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))
            )
        else:
            await asyncio.to_thread(loop.run_until_complete, call())


async def _refuse_second_start(*_: Any, **__: Any) -> None:
    """Refuse a start during a capture: SGLang would report success, and lose what it recorded."""
    raise RuntimeError("a capture of verl_profiling runs; start SGLang's profiler after it")


class HTTPCalls:
    """Calls an SGLang server by its URL, with the methods and attributes of :class:`ManagerCalls`.

    The server has to share this host's file system, to which it writes its traces.

    Args:
        url: URL of the server, e.g. ``http://127.0.0.1:30000``.
        start_s: Timeout (s) of the start.

    Raises:
        CaptureStateError: The server does not answer.
    """

    def __init__(self, url: str, start_s: float) -> None:
        self._url, self._start_s = url.rstrip("/"), start_s
        self._thread: threading.Thread | None = None
        try:
            self.server_args = self._call("/server_info")
        except CaptureStateError as error:
            if " answered 404" not in str(error):
                raise
            self.server_args = self._call("/get_server_info")  # versions before 0.5.6

    async def start(self, options: dict[str, Any]) -> None:
        """Start profiling now, or at a later iteration.

        A start that is answered too late is followed by a stop, because SGLang records by then.
        """
        answer = self._post("/start_profile", options, too_late="/stop_profile")
        try:
            await asyncio.wait_for(answer, self._start_s)
        except asyncio.TimeoutError as error:
            raise CaptureStateError(
                f"{self._url}/start_profile has not answered for {self._start_s:g} s"
            ) from error

    async def stop(self) -> None:
        """Stop profiling and write the traces, once an earlier start is answered."""
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(0.05)
        await self._post("/stop_profile", {})

    def _post(self, path: str, body: object, too_late: str = "") -> asyncio.Future[None]:
        """Call the server on a thread, which delays the end of neither the event loop nor Python.

        Args:
            path: Path of the URL.
            body: Body of the request, sent as JSON.
            too_late: Path to call after an answer for which nobody waits any more; empty for none.
        """
        answer: Future[None] = Future()

        def run() -> None:
            try:
                self._call(path, body, None)
            except Exception as error:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)
                return
            if answer.set_running_or_notify_cancel():
                answer.set_result(None)
            elif too_late:
                with suppress(Exception):  # the next stop or start sees it
                    self._call(too_late, {}, None)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return asyncio.wrap_future(answer)

    def _call(self, path: str, body: object = None, timeout_s: float | None = 30.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(
                self._url + path, data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer) if body is None else None
        except HTTPError as error:
            why = error.read(_MOST_BYTES).decode(errors="replace") or error.reason
            if error.code == 401:
                why += _KEY_NEEDED
            raise CaptureStateError(f"{self._url}{path} answered {error.code}: {why}") from error
        except (OSError, ValueError) as error:
            raise CaptureStateError(
                f"{self._url}{path} does not answer ({error}); is it a running SGLang server? "
                "A server ends when one of its processes dies; its log may show the cause"
            ) from error
