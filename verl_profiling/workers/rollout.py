"""The mixins for rollout servers, which pass captures to the recorder of the server's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import msgspec

from verl_profiling.capture.protocol import (
    CaptureStart,
    StartReply,
    StopReply,
    not_set_up,
    skipped,
    switched_off,
)
from verl_profiling.capture.session import process_session
from verl_profiling.engines import ENGINES, EngineAdapter, adapter_named, adapter_of, untested
from verl_profiling.engines.adapter import refusal
from verl_profiling.engines.recorder import EngineRecorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import (
    CaptureStateError,
    ConfigError,
    ToolUnavailableError,
    choices_hint,
)
from verl_profiling.files.machine import engine_devices
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.typed_values import value_of
from verl_profiling.watch.sums import WatchQuestion, WatchReading

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class RolloutCaptureMixin:
    """Adds ``start_capture``, ``stop_capture`` and ``read_watch`` to a rollout server.

    The mixin has no ``__init__``, so it composes with any class, Ray actors included. The server
    passes :meth:`engine_args` to the engine's constructor, and calls :meth:`init_capture` with the
    engine. A server whose engine is not vLLM, SGLang or transformers passes
    ``requests=RequestLog()`` instead.
    """

    engine_package: ClassVar[str | None] = None

    _capture_identity: WorkerIdentity | None = None
    _capture_recorder: EngineRecorder | SessionRecorder | None = None
    _capture_idle_reason: str = ""

    @classmethod
    def engine_args(
        cls,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        engine: str | None = None,
        role: str = ROLLOUT_ROLE,
    ) -> dict[str, Any]:
        """Return arguments for the engine's constructor that allow captures of the engine.

        ``AsyncEngineArgs(model=..., **self.engine_args(config, engine="vllm"))``. Only vLLM needs
        arguments; for other engines, and without profiling, the dict is empty.

        Args:
            config: The same settings as the callback's.
            engine: Package of the engine; not needed with a mixin for one engine.
            role: Role of the server.

        Raises:
            ConfigError: The settings are wrong, or the installed engine does not support them.
        """
        settings = ProfilingConfig.from_any(config)
        if not settings.enable:
            return {}
        package = engine or cls.engine_package
        if package not in ENGINES:
            raise ConfigError(
                "engine", f"engine_args: unknown {package!r}; {choices_hint(package, ENGINES)}"
            )
        return adapter_named(package).engine_args(settings, role)

    def init_capture(
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        engine: Any = None,
        role: str = ROLLOUT_ROLE,
        replica: int = 0,
        rank: int | None = None,
        node_rank: int | None = None,
        requests: RequestLog | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        """Prepare this server for captures, after its engine was created.

        Args:
            config: The same settings as the callback's. Disabled or ``None``: nothing is set up.
            engine: The engine, or the object that holds it. By default an attribute of the server
                (see :class:`VLLMCaptureMixin` and :class:`SGLangCaptureMixin`). Not needed if
                ``node_rank`` is not 0.
            role: Role of the server.
            replica: Index of the replica.
            rank: The replica's first global accelerator rank. By default replicas of equal size are
                numbered one after another.
            node_rank: Index of this node in a replica that spans several nodes; only node 0
                records. By default the ``node_rank`` of an SGLang engine, else 0.
            requests: The log to which the server writes its requests. Only for an engine of your
                own, which must compute in this process. Requests to vLLM, SGLang and transformers
                are logged automatically.
            devices: Numbers (on this host) or UUIDs of the accelerators of this node's ranks, in
                order. The report counts a device that training workers share only once. By default
                all in ``CUDA_VISIBLE_DEVICES`` (on an NPU ``ASCEND_RT_VISIBLE_DEVICES``).

        Raises:
            CaptureStateError: The engine was started without the arguments for captures.
            ConfigError: The settings are wrong, or the engine does not support them.
            ToolUnavailableError: The engine is unknown or too old.
        """
        settings = ProfilingConfig.from_any(config)
        is_enabled = settings.for_role(role).enable
        if engine is None and is_enabled:
            engine = self._capture_engine()
        if node_rank is None:
            adapter = adapter_of(engine) if is_enabled else None
            node_rank = 0 if adapter is None else adapter.node_rank(engine)
        self._capture_recorder = None
        first = replica if rank is None else rank
        fields = {"role": role, "rank": first, "replica": replica, "node_rank": node_rank}
        self._capture_identity = value_of(WorkerIdentity, fields, "init_capture")
        if not is_enabled:
            self._capture_idle_reason = switched_off(self._capture_identity)
        elif node_rank:
            self._capture_idle_reason = f"node {node_rank} of the replica; node 0 records for all"
        else:
            self._capture_recorder = make_recorder(
                engine, settings, self._capture_identity, rank, requests, devices
            )
            self._capture_identity = self._capture_recorder.identity

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Start or join a capture. The callback calls this method.

        Raises:
            CaptureStateError: ``init_capture`` was not called.
            Exception: The exception of the engine; nothing is recorded then.
        """
        if self._capture_identity is None:
            raise not_set_up(request, type(self).__name__, "config, engine=..., replica=...")
        if self._capture_recorder is not None:
            return await self._capture_recorder.start(request)
        identity, selection = self._capture_identity, request.selection
        named = selection is not None and identity.role in (selection.roles or ())
        refuses = named and identity.node_rank == 0
        return StartReply(
            identity, "refused" if refuses else "skipped", reason=self._capture_idle_reason
        )

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop a capture, if one is open. The callback calls this.

        Args:
            capture_id: The capture to stop; ``None`` for any that is open.
            finish_s: Seconds to wait for background work on artifacts.
        """
        if self._capture_recorder is not None:
            return await self._capture_recorder.stop(capture_id, finish_s)
        identity = self._capture_identity or WorkerIdentity(role="unknown")
        reason = (
            self._capture_idle_reason or "stop_capture: not set up; call init_capture(...) first"
        )
        return StopReply(skipped(identity, reason, capture_id))

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of the server's process in some steps;
        see :meth:`CaptureMixin.read_watch`.
        """
        recorder = self._capture_recorder
        return (
            None if recorder is None else process_session().read_watch(recorder.identity, question)
        )

    def set_policy_version(self, version: int) -> None:
        """Record the policy version of new weights, for servers that are notified of weight
        updates.

        Args:
            version: Number of the policy version, as the training loop counts it.
        """
        if self._capture_recorder is not None:
            self._capture_recorder.requests.set_policy_version(version)

    def _capture_engine(self) -> Any:
        """Return the engine that the server holds, or the server if it is an engine itself."""
        engine = getattr(self, "engine", None)
        if engine is None and adapter_of(self) is not None:
            return self
        return engine


class VLLMCaptureMixin(RolloutCaptureMixin):
    """A mixin for a server that holds an ``AsyncLLM`` or an ``LLM`` as ``self.engine``."""

    engine_package = "vllm"


class SGLangCaptureMixin(RolloutCaptureMixin):
    """A mixin for a server that holds an SGLang ``Engine`` as ``self.engine``, or that has a
    ``self.tokenizer_manager``.
    """

    engine_package = "sglang"


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

    async def start(self, request: CaptureStart) -> StartReply:
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

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture, if one is open."""
        stop = process_session().stop
        reply = stop(capture_id)
        if finish_s:  # the wait is on a thread, so that it does not block the event loop
            reply = await asyncio.to_thread(stop, capture_id, finish_s)
        return reply

    def _with_requests(self, result: CaptureResult) -> CaptureResult:
        self._open = ""
        if self.lost:
            result = msgspec.structs.replace(result, notes=[*result.notes, self.lost])
        return self.requests.end_in_result(result)


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
    log.serve(replica, config.rollout.requests)
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
    identity = msgspec.structs.replace(identity, rank=first, world_size=adapter.ranks)
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
    """Refuse a window of iterations (``rollout.start``, ``count``) where no engine counts them.

    Raises:
        ConfigError: ``rollout.start`` or ``rollout.count`` is set, and a tool writes an artifact.
    """
    writes = any(tool.suffix for tool in config.for_role(identity.role).tools)
    for name in ("start", "count"):
        if writes and getattr(config.rollout, name):
            raise ConfigError(
                f"rollout.{name}",
                f"{identity} computes in this process, where no engine counts iterations; unset it",
            )
