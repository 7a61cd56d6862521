"""The vLLM adapter: ``AsyncLLM`` and ``LLM``, from 0.8.5 on.

The profiler of vLLM is configured before the engine starts: before vLLM 0.13 by environment
variables, since then by ``profiler_config``. The options of a version are read from its code.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isal import igzip

from verl_profiling import clock
from verl_profiling.engines.adapter import (
    EngineAdapter,
    at_least,
    how_processes_ended,
    new_spool,
    refuse_option,
)
from verl_profiling.engines.request_log import OpenRequest, RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.opener import opened
from verl_profiling.files.recording_names import is_recording
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.groups import RolloutOptions
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
_REFUSED = "RetryableRequestError"  # raised by a paused engine, from vLLM 0.33 on
_ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}
_PLACE = re.compile(r"(?:^|_)dp(\d+)_pp(\d+)_tp(\d+)")
_RANK = re.compile(r"rank[-_]?(\d+)")
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
        return rollout.with_stacks() if _recorded_options(tool).stack else rollout
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
        self.ranks = self._pp * self._tp * parallel.data_parallel_size
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
        finished = getattr(getattr(resources, "engine_manager", None), "finished_procs", None)
        dead = (
            "the engine core reports its death" if getattr(resources, "engine_dead", False) else ""
        )
        return how_processes_ended(finished() if callable(finished) else {}) or dead

    def identify(self, path: Path) -> int | None:
        is_trace = is_recording(path) if self.on_npu else ".pt.trace.json" in path.name
        if not is_trace or "async_llm" in path.name:
            return None
        if place := _PLACE.search(path.name):
            dp, pp, tp = map(int, place.groups())
            return (dp * self._pp + pp) * self._tp + tp
        if rank := _RANK.search(path.name):
            return int(rank[1])
        return _rank_inside(path)

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


def _rank_inside(path: Path) -> int:
    """Return the rank from the content of a trace; before vLLM 0.11, the file name has no rank."""
    with opened(path) as raw, igzip.open(raw) if path.suffix == ".gz" else raw as file:
        head: bytes = file.read(1 << 16)
    found = _RANK_INSIDE.search(head)
    return int(found[1]) if found else 0


def watch_vllm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``LLM`` or an ``AsyncLLM`` with a wrapper around ``generate``.

    Each output of vLLM has the id, lengths and cached tokens of its request. Without
    ``disable_log_stats``, it also has ``RequestStateStats``: times on the monotonic clock of the
    engine core's process, and from 0.30 on the number of preemptions. A request with several
    samples has none of these times, and no count of cached tokens: vLLM reports them for one
    sample.
    """
    shares_clock = _shares_clock(engine)
    if log.busy is not None:
        log.busy.sums.tokens.append(partial(_tokens_of_open_requests, weakref.ref(engine)))

    def logged_batch(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if log.running:  # logged already: chat() of an older vLLM calls generate()
            return generate(*args, **kwargs)
        with log.open() as batch:
            outputs = generate(*args, **kwargs)
            for output in outputs:
                batch.id = output.request_id
                _tell(batch, output if len(output.outputs) == 1 else None, shares_clock=True)
                batch.prompt_ids = output.prompt_token_ids or ()
                for sample in output.outputs:
                    batch.close(
                        _prompt_tokens(output), len(sample.token_ids), failed=_is_aborted(sample)
                    )
        return outputs

    if hasattr(engine, "llm_engine"):
        for method in ("generate", "chat"):
            if hasattr(engine, method):
                log.watch_calls(engine, logged_batch, method)
    else:
        log.watch_streams(engine, "generate", partial(_noting, log, shares_clock))


def _tokens_of_open_requests(held: Callable[[], Any]) -> int:
    """Return the number of tokens of the engine's open requests; 0 for engines of vLLM's V0."""
    processor = getattr(_inner(held()), "output_processor", None)
    states = [*getattr(processor, "request_states", {}).values()]
    return sum(
        len(getattr(getattr(state, "detokenizer", None), "token_ids", ())) for state in states
    )


async def _noting(
    log: RequestLog,
    shares_clock: bool,
    stream: AsyncGenerator[Any, None],
    prompt: Any = None,
    sampling_params: Any = None,
    request_id: str = "",
    *_: Any,
    **__: Any,
) -> AsyncGenerator[Any, None]:
    """Log a request that begins now; yield its outputs."""
    samples = _Samples(sampling_params)
    last: Any = None
    with log.open(id=request_id) as record:
        try:
            async for output in stream:
                if last is None and not output.finished:
                    record.first_token()
                if samples.come_in_parts:
                    samples.add(output.outputs)
                last = output
                yield output
        except Exception as error:
            if last is None and type(error).__name__ == _REFUSED:
                record.refused()
            raise
        finally:
            if last is not None and not samples.lengths:  # the last output of one sample has all
                samples.add(last.outputs)
            _tell(record, last if samples.has_times else None, shares_clock)
            samples.close(record, last)
            # An abandoned request is aborted at once, as without this wrapper.
            await stream.aclose()


class _Samples:
    """The samples of a request: lengths by index, and the aborted ones.

    Attributes:
        come_in_parts: Whether all outputs are needed for the lengths, and not only the last one.
    """

    def __init__(self, parameters: Any) -> None:
        self._in_deltas = getattr(getattr(parameters, "output_kind", None), "name", "") == "DELTA"
        self._number = getattr(parameters, "n", None) or 1
        self._aborted: set[int] = set()
        self.come_in_parts = self._in_deltas or self._number > 1
        self.lengths: dict[int, int] = {}

    @property
    def has_times(self) -> bool:
        """Whether vLLM reports the times of the request."""
        return self._number == 1 and any(self.lengths.values())

    def add(self, samples: Iterable[Any]) -> None:
        """Add the samples of an output."""
        for sample in samples:
            earlier = self.lengths.get(sample.index, 0) if self._in_deltas else 0
            self.lengths[sample.index] = earlier + len(sample.token_ids)
            if _is_aborted(sample):
                self._aborted.add(sample.index)

    def close(self, record: OpenRequest, last: Any) -> None:
        """Close the record once for each sample, also for those without an output yet."""
        is_cut = last is None or not last.finished
        record.prompt_ids = getattr(last, "prompt_token_ids", None) or ()
        for index in range(max(self._number, len(self.lengths))):
            failed = is_cut or index in self._aborted
            record.close(_prompt_tokens(last), self.lengths.get(index, 0), failed=failed)


def _is_aborted(sample: Any) -> bool:
    return getattr(sample, "finish_reason", None) == "abort"


def _tell(record: OpenRequest, output: Any, shares_clock: bool) -> None:
    """Copy vLLM's data on a request into the record of the request;
    a request without output has none.
    """
    record.arrival_ns = record.scheduled_ns = record.first_token_ns = record.last_token_ns = 0
    record.cached_tokens = getattr(output, "num_cached_tokens", None)
    statistics = getattr(output, "metrics", None)
    record.preemptions = getattr(statistics, "num_preemptions", None)
    if statistics is None or not shares_clock:
        return
    ahead_ns = clock.now_ns() - time.monotonic_ns()

    def unix_ns(name: str) -> int:
        monotonic_s = getattr(statistics, name, 0.0)
        return ahead_ns + round(monotonic_s * 1e9) if monotonic_s else 0

    record.arrival_ns = unix_ns("queued_ts")
    record.scheduled_ns = unix_ns("scheduled_ts")
    record.first_token_ns = unix_ns("first_token_ts")
    record.last_token_ns = unix_ns("last_token_ts")


def _shares_clock(engine: Any) -> bool:
    """Return whether all engine cores run on this host, and so share one monotonic clock."""
    parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
    here = getattr(parallel, "data_parallel_size_local", 1)
    return (
        getattr(parallel, "local_engines_only", False)
        or getattr(parallel, "data_parallel_size", 1) <= here
    )


def _prompt_tokens(output: Any) -> int:
    return 0 if output is None else len(output.prompt_token_ids or ())
