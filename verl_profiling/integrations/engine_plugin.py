"""The entry points for engines that load plugins in each of their processes: vLLM and SGLang.

Another engine of this kind is a function here, with the calls that are marked, and its line in
``setup.cfg``.

``VERL_PROFILING_RUN`` switches the plugin on. Without it, an entry point returns at once. With it,
the classes that take requests are hooked. The first request of an engine starts its recorder,
unless a mixin records the engine already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "VERL_PROFILING_RUN"
"""Folder of the run, or a file with settings: YAML or JSON."""

BATCH_METHODS = ("generate", "chat")
"""Methods that return a whole batch of an ``LLM``, or of SGLang's ``Engine``."""

_MARKS = "VERL_PROFILING_MARKS"  # of files.engine_marks, which is not imported for nothing

_MISFIT = (
    "VERL_PROFILING_RUN: %s: %s; this engine is not recorded, or not all of it, and serves on. "
    "Install what 'pip check' names, or an engine of docs/compatibility.md"
)

# Names of marks (see files/engine_marks.py, which is not imported for nothing) by method, of each
# module and class.
_WORKER = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "kv_profile",
    "initialize_from_config": "kv_cache",
    "compile_or_warm_up_model": "warm_up",
    "sleep": "sleep",
    "wake_up": "wake",
}
_VLLM_CALLS = {
    ("vllm.v1.worker.gpu_worker", "Worker"): _WORKER,
    ("vllm.v1.worker.cpu_worker", "CPUWorker"): _WORKER,
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"): {
        "capture_model": "graphs",
        "post_kv_cache_wake_up": "kv_cache",
    },
    ("vllm.compilation.backends", "VllmBackend"): {"__call__": "compile"},
    ("vllm.v1.engine.core", "EngineCore"): {"reset_prefix_cache": "reset_cache"},
}
_SGLANG_CALLS = {
    ("sglang.srt.model_executor.model_runner", "ModelRunner"): {
        "init_torch_distributed": "device",
        "load_model": "weights",
        "init_device_graphs": "graphs",
        "kernel_warmup": "warm_up",
    },
    ("sglang.srt.model_executor.model_runner_kv_cache_mixin", "ModelRunnerKVCacheMixin"): {
        "init_memory_pool": "kv_cache"
    },
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"): {
        "release_memory_occupation": "sleep",
        "resume_memory_occupation": "wake",
    },
    ("sglang.srt.managers.scheduler", "Scheduler"): {"flush_cache": "reset_cache"},
    (
        "sglang.srt.utils.torch_memory_saver_adapter",
        "_TorchMemorySaverAdapterReal",
    ): {"pause": "", "resume": ""},
}

_hooked: set[str] = set()
_failed: set[Callable[..., None]] = set()


def in_vllm() -> None:
    """Hook vLLM; the entry point ``verl_profiling`` of its general plugins."""
    _hook("vllm.engine.arg_utils", _hook_arguments)
    _hook_requests("vllm.v1.engine.async_llm", "AsyncLLM", ["generate"])
    _hook_requests("vllm.entrypoints.llm", "LLM", BATCH_METHODS, BATCH_METHODS)
    _hook("starlette.applications", _hook_server)
    _mark("vllm", _VLLM_CALLS)


def in_sglang() -> None:
    """Hook SGLang; the entry point ``verl_profiling`` of its general plugins."""
    _hook_requests(
        "sglang.srt.managers.tokenizer_manager", "TokenizerManager", ["generate_request"]
    )
    _hook_requests("sglang.srt.entrypoints.engine", "Engine", ["generate"], BATCH_METHODS)
    _hook("starlette.applications", _hook_server)
    _mark("sglang", _SGLANG_CALLS)


def _mark(engine: str, calls: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    """Mark the calls of an engine in this process, if another process collects marks, or this one
    is going to record an engine.
    """
    is_on = os.environ.get(VARIABLE) or os.environ.get(_MARKS)
    if is_on and not _failed and engine not in _hooked:
        _hooked.add(engine)
        _tried(_mark_calls, calls)


def _mark_calls(calls: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    from verl_profiling.files.engine_marks import collect_marks
    from verl_profiling.integrations.engine_marks import mark_calls

    if _MARKS not in os.environ:
        collect_marks()
    mark_calls(calls, partial(_tried, _await_import))


def _hook(module: str, put_in: Any) -> None:
    """Let ``put_in`` change a module after its import, and only once, because an engine may load a
    plugin twice.
    """
    if os.environ.get(VARIABLE) and module not in _hooked:
        _hooked.add(module)
        _tried(_await_import, module, put_in)


def _await_import(module: str, put_in: Any) -> None:
    from wrapt import register_post_import_hook

    register_post_import_hook(partial(_tried, put_in), module)


def _tried(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function unless an earlier call failed; errors are logged, as they must not end the
    engine.
    """
    if function in _failed:
        return
    try:
        function(*arguments)
    except Exception as error:
        _failed.add(function)
        logger.error(_MISFIT, type(error).__name__, error)


def _hook_arguments(module: Any) -> None:
    """Let an engine of vLLM start with the profiler that captures need."""
    place = os.environ[VARIABLE]

    def create(function: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _tried(_add_profiler, place, self)
        return function(self, *args, **kwargs)

    _wrap(module.EngineArgs, "create_engine_config", create)


def _add_profiler(place: str, arguments: Any) -> None:
    from verl_profiling.integrations.engine_loop import add_profiler

    add_profiler(place, arguments)


def _hook_server(module: Any) -> None:
    """Let requests of an HTTP server begin when they come in, before they are read and checked."""

    async def serve(function: Any, self: Any, scope: Any, *args: Any, **kwargs: Any) -> None:
        if scope.get("type") == "http":  # tasks that an application starts with itself live on
            _tried(_note_arrival)
        await function(self, scope, *args, **kwargs)

    _wrap(module.Starlette, "__call__", serve)


def _note_arrival() -> None:
    from verl_profiling.engines.request_log import note_arrival

    note_arrival()


def _wrap(owner: Any, method: str, wrapper: Any) -> None:
    from verl_profiling.integrations.hooks import wrap

    if not wrap(owner, method, wrapper):
        raise AttributeError(f"{owner.__qualname__} has no method {method}")


def _hook_requests(
    module: str, owner: str, methods: Sequence[str], batch_methods: Sequence[str] = ()
) -> None:
    """Hook the methods of a class by which an engine takes requests.

    Args:
        module: Name of the module of the class.
        owner: Name of the class.
        methods: Names of the methods.
        batch_methods: Names of the methods that return a whole batch; empty if the engine serves
            requests at any time.
    """

    def put_in(module: Any) -> None:
        for method in methods:
            _wrap(getattr(module, owner), method, _first_request(method, batch_methods))

    _hook(module, put_in)


def _first_request(method: str, batch_methods: Sequence[str]) -> Any:
    """Return a wrapper of a method by which an engine takes requests.

    The first request to an engine starts its recorder. The recorder then puts a method that logs
    requests on that one engine.
    """
    place = os.environ[VARIABLE]

    def wrapper(function: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_recorded(self):
            _tried(_start_recorder, place, self, batch_methods)
            if _is_recorded(self):
                return getattr(self, method)(*args, **kwargs)
        return function(self, *args, **kwargs)

    return wrapper


def _start_recorder(place: str, engine: Any, batch_methods: Sequence[str]) -> None:
    from verl_profiling.integrations.engine_loop import start_recorder

    start_recorder(place, engine, batch_methods)


def _is_recorded(engine: Any) -> bool:
    """Return whether requests of an engine are logged, by a mixin or by the plugin."""
    replaced = vars(getattr(engine, "tokenizer_manager", engine))
    return "generate" in replaced or "generate_request" in replaced
