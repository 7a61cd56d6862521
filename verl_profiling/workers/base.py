"""The mixins of training workers (plain, FSDP, Megatron), and of the CPU processes of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from verl_profiling import clock
from verl_profiling.capture.protocol import (
    CaptureStart,
    StartReply,
    StopReply,
    not_set_up,
    switched_off,
)
from verl_profiling.capture.session import Session, process_session, stage
from verl_profiling.capture.stage_spans import Stage
from verl_profiling.errors import CaptureStateError
from verl_profiling.files.process_marks import marked
from verl_profiling.identity import WorkerIdentity, process_rank
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.typed_values import value_of
from verl_profiling.watch.process_sums import WatchQuestion, WatchReading

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BEST_FIRST = ("recording", "armed", "joined", "refused", "skipped")
_GROUPS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "dp": "data_parallel",
}
"""The parallel dimensions and Megatron's names for them."""


class CaptureMixin:
    """Adds ``start_capture``, ``stop_capture`` and ``read_watch`` to a worker.

    The mixin has no ``__init__``, so it composes with any class. A worker calls
    :meth:`init_capture` when its rank is known, and marks its stages with
    ``verl_profiling.stage("update_actor")``.
    """

    _capture_roles: Mapping[str, tuple[WorkerIdentity, bool]] = {}

    def init_capture(
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str,
        rank: int | None = None,
        world_size: int | None = None,
        topology: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare this worker for captures.

        Slow imports happen here, so that the first capture starts at once.

        A worker with several roles calls this method once per role. The worker is recorded once,
        under the role with which it was added to the callback, and with the settings of that role.

        Args:
            config: The same settings as the callback's. Disabled or ``None``: nothing is set up.
            role: Role of the worker group, e.g. ``actor``.
            rank: Global rank inside the role. By default the rank of torch.distributed or of the
                launcher's variables (RANK, WORLD_SIZE), else 0.
            world_size: Number of ranks of the role; by default from the same sources, else 1.
            topology: Coordinates in named parallel dimensions, e.g. ``{"dp": 1}``.
            sizes: Number of ranks along these dimensions, e.g. ``{"dp": 4}``.

        Raises:
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        settings = ProfilingConfig.from_any(config)
        own_rank, own_world_size = process_rank() or (0, 1)
        fields = {
            "role": role,
            "rank": own_rank if rank is None else rank,
            "world_size": own_world_size if world_size is None else world_size,
            "topology": dict(topology or {}),
            "sizes": dict(sizes or {}),
        }
        identity = value_of(WorkerIdentity, fields, "init_capture")
        if settings.enable:
            with marked("init_capture"):
                process_session().register(settings, identity)
            process_session().owns(self)
        self._capture_roles = {**self._capture_roles, role: (identity, settings.enable)}

    @property
    def capture(self) -> Session:
        """The session of this process; ``self.capture.step()`` counts a mini-batch."""
        return process_session()

    def start_capture(self, request: CaptureStart) -> StartReply:
        """Start a capture, or join one that another role of this process started.

        In discrete mode, the worker then waits for a selected stage. The callback calls this
        method.

        Raises:
            CaptureStateError: ``init_capture`` was not called.
        """
        if not self._capture_roles:
            raise self._not_set_up(f"start_capture(step={request.step})")
        received_ns = clock.now_ns()
        replies: dict[str, StartReply] = {}
        added = filter(self._capture_roles.get, request.roles)
        for role in dict.fromkeys([*added, *self._capture_roles]):
            identity, enabled = self._capture_roles[role]
            if enabled:
                reply = process_session().start(request, identity)
            else:
                reply = StartReply(identity, "skipped", reason=switched_off(identity))
            replies.setdefault(reply.status, reply)
        reply = replies[min(replies, key=_BEST_FIRST.index)]
        return msgspec.structs.replace(reply, received_ns=received_ns, replied_ns=clock.now_ns())

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop a capture, if one is open. The callback calls this method.

        Args:
            capture_id: The capture to stop; ``None`` for any open capture.
            finish_s: Seconds to wait for background work on artifacts.
        """
        return process_session().stop(capture_id, finish_s)

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of this process in some steps; ``None`` without a watch. Called by the
        callback.

        Args:
            question: The steps, and what else the watch wants to know.

        Raises:
            CaptureStateError: ``init_capture`` was not called.
        """
        if not self._capture_roles:
            raise self._not_set_up("read_watch")
        identity = next(
            (identity for identity, enabled in self._capture_roles.values() if enabled), None
        )
        return None if identity is None else process_session().read_watch(identity, question)

    def _not_set_up(self, call: str) -> CaptureStateError:
        return not_set_up(call, type(self).__name__, "config, role=..., rank=...")


class FSDPCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` that reads rank and coordinates from process group and mesh."""

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Prepare this worker for captures, after ``torch.distributed.init_process_group``.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group, e.g. ``actor``.
            rank: Global rank; by default the rank in the process group, or the launcher's rank.
            world_size: Number of ranks, with the same defaults.
            mesh: The device mesh; its named dimensions become the worker's topology.

        Raises:
            CaptureStateError: There is neither a process group nor a rank from the launcher.
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        enabled = ProfilingConfig.from_any(config).enable
        if enabled and (rank is None or world_size is None) and process_rank() is None:
            raise CaptureStateError(
                f"init_capture(role={role!r}): torch.distributed is not initialised; do so first "
                "by init_process_group(), or pass rank and world_size"
            )
        topology, sizes = {}, {}
        if mesh is not None:
            for index, name in enumerate(mesh.mesh_dim_names or ()):
                topology[name], sizes[name] = mesh.get_local_rank(name), mesh.size(index)
        super().init_capture(
            config, role=role, rank=rank, world_size=world_size, topology=topology, sizes=sizes
        )


class AgentLoopCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` for a process that runs trajectories: environments, tools, turns.

    Each :func:`verl_profiling.trajectory` and :func:`verl_profiling.span` is recorded, whichever
    tool other roles use. By default the mode is ``e2e``, and no other tool records; the settings
    ``roles.<role>.mode`` and ``roles.<role>.tool`` change that.
    """

    capture_role: ClassVar[str] = "agent_loop"

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Prepare this worker for captures.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group; by default ``agent_loop``.
            rank: Index of the worker in the group, from 0.
            world_size: Number of workers of the group.

        Raises:
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        role = role or self.capture_role
        settings = ProfilingConfig.from_any(config).with_trajectories(role)
        super().init_capture(settings, role=role, rank=rank, world_size=world_size)


class RewardCaptureMixin(AgentLoopCaptureMixin):
    """An :class:`AgentLoopCaptureMixin` for scoring responses on a CPU;
    its default role is ``reward``.
    """

    capture_role = "reward"


class MegatronCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` that reads ranks, coordinates and sizes from ``parallel_state``."""

    def init_capture(  # type: ignore[override]
        self, config: ProfilingConfig | Mapping[str, Any] | None, *, role: str
    ) -> None:
        """Prepare this worker for captures, after ``parallel_state.initialize_model_parallel``.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group, e.g. ``actor``.

        Raises:
            CaptureStateError: Megatron's model parallelism is not initialised.
            ConfigError: The settings are wrong.
            ImportError: Megatron-core is missing.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        if not ProfilingConfig.from_any(config).enable:
            super().init_capture(config, role=role)
            return
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise CaptureStateError(
                f"init_capture(role={role!r}): Megatron's parallelism is not initialised; do so "
                "first by parallel_state.initialize_model_parallel()"
            )
        import torch.distributed as dist

        def dimensions(what: str) -> dict[str, int]:
            return {
                short: getattr(parallel_state, f"get_{name}_{what}")()
                for short, name in _GROUPS.items()
            }

        super().init_capture(
            config,
            role=role,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            topology=dimensions("rank"),
            sizes=dimensions("world_size"),
        )


class CaptureTimers:
    """Records Megatron's timers as stages; set it as ``timers`` of the ``TransformerConfig``.

    Megatron's schedules time the forward and the backward of each micro-batch, and each wait for a
    neighbour in the pipeline, under the names ``forward-compute``, ``backward-compute``,
    ``forward-recv``, ... With ``config.timers = CaptureTimers(config.timers)`` these timers become
    spans inside the stage that runs the schedule.

    Args:
        timers: Megatron's own ``Timers``, which are still called; ``None`` for none.
    """

    def __init__(self, timers: Callable[..., Any] | None = None) -> None:
        self._timers = timers

    def __call__(self, name: str, log_level: int | None = None) -> _StageTimer:
        """Return the timer of that name, like Megatron's ``Timers``."""
        inner = self._timers(name, log_level=log_level) if self._timers is not None else None
        return _StageTimer(stage(name), inner)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped timers (``log``, ``write``, ...)."""
        if name == "_timers":  # looked up on a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._timers, name)


class _StageTimer:
    def __init__(self, timed: Stage, inner: Any) -> None:
        self._stage = timed
        self._inner = inner

    def start(self, barrier: bool = False) -> None:
        """Begin the stage, after the wrapped timer, which may wait for the other ranks."""
        if self._inner is not None:
            self._inner.start(barrier=barrier)
        self._stage.__enter__()

    def stop(self, barrier: bool = False) -> None:
        """End the stage, before the wrapped timer stops."""
        self._stage.__exit__(None, None, None)
        if self._inner is not None:
            self._inner.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
