"""The vLLM adapter: ``AsyncLLM`` and ``LLM``, from 0.8.5 on.

vLLM's profiler has to be asked for before the engine starts, and writes into one folder for
life. What each version offers is read off its own code: docs/engines.md has the table.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from isal import igzip

from verl_profiling.config import ProfilingConfig
from verl_profiling.engines.base import (
    EngineAdapter,
    EngineTrace,
    new_spool,
    records_with_nsys,
    refuse_option,
    torch_options,
)
from verl_profiling.engines.options import RolloutOptions
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.vllm_requests import watch_async_llm, watch_llm
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.tools.torch_profiler import TorchOptions

__all__ = [
    "VLLMAdapter",
    "cuda_settings",
    "cuda_variables",
    "profiler_settings",
    "profiler_variables",
    "records_in_process",
    "vllm_engine_args",
]

logger = logging.getLogger(__name__)

_DIR_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
_CUDA_VARIABLE = "VLLM_TORCH_CUDA_PROFILE"
_ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}
_PLACE = re.compile(r"(?:^|_)dp(\d+)_pp(\d+)_tp(\d+)")
_RANK = re.compile(r"rank[-_]?(\d+)")
_RANK_INSIDE = re.compile(rb'"distributedInfo":\s*\{[^}]*"rank":\s*(\d+)')


def vllm_engine_args(config: ProfilingConfig, role: str) -> dict[str, Any]:
    """Return what to pass to ``AsyncEngineArgs`` or ``LLM`` so that the engine can be captured.

    Before vLLM 0.13 the profiler is configured by environment variables; these are set, and
    there is nothing to pass.

    Raises:
        ConfigError: The installed vLLM has no such option.
        ToolUnavailableError: vLLM is not installed.
    """
    settings = config.for_role(role)
    nsys = settings.enable and records_with_nsys(settings)
    options = None if nsys or not settings.enable else torch_options(settings, "vLLM")
    if options is None and not nsys:
        return {}
    if find_spec("vllm") is None:
        raise ToolUnavailableError("engine_args: vLLM is not installed; pip install 'verl-profiling[vllm]'")
    if options is None:
        return _cuda_engine_args(_range_window(config.rollout), role)
    window = _window(config.rollout, options.stack)
    spool = new_spool(config.save_path)
    if find_spec("vllm.config.profiler") is None:
        if options.activities is not None:
            refuse_option(role, "activities", "null", f"vLLM {_version()} records all that there is")
        known = _variables()
        variables = profiler_variables(options, window, spool)
        os.environ.update({name: value for name, value in variables.items() if name in known})
        return {}
    from vllm.config import ProfilerConfig

    if options.activities is not None and "torch_profiler_activities" not in _fields(ProfilerConfig):
        refuse_option(role, "activities", "null", f"vLLM {_version()} records all that there is")
    return {"profiler_config": ProfilerConfig(**profiler_settings(options, window, spool))}


def _cuda_engine_args(window: RolloutOptions, role: str) -> dict[str, Any]:
    """Have the engine open ranges of Nsight Systems: ``cudaProfilerStart`` in each of its workers."""
    if find_spec("vllm.config.profiler") is None:
        known = _variables()
        if _CUDA_VARIABLE not in known:
            raise ConfigError(
                f"roles.{role}.tool",
                f"vLLM {_version()} has no mode for nsys; install vllm>=0.12, or set it to torch or spans",
            )
        variables = cuda_variables(window)
        os.environ.update({name: value for name, value in variables.items() if name in known})
        return {}
    from vllm.config import ProfilerConfig

    return {"profiler_config": ProfilerConfig(**cuda_settings(window))}


def cuda_settings(window: RolloutOptions) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig`` for Nsight Systems, from vLLM 0.13 on."""
    return {"profiler": "cuda", "delay_iterations": 0, "max_iterations": window.count or 0}


def cuda_variables(window: RolloutOptions) -> dict[str, str]:
    """Return the environment variables for Nsight Systems, before vLLM 0.13."""
    return {
        _CUDA_VARIABLE: "1",
        "VLLM_PROFILER_DELAY_ITERS": "0",
        "VLLM_PROFILER_MAX_ITERS": str(window.count or 0),
    }


def profiler_settings(options: TorchOptions, window: RolloutOptions, spool: Path) -> dict[str, Any]:
    """Return the fields of ``ProfilerConfig``, which configures the profiler from vLLM 0.13 on."""
    settings: dict[str, Any] = {
        "profiler": "torch",
        "torch_profiler_dir": str(spool),
        "torch_profiler_with_stack": options.stack,
        "torch_profiler_record_shapes": options.shapes,
        "torch_profiler_with_memory": options.memory,
        "torch_profiler_with_flops": options.flops,
        # Compressing while the engine waits takes far longer than doing it afterwards.
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        # The front end runs in this process, where the session may record already.
        "ignore_frontend": True,
        "delay_iterations": _delay(window, options.stack),
        "max_iterations": window.count or 0,
    }
    if options.activities is not None:
        settings["torch_profiler_activities"] = [_ACTIVITIES[name] for name in options.activities]
    return settings


def profiler_variables(options: TorchOptions, window: RolloutOptions, spool: Path) -> dict[str, str]:
    """Return the environment variables that configure the profiler before vLLM 0.13."""
    switches = {
        "VLLM_TORCH_PROFILER_WITH_STACK": options.stack,
        "VLLM_TORCH_PROFILER_RECORD_SHAPES": options.shapes,
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": options.memory,
        "VLLM_TORCH_PROFILER_WITH_FLOPS": options.flops,
        "VLLM_TORCH_PROFILER_USE_GZIP": False,
        "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL": False,
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": True,
        "VLLM_PROFILER_DELAY_ITERS": _delay(window, options.stack),
        "VLLM_PROFILER_MAX_ITERS": window.count or 0,
    }
    return {_DIR_VARIABLE: str(spool), **{name: str(int(value)) for name, value in switches.items()}}


def records_in_process(engine: Any) -> bool:
    """Return whether a vLLM engine computes in this very process, where the session records it."""
    client = getattr(getattr(engine, "llm_engine", engine), "engine_core", None)
    executor = getattr(getattr(client, "engine_core", None), "model_executor", None)
    return any(base.__name__ == "UniProcExecutor" for base in type(executor).__mro__)


class VLLMAdapter(EngineAdapter):
    """Drives the profilers of a vLLM engine's workers.

    Args:
        engine: An ``AsyncLLM`` or an ``LLM`` that was started with :func:`vllm_engine_args`.
        config: All settings.
        identity: The replica.

    Raises:
        CaptureStateError: The engine was started without a profiler, or with another window.
        ConfigError: The settings ask for what this vLLM does not have.
        ToolUnavailableError: This vLLM is too old.
    """

    name: ClassVar[str] = "vLLM"

    def __init__(self, engine: Any, config: ProfilingConfig, identity: WorkerIdentity) -> None:
        self._engine = engine
        self._identity = identity
        if not callable(getattr(engine, "start_profile", None)):
            raise ToolUnavailableError(
                f"{identity}: {type(engine).__name__} of vLLM {_version()} has no start_profile; "
                "install vllm>=0.8.5, and pass an AsyncLLM or an LLM"
            )
        parameters = inspect.signature(engine.start_profile).parameters
        self._takes_prefix = "profile_prefix" in parameters
        self._takes_window = "max_iterations" in parameters
        vllm_config = getattr(engine, "llm_engine", engine).vllm_config
        settings = config.for_role(identity.role)
        configured = getattr(vllm_config, "profiler_config", None)
        if records_with_nsys(settings):
            self.window, self._delay = _range_window(config.rollout), 0
            self._check_configured(configured, "cuda", _CUDA_VARIABLE)
        elif (options := torch_options(settings, self.name)) is not None:
            self.window = _window(config.rollout, options.stack)
            self._delay = _delay(self.window, options.stack)
            self._check_configured(configured, "torch", _DIR_VARIABLE)
            folder = os.environ[_DIR_VARIABLE] if configured is None else configured.torch_profiler_dir
            self.spool = Path(folder).expanduser().absolute()
        parallel = vllm_config.parallel_config
        self._pp, self._tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        self.ranks = self._pp * self._tp * parallel.data_parallel_size

    async def start(self, label: str) -> None:
        arguments: dict[str, Any] = {}
        if self._takes_prefix:
            arguments["profile_prefix"] = label
        if self._takes_window:
            arguments["delay_iterations"] = self._delay
            arguments["max_iterations"] = self.window.count or 0
        try:
            await _result(self._engine.start_profile(**arguments))
        except Exception as error:
            if type(error).__name__ == "ProfilerAlreadyActiveError":
                raise CaptureStateError(
                    f"start_capture: something else started vLLM's profiler ({self._identity}); "
                    "call the engine's stop_profile() first"
                ) from error
            raise

    async def stop(self) -> None:
        await _result(self._engine.stop_profile())

    def identify(self, path: Path, label: str) -> EngineTrace | None:
        if ".pt.trace.json" not in path.name or "async_llm" in path.name:
            return None
        if self._takes_window and not path.name.startswith(label):
            return None
        if place := _PLACE.search(path.name):
            dp, pp, tp = map(int, place.groups())
            return EngineTrace((dp * self._pp + pp) * self._tp + tp)
        if rank := _RANK.search(path.name):
            return EngineTrace(int(rank[1]))
        return EngineTrace(_rank_inside(path))

    def watch(self, log: RequestLog) -> None:
        if hasattr(self._engine, "llm_engine"):
            watch_llm(self._engine, log)
        else:
            watch_async_llm(self._engine, log)

    def _check_configured(self, profiler_config: Any, kind: str, variable: str) -> None:
        """Check that the engine was started with the profiler that is asked for, and with its window."""
        remedy = f"{self._identity}: pass **engine_args(config) to its constructor"
        if profiler_config is None:
            if not os.environ.get(variable):
                raise CaptureStateError(f"init_capture: vLLM was started without a profiler; {remedy}")
            return
        if profiler_config.profiler != kind:
            found = profiler_config.profiler or "no profiler"
            raise CaptureStateError(f"init_capture: vLLM was started with {found}, not with {kind}; {remedy}")
        configured = (profiler_config.delay_iterations, profiler_config.max_iterations)
        wanted = (self._delay, self.window.count or 0)
        if not self._takes_window and configured != wanted:
            raise CaptureStateError(
                f"init_capture: vLLM {_version()} was started with (delay, iterations) = {configured}, and "
                f"rollout.start and rollout.count mean {wanted}; {remedy}"
            )


async def _result(answer: Any) -> None:
    """Wait for what ``AsyncLLM`` returns; ``LLM`` has done it already."""
    if inspect.isawaitable(answer):
        await answer


def _delay(window: RolloutOptions, stack: bool) -> int:
    """Return vLLM's ``delay_iterations``: the number of the first recorded iteration, 0 for at once."""
    return window.start + 1 if window.start or stack else 0


def _range_window(rollout: RolloutOptions) -> RolloutOptions:
    """Return how much of a rollout is a range of Nsight Systems.

    Raises:
        ConfigError: The installed vLLM cannot record that, or it might open no range.
    """
    if rollout.start:
        raise ConfigError(
            "rollout.start",
            "nsys numbers the ranges that were opened, and a rollout may end before this one is; set it to 0",
        )
    return _window(rollout, stack=False)


def _window(rollout: RolloutOptions, stack: bool) -> RolloutOptions:
    """Return how much is recorded.

    Raises:
        ConfigError: The installed vLLM cannot record that.
    """
    if rollout.by_stage:
        raise ConfigError("rollout.by_stage", "vLLM cannot record prefill and decode apart; set it to false")
    if find_spec("vllm.config.profiler") is not None or "VLLM_PROFILER_MAX_ITERS" in _variables():
        return rollout.with_stacks() if stack else rollout
    if rollout.start or rollout.count is not None:
        key = "rollout.start" if rollout.start else "rollout.count"
        raise ConfigError(
            key, f"vLLM {_version()} cannot count iterations; install vllm>=0.12, or use rollout.max_window_s"
        )
    if stack:
        logger.warning(
            "vLLM %s cannot count iterations, and its idle workers poll: a second of stacks can take a "
            "minute to write; set rollout.max_window_s, or install vllm>=0.12",
            _version(),
        )
    return rollout


def _variables() -> set[str]:
    from vllm import envs

    return set(envs.environment_variables)


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _rank_inside(path: Path) -> int:
    """Return the rank that torch wrote into a trace's head; versions before 0.11 name no rank."""
    with igzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        head: bytes = file.read(1 << 16)
    found = _RANK_INSIDE.search(head)
    return int(found[1]) if found else 0
