"""Chooses the recorder of an engine: its adapter's, or the session of this process.

The session records engines that compute in this process: transformers, and vLLM without processes of its
own. A trainer that shares the process joins the capture. A new engine is one adapter and one branch here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply, cannot_be_had
from verl_profiling.capture.session import process_session
from verl_profiling.engines.adapter import check_device, engine_tool, role_of_capture
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog, watch_transformers
from verl_profiling.engines.sglang import SGLangAdapter, manager_of, watch_manager
from verl_profiling.engines.vllm import VLLMAdapter, records_in_process, watch_vllm
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools.devices import engine_devices
from verl_profiling.tools.nsys import NsysTool, process_ranges

ENGINES = ("vllm", "sglang", "transformers")
_ADAPTERS: dict[str, Any] = {"vllm": VLLMAdapter, "sglang": SGLangAdapter}


@dataclass(eq=False)
class SessionRecorder:
    """Passes a replica's captures to the session of this process.

    Args:
        config: All settings.
        identity: The replica.
        requests: The log of the replica's requests.
        elsewhere: Name of an engine that computes in other processes, which are not recorded; else empty.
    """

    config: ProfilingConfig
    identity: WorkerIdentity
    requests: RequestLog
    elsewhere: str = ""

    def __post_init__(self) -> None:
        self._open = ""
        process_session().register(self.config, self.identity)

    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join the one of this process."""
        session, who = process_session(), self.identity
        if request.stage is not None and not self._open and session.recording:
            reason = f"another role of this process records by stage: mark this with stage({request.stage!r})"
            return StartReply(who, "skipped", reason=reason)
        if self.elsewhere:
            try:
                role_of_capture(self.config, who.role, request, self.elsewhere)
            except ConfigError as error:
                return StartReply(who, "refused", reason=cannot_be_had(request, error))
        reply = session.start(request, who)
        if reply.status in ("recording", "joined") and self._open != request.capture_id:
            self._open = request.capture_id
            self.requests.begin(request.policy_version)
            session.complete_result(self._with_requests)
        return reply

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""
        reply = process_session().stop(capture_id)
        if finish_s:  # on a thread, so that the event loop is not blocked
            return await asyncio.to_thread(process_session().stop, capture_id, finish_s)
        if reply.result.status == "skipped" and reply.result.identity.name != self.identity.name:
            result = msgspec.structs.replace(reply.result, identity=self.identity)
            return msgspec.structs.replace(reply, result=result)
        return reply

    def _with_requests(self, result: CaptureResult) -> CaptureResult:
        self._open = ""
        return self.requests.end_in_result(self.identity.name, result)


def make_recorder(
    engine: Any,
    config: ProfilingConfig,
    identity: WorkerIdentity,
    rank: int | None = None,
    requests: RequestLog | None = None,
    devices: Sequence[str] | None = None,
) -> EngineRecorder | SessionRecorder:
    """Return the recorder of an engine, with the replica's identity and request log.

    Args:
        engine: A vLLM ``AsyncLLM`` or ``LLM``, an SGLang ``Engine``, an object with a
            ``tokenizer_manager``, the URL of an SGLang server, a transformers model, or any other
            engine in this process whose server logs its requests.
        config: All settings.
        identity: The replica.
        rank: The replica's first global accelerator rank, or ``None`` to number replicas of
            equal size one after another.
        requests: The log that the server writes; ``None`` to log requests by wrapping the engine.
        devices: Numbers or UUIDs of its devices in order of rank; ``None`` for all visible devices.

    Raises:
        ToolUnavailableError: There is no adapter for the engine, or the engine is too old.
        ConfigError: The engine does not support the settings.
        CaptureStateError: The engine was started without the arguments for captures.
    """
    replica, role, session = identity.replica or 0, identity.role, process_session()
    log = requests or RequestLog()
    log.serve(replica, config.rollout.requests)
    session.keep_every_step(config.watch)
    log.busy = session.busy("generate", sums_requests=True)
    settings = config.for_role(role)
    package = _package(engine)
    if package is None and requests is None:
        raise ToolUnavailableError(
            f"init_capture: no adapter knows {type(engine).__module__}.{type(engine).__name__} ({identity}); "
            "pass engine=... a vLLM AsyncLLM or LLM, an SGLang Engine or URL, or a transformers model; "
            "for an engine of your own, requests=RequestLog()"
        )
    adapter_class = None if package == "vllm" and records_in_process(engine) else _ADAPTERS.get(package or "")
    tool, adapter = None, None
    if adapter_class is None:
        for name in ("start", "count"):
            if getattr(config.rollout, name) and any(one.suffix for one in settings.tools):
                raise ConfigError(
                    f"rollout.{name}",
                    f"{identity} computes in this process, where no engine counts iterations; leave it out",
                )
    elif (tool := engine_tool(settings, adapter_class.name)) is not None:
        adapter = adapter_class(engine, config, identity, tool)
    if requests is None:
        _watch(engine, package, log, identity)
    if adapter is None or tool is None:
        return SessionRecorder(config, identity, log, adapter_class.name if adapter_class else "")
    check_device(tool, adapter.name, adapter.device, role)
    first = replica * adapter.ranks if rank is None else rank
    identity = msgspec.structs.replace(identity, rank=first, world_size=adapter.ranks)
    if isinstance(tool, NsysTool):
        process_ranges().require()
    known = engine_devices(adapter.device, adapter.ranks, adapter.device_numbers, devices)
    return EngineRecorder(adapter, tool, identity, config, log, known)


def _watch(engine: Any, package: str | None, log: RequestLog, identity: WorkerIdentity) -> None:
    """Wrap the engine's methods so that its requests are logged."""
    if package == "transformers":
        watch_transformers(engine, log)
    elif package == "vllm":
        watch_vllm(engine, log)
    elif (manager := manager_of(engine, identity)) is not None:
        watch_manager(manager, log)


def _package(engine: Any) -> str | None:
    """Return the engine package of an object's class or base classes; a URL belongs to SGLang."""
    if isinstance(engine, str) or hasattr(engine, "tokenizer_manager"):
        return "sglang"
    packages = {base.__module__.partition(".")[0] for base in type(engine).__mro__}
    return next((name for name in ENGINES if name in packages), None)
