"""The mixins for rollout servers, which pass captures to the recorder of the server's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from verl_profiling.capture.protocol import (
    CaptureStart,
    StartReply,
    StopReply,
    not_set_up,
    skipped,
)
from verl_profiling.engines import ENGINES, adapter_named, adapter_of
from verl_profiling.engines.replica import Replica, make_replica
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError, choices_hint
from verl_profiling.files.engine_marks import collect_marks
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.process_sums import WatchQuestion, WatchReading


class RolloutCaptureMixin:
    """Adds ``start_capture``, ``stop_capture`` and ``read_watch`` to a rollout server.

    The mixin has no ``__init__``, so it composes with any class, Ray actors included. The server
    passes :meth:`engine_args` to the engine's constructor, and calls :meth:`init_capture` with the
    engine. A server whose engine is not vLLM, SGLang or transformers passes
    ``requests=RequestLog()`` instead.
    """

    engine_package: ClassVar[str | None] = None

    _capture: Replica | None = None

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
        collect_marks()
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
        if engine is None and settings.for_role(role).enable:
            engine = self._capture_engine()
        self._capture = None
        self._capture = make_replica(
            settings,
            engine,
            role=role,
            replica=replica,
            rank=rank,
            node_rank=node_rank,
            requests=requests,
            devices=devices,
        )

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Start or join a capture. The callback calls this method.

        Raises:
            CaptureStateError: ``init_capture`` was not called.
            Exception: The exception of the engine; nothing is recorded then.
        """
        if self._capture is None:
            raise self._not_set_up(f"start_capture(step={request.step})")
        return await self._capture.start_capture(request)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop a capture, if one is open. The callback calls this method.

        Args:
            capture_id: The capture to stop; ``None`` for any that is open.
            finish_s: Seconds to wait for background work on artifacts.
        """
        if self._capture is None:
            reason = "stop_capture: not set up; call init_capture(...) first"
            return StopReply(skipped(WorkerIdentity(role="unknown"), reason, capture_id))
        return await self._capture.stop_capture(capture_id, finish_s)

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of the server's process in some steps;
        see :meth:`CaptureMixin.read_watch`.

        Raises:
            CaptureStateError: ``init_capture`` was not called.
        """
        if self._capture is None:
            raise self._not_set_up("read_watch")
        return self._capture.read_watch(question)

    def _not_set_up(self, call: str) -> CaptureStateError:
        return not_set_up(call, type(self).__name__, "config, engine=..., replica=...")

    def set_policy_version(self, version: int) -> None:
        """Record the policy version of new weights, for servers that are notified of weight
        updates.

        Args:
            version: Number of the policy version, as the training loop counts it.
        """
        requests = getattr(self._capture, "requests", None)
        if requests is not None:
            requests.set_policy_version(version)

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
