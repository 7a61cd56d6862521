"""From an engine to what records it. A new engine is one adapter and one branch here."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl_profiling.engines.base import EngineAdapter, records_with_nsys, torch_options
from verl_profiling.engines.in_process import SessionRecorder, watch_transformers
from verl_profiling.engines.recorder import EngineRecorder, Recorder
from verl_profiling.engines.recording import RangeRecording, RecordingMaker, TraceRecording
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.sglang import SGLangAdapter
from verl_profiling.engines.vllm import VLLMAdapter, records_in_process
from verl_profiling.engines.vllm_requests import watch_llm
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.tools.opened_ranges import process_ranges

__all__ = ["ENGINES", "make_recorder", "node_rank_of"]

ENGINES = ("vllm", "sglang", "transformers")


def make_recorder(
    engine: Any,
    config: ProfilingConfig,
    *,
    role: str,
    replica: int,
    rank: int | None,
    requests: RequestLog | None = None,
) -> tuple[Recorder, WorkerIdentity]:
    """Return what records an engine, and the identity of its replica.

    Args:
        engine: A vLLM ``AsyncLLM`` or ``LLM``, an SGLang ``Engine``, an object with a
            ``tokenizer_manager``, the URL of an SGLang server, a transformers model, or anything
            else in this process whose server logs its requests.
        config: All settings.
        role: Role of the server.
        replica: Index of the replica.
        rank: The replica's first global accelerator rank, or ``None`` to number replicas of
            equal size one after another.
        requests: The log that the server writes; ``None`` to have the engine watched.

    Raises:
        ToolUnavailableError: No adapter knows the engine, or it is too old.
        ConfigError: The engine cannot do what the settings ask for.
        CaptureStateError: The engine was started in a way that it cannot be captured.
    """
    log = requests or RequestLog()
    log.serve(replica, config.rollout.requests)
    settings = config.for_role(role)
    identity = WorkerIdentity(role=role, rank=replica if rank is None else rank, replica=replica)
    package = _package(engine)
    adapter: EngineAdapter | None = None
    if package == "transformers":
        if requests is None:
            watch_transformers(engine, log)
    elif package == "vllm" and records_in_process(engine):
        if requests is None:
            watch_llm(engine, log)
    elif package == "vllm":
        adapter = VLLMAdapter(engine, config, identity)
    elif package == "sglang" or isinstance(engine, str) or hasattr(engine, "tokenizer_manager"):
        adapter = SGLangAdapter(engine, config, identity)
    elif requests is None:
        raise ToolUnavailableError(
            f"init_capture: no adapter knows {type(engine).__module__}.{type(engine).__name__} ({identity}); "
            "pass engine=... a vLLM AsyncLLM or LLM, an SGLang Engine or URL, or a transformers model; "
            "for an engine of your own, requests=RequestLog()"
        )
    if adapter is None:
        _refuse_window(config, settings, identity)
        return SessionRecorder(config, identity, log), identity
    if requests is None:
        adapter.watch(log)
    nsys = records_with_nsys(settings)
    options = None if nsys else torch_options(settings, adapter.name)
    if options is None and not nsys:
        return SessionRecorder(config, identity, log), identity
    identity = WorkerIdentity(
        role=role,
        rank=replica * adapter.ranks if rank is None else rank,
        world_size=adapter.ranks,
        replica=replica,
    )
    recording: RecordingMaker
    if options is None:
        process_ranges().require()
        recording = partial(RangeRecording, identity)
    else:
        recording = partial(TraceRecording, adapter, identity, options.compression_level)
    return EngineRecorder(adapter, identity, settings, config, recording, log), identity


def _refuse_window(config: ProfilingConfig, settings: RoleConfig, identity: WorkerIdentity) -> None:
    """Refuse a window in iterations of an engine that computes in this process."""
    for name in ("start", "count"):
        if getattr(config.rollout, name) and any(tool.suffix for tool in settings.tools):
            raise ConfigError(
                f"rollout.{name}",
                f"{identity} computes in this process, where no engine counts iterations; leave it out",
            )


def node_rank_of(engine: Any) -> int:
    """Return which node of its replica an engine object belongs to, as far as it knows."""
    rank = getattr(getattr(engine, "server_args", None), "node_rank", 0)
    return rank if isinstance(rank, int) else 0


def _package(engine: Any) -> str | None:
    """Return which package an object's class comes from, subclasses included."""
    packages = {base.__module__.partition(".")[0] for base in type(engine).__mro__}
    return next((name for name in ENGINES if name in packages), None)
