"""A rollout engine with its recorder, as the callback calls it: by a mixin, or by the plugin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from verl_profiling.capture.protocol import (
    CaptureStart,
    StartReply,
    StopReply,
    skipped,
    switched_off,
)
from verl_profiling.capture.session import process_session
from verl_profiling.engines import EngineAdapter, adapter_of, untested
from verl_profiling.engines.adapter import refusal
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.machine import engine_devices
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.typed_values import value_of
from verl_profiling.watch.process_sums import WatchQuestion, WatchReading

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(eq=False)
class IdleReplica:
    """A replica, or a node of it, of which nothing is recorded.

    Args:
        identity: Role, rank and host of the replica.
        reason: Why nothing is recorded.
    """

    identity: WorkerIdentity
    reason: str
    requests = None

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Skip a capture, or refuse one that was requested of this role."""
        identity, selection = self.identity, request.selection
        named = selection is not None and identity.role in (selection.roles or ())
        refuses = named and identity.node_rank == 0
        return StartReply(identity, "refused" if refuses else "skipped", reason=self.reason)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Return that nothing was recorded."""
        return StopReply(skipped(self.identity, self.reason, capture_id))

    def read_watch(self, question: WatchQuestion) -> None:
        """Return that nothing is watched."""


@dataclass(eq=False)
class SessionRecorder:
    """Passes a replica's captures to the session of this process.

    The session records engines that compute in this process: transformers, and vLLM without
    processes of its own. A trainer in the same process joins the capture.

    Args:
        config: All settings.
        identity: Role, rank and host of the replica.
        requests: The log of the replica's requests.
        elsewhere: Name of the engine if it computes in other, unrecorded processes; else empty.
        lost: Sentence on what is not recorded of the engine.
    """

    config: ProfilingConfig
    identity: WorkerIdentity
    requests: RequestLog
    elsewhere: str = ""
    lost: str = ""

    def __post_init__(self) -> None:
        self._open = ""
        process_session().register(self.config, self.identity)

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Start a capture, or join the open capture of this process."""
        session, who = process_session(), self.identity
        if request.stage is not None and not self._open and session.recording:
            mark = f"stage({request.stage!r})"
            reason = f"another role here records by stage: mark the rollout with {mark}"
            return StartReply(who, "skipped", reason=reason)
        if self.elsewhere and (why := refusal(self.config, who.role, request, self.elsewhere)):
            return StartReply(who, "refused", reason=why)
        reply = session.start(request, who)
        if reply.status in ("recording", "joined") and self._open != request.capture_id:
            self._open = request.capture_id
            self.requests.begin(request.policy_version)
            session.complete_result(self._with_requests)
        return reply

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop a capture, if one is open; see :meth:`EngineRecorder.stop_capture`."""
        stop = process_session().stop
        reply = stop(capture_id)
        if finish_s:  # the wait is on a thread, so that it does not block the event loop
            reply = await asyncio.to_thread(stop, capture_id, finish_s)
        return reply

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of this process in some steps, or ``None`` without a watch."""
        return process_session().read_watch(self.identity, question)

    def _with_requests(self, result: CaptureResult) -> CaptureResult:
        self._open = ""
        if self.lost:
            result = msgspec.structs.replace(result, notes=[*result.notes, self.lost])
        return self.requests.end_in_result(result)


Replica = EngineRecorder | SessionRecorder | IdleReplica
"""The worker of one engine, with the methods that the callback calls."""


def make_replica(
    config: ProfilingConfig,
    engine: Any = None,
    *,
    role: str = ROLLOUT_ROLE,
    replica: int = 0,
    rank: int | None = None,
    node_rank: int | None = None,
    requests: RequestLog | None = None,
    devices: Sequence[str] | None = None,
) -> Replica:
    """Return the worker of one engine.

    Args:
        config: All settings.
        engine: The engine; not needed if ``node_rank`` is not 0.
        role: Role of the server.
        replica: Index of the replica.
        rank: The replica's first global accelerator rank; ``None`` to number replicas of equal size
            one after another.
        node_rank: Index of this node in a replica that spans several nodes; ``None`` for that of
            the engine.
        requests: The log that the server writes; ``None`` to log requests by wrapping the engine.
        devices: Numbers or UUIDs of the engine's devices in order of rank; ``None`` for all visible
            devices.

    Raises:
        CaptureStateError: The engine was started without the arguments for captures.
        ConfigError: The settings are wrong, or the engine does not support them.
        ToolUnavailableError: The engine is unknown or too old.
    """
    is_enabled = config.for_role(role).enable
    if node_rank is None:
        adapter = adapter_of(engine) if is_enabled else None
        node_rank = 0 if adapter is None else adapter.node_rank(engine)
    first = replica if rank is None else rank
    fields = {"role": role, "rank": first, "replica": replica, "node_rank": node_rank}
    identity = value_of(WorkerIdentity, fields, "init_capture")
    if not is_enabled:
        return IdleReplica(identity, switched_off(identity))
    if node_rank:
        return IdleReplica(identity, f"node {node_rank} of the replica; node 0 records for all")
    return make_recorder(engine, config, identity, rank, requests, devices)


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
        identity: Role, rank and host of the replica.
        rank: The replica's first global accelerator rank, or ``None`` to number replicas of
            equal size one after another.
        requests: The log that the server writes; ``None`` to log requests by wrapping the engine.
        devices: Numbers or UUIDs of the engine's devices in order of rank; ``None`` for all visible
            devices.

    Raises:
        ToolUnavailableError: There is no adapter for the engine, or the engine is too old.
        ConfigError: The engine does not support the settings.
        CaptureStateError: The engine was started without the arguments for captures.
    """
    session, replica = process_session(), identity.replica or 0
    log = requests or RequestLog()
    log.serve(replica, config.rollout.requests, config.rollout.prompt_hashes)
    session.keep_every_step(config.watch)
    log.busy = session.busy("generate")
    adapter_class = adapter_of(engine)
    if adapter_class is None and requests is None:
        raise ToolUnavailableError(
            f"init_capture: no adapter for {type(engine).__module__}.{type(engine).__name__} "
            f"({identity}); pass engine=... a vLLM AsyncLLM or LLM, an SGLang Engine or URL, or a "
            "transformers model; for an engine of your own, requests=RequestLog()"
        )
    adapter, elsewhere, lost = None, "", ""
    if adapter_class is None or adapter_class.computes_here(engine):
        _check_uncounted(config, identity)
    else:
        elsewhere = adapter_class.name
        tool = adapter_class.tool_of(config.for_role(identity.role))
        if tool is not None:
            call = partial(adapter_class, engine, config, identity, tool)
            loss = f"{identity.name}: only requests are recorded"
            adapter, lost = _fitted(call, adapter_class, loss, config.strict)
            if lost:
                config = config.with_tool(identity.role, "spans")
    if adapter_class is not None and requests is None:
        watch = partial(adapter_class.watch, engine, log, identity)
        loss = f"{identity.name}: requests are not recorded"
        unlogged = _fitted(watch, adapter_class, loss, config.strict)[1]
        lost = unlogged or lost
    if adapter is None:
        return SessionRecorder(config, identity, log, elsewhere, lost)
    adapter.check_device(adapter.tool, adapter.device, identity.role)
    first = replica * adapter.ranks if rank is None else rank
    identity = msgspec.structs.replace(
        identity, rank=first, world_size=adapter.ranks, sizes={"dp": adapter.data_ranks}
    )
    known = engine_devices(adapter.device, adapter.ranks, adapter.device_numbers, devices)
    return EngineRecorder(adapter, identity, config, log, known)


def _fitted(
    call: Callable[[], _Result], adapter_class: type[EngineAdapter], loss: str, strict: bool
) -> tuple[_Result | None, str]:
    """Call an adapter, whose engine may have an API that it does not know.

    Args:
        call: The call of the adapter.
        adapter_class: Class of the adapter.
        loss: Clause on what is not recorded if the call fails.
        strict: Whether a failure is raised.

    Returns:
        The result of the call, and an empty text. After a failure ``None``, and a sentence on what
        is not recorded.

    Raises:
        ProfilingError: The settings or the state of the engine are wrong, or it is too old.
    """
    newer = untested(adapter_class.__module__.rpartition(".")[2])
    if newer:
        _warn_once(newer)
    try:
        return call(), ""
    except (ConfigError, CaptureStateError):
        raise
    except Exception as error:
        if strict or (isinstance(error, ToolUnavailableError) and not newer):
            raise
        lost = (
            f"{loss}: the API of {adapter_class.name} has moved ({type(error).__name__}: {error})"
        )
    logger.warning("%s", lost)
    return None, lost


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s; what no longer fits is not recorded, and named", text)


def _check_uncounted(config: ProfilingConfig, identity: WorkerIdentity) -> None:
    """Refuse what only the profiler of an engine has, e.g. a window of iterations.

    Raises:
        ConfigError: Such a setting of ``rollout`` is set, and a tool writes an artifact.
    """
    writes = any(tool.suffix for tool in config.for_role(identity.role).tools)
    for name in ("start", "count", "profile_by_stage", "merge_profiles"):
        if writes and getattr(config.rollout, name):
            raise ConfigError(
                f"rollout.{name}",
                f"{identity} computes in this process, without the profiler of an engine; unset it",
            )
