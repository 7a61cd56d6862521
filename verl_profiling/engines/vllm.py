"""The vLLM adapter: ``AsyncLLM`` and ``LLM``, from 0.8.5 on.

The profiler of vLLM is configured before the engine starts: before vLLM 0.13 by environment
variables, since then by ``profiler_config``. The options of a version are read from its code.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isal import igzip

from verl_profiling.engines.adapter import (
    EngineAdapter,
    ReplayedEngine,
    at_least,
    check_options,
    how_processes_ended,
    new_spool,
    refuse_option,
)
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.vllm_requests import watch_vllm
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.opener import opened
from verl_profiling.files.run_files import is_recording
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig, RolloutOptions
from verl_profiling.tools.base import Tool, imported
from verl_profiling.tools.torch_profiler import TorchOptions

_NAMES_RANKS, _COUNTS_ITERATIONS = "0.16", "0.20"
"""The first vllm-ascend that names recordings by rank, and the first one that counts iterations."""

_DIR_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
_CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
_VARIABLES = {
    "profiler": _CUDA_VARIABLE,
    "torch_profiler_dir": _DIR_VARIABLE,
    "delay_iterations": "VLLM_PROFILER_DELAY_ITERS",
    "max_iterations": "VLLM_PROFILER_MAX_ITERS",
    "torch_profiler_with_stack": "VLLM_TORCH_PROFILER_WITH_STACK",
    "torch_profiler_record_shapes": "VLLM_TORCH_PROFILER_RECORD_SHAPES",
    "torch_profiler_with_memory": "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
    "torch_profiler_use_gzip": "VLLM_TORCH_PROFILER_USE_GZIP",
    "torch_profiler_dump_cuda_time_total": "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL",
    "ignore_frontend": "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM",
}
_ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}
_PLACE = re.compile(r"(?:^|_)dp(\d+)_pp(\d+)_tp(\d+)")
_RANK = re.compile(r"rank[-_]?(\d+)")
_PID_INSIDE = re.compile(rb'"pid":\s*(\d+)')
_HEAD_BYTES = 1 << 20  # the process groups of thousands of ranks come before the first event
_RANK_INSIDE = re.compile(rb'"distributedInfo":\s*\{[^}]*"rank":\s*(\d+)')


def check_vllm_ascend() -> None:
    """Check that the installed vllm-ascend can be captured.

    Raises:
        ToolUnavailableError: vllm-ascend is missing or too old, or its msMonitor profiler is
            switched on.
    """
    if not at_least("vllm-ascend", _NAMES_RANKS):
        raise ToolUnavailableError(
            f"engine_args: vLLM on an NPU needs vllm-ascend {_NAMES_RANKS} or later, which "
            "is not installed; "
            f"pip install 'vllm-ascend>={_NAMES_RANKS}', or set roles.rollout.tool to torch"
        )
    if os.environ.get("MSMONITOR_USE_DAEMON", "0") != "0":
        raise ToolUnavailableError(
            "engine_args: MSMONITOR_USE_DAEMON is set, with which vllm-ascend refuses to "
            "profile; unset it"
        )


def _profiler_config() -> Any:
    """Return vLLM's class ``ProfilerConfig``; ``None`` before 0.13."""
    if find_spec("vllm.config.profiler") is None:
        return None
    from vllm.config import ProfilerConfig

    return ProfilerConfig


def _known_options() -> set[str]:
    """Return the installed vLLM's fields of ``ProfilerConfig``; before 0.13,
    its environment variables.
    """
    if (profiler_config := _profiler_config()) is not None:
        return {field.name for field in dataclasses.fields(profiler_config)}
    from vllm import envs

    return {name for name, variable in _VARIABLES.items() if variable in envs.environment_variables}


def _recorded_options(tool: Tool) -> Any:
    """Return the options of a tool in the terms of vLLM's torch profiler.

    For vllm-ascend, vLLM's option ``torch_profiler_with_stack`` is torch_npu's ``with_modules``.
    """
    if tool.engine_profiler == "npu":
        return TorchOptions(stack=tool.options.modules, memory=tool.options.memory)
    return TorchOptions() if tool.starts_process else tool.options


def profiler_settings(tool: Tool, window: RolloutOptions, spool: Path) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig``,
    the configuration of the profiler from vLLM 0.13 on.
    """
    options = _recorded_options(tool)
    settings: dict[str, Any] = {
        "profiler": "cuda" if tool.starts_process else "torch",
        # The number of the first recorded iteration; 0 records at once.
        "delay_iterations": window.start + 1 if window.start or options.stack else 0,
        "max_iterations": window.count or 0,
    }
    if tool.starts_process:
        return settings
    if options.activities is not None:
        settings["torch_profiler_activities"] = [_ACTIVITIES[name] for name in options.activities]
    return settings | {
        "torch_profiler_dir": str(spool),
        "torch_profiler_with_stack": options.stack,
        "torch_profiler_record_shapes": options.shapes,
        "torch_profiler_with_memory": options.memory,
        # Compressing now, while the engine waits, takes far longer than compressing afterwards.
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        # The front end runs in this process, which the session may be recording.
        "ignore_frontend": True,
    }


def profiler_variables(settings: dict[str, Any]) -> dict[str, str]:
    """Return :func:`profiler_settings` as environment variables, for vLLM before 0.13."""
    variables = {}
    for name, value in settings.items():
        if name == "profiler":
            value = value == "cuda"
        variables[_VARIABLES[name]] = value if isinstance(value, str) else str(int(value))
    return variables


def _recording_window(rollout: RolloutOptions, tool: Tool) -> RolloutOptions:
    """Return the part of a rollout to record, with a limit on iterations if stacks are recorded.

    Raises:
        ConfigError: A part is set, and this vLLM cannot count iterations.
    """
    engine, newer = f"vLLM {_version()}", "vllm>=0.12"
    counts = "max_iterations" in _known_options()
    if tool.engine_profiler == "npu":
        engine, newer = "this vllm-ascend", f"vllm-ascend>={_COUNTS_ITERATIONS}"
        counts = at_least("vllm-ascend", _COUNTS_ITERATIONS, missing=True)
    if counts:
        return rollout.with_count() if _recorded_options(tool).stack else rollout
    if rollout.start or rollout.count is not None:
        key = "rollout.start" if rollout.start else "rollout.count"
        raise ConfigError(
            key, f"{engine} cannot count iterations; install {newer}, or use rollout.max_window_s"
        )
    return rollout


def _version() -> str:
    import vllm

    return str(vllm.__version__)


class VLLMAdapter(EngineAdapter):
    """Starts and stops the profilers of a vLLM engine's workers.

    Args:
        engine: An ``AsyncLLM`` or an ``LLM`` that was started with :meth:`engine_args`.
        config: All settings.
        identity: Role, rank and host of the replica.
        tool: The tool that records the engine.

    Raises:
        CaptureStateError: The engine was started without a profiler, or for another
            ``rollout.start`` or ``rollout.count``.
        ConfigError: This vLLM does not support the settings.
        ToolUnavailableError: This vLLM is too old.
    """

    name = "vLLM"
    profilers = {
        "torch": {},
        "npu": {
            "activities": (["cpu", "npu"],),
            "level": ("level1",),
            "aic_metrics": ("PipeUtilization", None),
            "stack": (False,),
            "shapes": (False,),
        },
        "nsys": {},
    }

    def __init__(
        self, engine: Any, config: ProfilingConfig, identity: WorkerIdentity, tool: Tool
    ) -> None:
        super().__init__(engine, config, identity, tool)
        self._held = weakref.ref(engine)  # a program that deletes it wants its devices back
        if not callable(getattr(engine, "start_profile", None)):
            raise ToolUnavailableError(
                f"{identity}: {type(engine).__name__} of vLLM {_version()} has no start_profile; "
                "install vllm>=0.8.5, and pass an AsyncLLM or an LLM"
            )
        parameters = inspect.signature(engine.start_profile).parameters
        vllm_config = _inner(engine).vllm_config
        # The workers of vllm-ascend get the window when the engine starts, not with each capture.
        self._takes_window = "max_iterations" in parameters and not self.on_npu
        self.check(tool, config.rollout, identity.role, {})
        self.window = _recording_window(config.rollout, tool)
        wanted = profiler_settings(tool, self.window, self.spool)
        self._iterations = {name: wanted[name] for name in ("delay_iterations", "max_iterations")}
        configured = getattr(vllm_config, "profiler_config", None)
        if folder := self._check_configured(configured, wanted["profiler"]):
            self.spool = Path(folder).expanduser().absolute()
        self.device = str(getattr(vllm_config.device_config, "device_type", "") or "cuda")
        parallel = vllm_config.parallel_config
        self._pp, self._tp = (
            int(parallel.pipeline_parallel_size),
            int(parallel.tensor_parallel_size),
        )
        self.data_ranks = parallel.data_parallel_size
        self.ranks = self._pp * self._tp * self.data_ranks
        model = getattr(vllm_config, "model_config", None)
        if model is not None:
            self.number_bytes = 0 if model.quantization else model.dtype.itemsize
        if (
            getattr(parallel, "distributed_executor_backend", None) != "ray"
        ):  # Ray places ranks itself
            self.device_numbers = range(self.ranks // max(getattr(parallel, "nnodes", 1) or 1, 1))

    @classmethod
    def computes_here(cls, engine: Any) -> bool:
        client = getattr(_inner(engine), "engine_core", None)
        executor = getattr(getattr(client, "engine_core", None), "model_executor", None)
        return any(base.__name__ == "UniProcExecutor" for base in type(executor).__mro__)

    @classmethod
    def watch(cls, engine: Any, log: RequestLog, identity: WorkerIdentity) -> None:
        watch_vllm(engine, log)

    @classmethod
    def engine_args(cls, config: ProfilingConfig, role: str) -> dict[str, Any]:
        """Return the arguments for ``AsyncEngineArgs`` or ``LLM`` that allow captures.

        Before vLLM 0.13, the profiler is configured by environment variables: this method sets
        them, and returns no arguments.

        Raises:
            ConfigError: The installed vLLM does not support one of the options.
            ToolUnavailableError: vLLM is not installed.
        """
        settings = config.for_role(role)
        tool = cls.tool_of(settings) if settings.enable else None
        if tool is None:
            return {}
        imported("vllm", tool.name, "'verl-profiling[vllm]'")
        cls.check(tool, config.rollout, role, {})
        window = _recording_window(config.rollout, tool)
        if tool.engine_profiler == "npu":
            check_vllm_ascend()
        options = _known_options()
        wanted = profiler_settings(tool, window, new_spool(config.local_folder))
        if "torch_profiler_activities" in wanted.keys() - options:
            why = f"vLLM {_version()} records all activities"
            refuse_option(tool, role, "activities", "null", why)
        if (profiler_config := _profiler_config()) is not None:
            return {"profiler_config": profiler_config(**wanted)}
        if tool.starts_process and "profiler" not in options:
            raise ConfigError(
                f"roles.{role}.tool",
                f"vLLM {_version()} has no mode for {tool.name}; install vllm>=0.12, or use tool "
                "torch or spans",
            )
        variables = profiler_variables({name: wanted[name] for name in options & wanted.keys()})
        os.environ.update(variables)
        return {}

    @classmethod
    def for_replay(cls, options: Mapping[str, Any], recorded: Mapping[str, Any]) -> ReplayedEngine:
        arguments = imported("vllm.engine.arg_utils", "vllm", "vllm").AsyncEngineArgs
        check_options(arguments, options, cls.name)
        from vllm import SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(arguments(**options, **recorded))

        async def generate(id: str, prompt: list[int], tokens: int) -> None:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, request_id=id):
                pass

        model = engine.vllm_config.model_config
        tokenizer = None if model.skip_tokenizer_init else engine.tokenizer
        facts = model.get_vocab_size(), model.hf_config.to_dict(), tokenizer
        return ReplayedEngine(engine, generate, engine.reset_prefix_cache, *facts)

    @property
    def _engine(self) -> Any:
        """The engine, to which this adapter has a weak reference.

        Raises:
            CaptureStateError: The program has deleted it.
        """
        engine = self._held()
        if engine is None:
            raise CaptureStateError("the program has deleted its engine")
        return engine

    async def start(self) -> None:
        window = self._iterations if self._takes_window else {}
        await _result(self._engine.start_profile(**window))

    async def stop(self) -> None:
        await _result(self._engine.stop_profile())

    def died(self) -> str:
        client = getattr(_inner(self._held()), "engine_core", None)
        resources = getattr(client, "resources", None)
        finished = getattr(self._manager, "finished_procs", None)
        dead = (
            "the engine core reports its death" if getattr(resources, "engine_dead", False) else ""
        )
        return how_processes_ended(finished() if callable(finished) else {}) or dead

    def identify(self, path: Path) -> int | None:
        is_trace = is_recording(path) if self.on_npu else ".pt.trace.json" in path.name
        if not is_trace or "async_llm" in path.name:
            return None
        rank = self._named_rank(path)
        of_core = self._pp * self._tp
        return rank if rank >= of_core else rank + of_core * self._core_of(path)

    def _named_rank(self, path: Path) -> int:
        if place := _PLACE.search(path.name):
            dp, pp, tp = map(int, place.groups())
            return (dp * self._pp + pp) * self._tp + tp
        if rank := _RANK.search(path.name):
            return int(rank[1])
        return _number_inside(path, _RANK_INSIDE)  # before vLLM 0.11, the name has no rank

    def _core_of(self, path: Path) -> int:
        """Return the index of the engine core that wrote a trace; 0 if there is one, or if it is
        unknown.

        The data-parallel cores of a dense model compute apart: their traces have the same names.
        """
        cores = [process.pid for process in getattr(self._manager, "processes", ())]
        if len(cores) < 2 or self.on_npu:
            return 0
        pid = _number_inside(path, _PID_INSIDE)
        for process in (pid, _parent_of(pid)):
            if process in cores:
                return cores.index(process)
        return 0

    @property
    def _manager(self) -> Any:
        """The object that holds the processes of the engine cores; ``None`` if there is none."""
        client = getattr(_inner(self._held()), "engine_core", None)
        return getattr(getattr(client, "resources", None), "engine_manager", None)

    def _check_configured(self, configured: Any, wanted: str) -> str:
        """Check that the engine was started for these settings;
        return the folder of its traces, if any.
        """
        if configured is None:
            folder = os.environ.get(_DIR_VARIABLE, "")
            kind = "cuda" if os.environ.get(_CUDA_VARIABLE) == "1" else "torch" if folder else ""
        else:
            folder, kind = configured.torch_profiler_dir, configured.profiler
        remedy = f"{self.identity}: pass **engine_args(config) to its constructor"
        if kind != wanted:
            found = f"the profiler {kind}" if kind else "no profiler"
            raise CaptureStateError(
                f"init_capture: vLLM was started with {found}, and {self.tool.name} needs "
                f"{wanted}; {remedy}"
            )
        if configured is not None and not self._takes_window:
            window = (configured.delay_iterations, configured.max_iterations)
            expected = tuple(self._iterations.values())
            if window != expected:
                raise CaptureStateError(
                    f"init_capture: vLLM {_version()} was started with (delay_iterations, "
                    "max_iterations) = "
                    f"{window}, but rollout.start and rollout.count need {expected}; {remedy}"
                )
        return folder


def _inner(engine: Any) -> Any:
    """Return the engine inside an ``LLM``, with the attributes of an ``AsyncLLM``; else itself."""
    return getattr(engine, "llm_engine", engine)


async def _result(answer: Any) -> None:
    """Await the result of a call of ``AsyncLLM``; ``LLM`` has finished the call already."""
    if inspect.isawaitable(answer):
        await answer


def _number_inside(path: Path, pattern: re.Pattern[bytes]) -> int:
    """Return the first number in the head of a trace that a pattern finds; 0 if there is none."""
    with opened(path) as raw, igzip.open(raw) if path.suffix == ".gz" else raw as file:
        head: bytes = file.read(_HEAD_BYTES)
    found = pattern.search(head)
    return int(found[1]) if found else 0


def _parent_of(pid: int) -> int:
    """Return the process that started a process of this host; 0 if it is unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(state.rpartition(")")[2].split()[1])
