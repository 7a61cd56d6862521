"""The mixin for Megatron workers: parallel coordinates from Megatron-core, micro-batches as stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_profiling.capture.session import stage
from verl_profiling.capture.stage import Stage
from verl_profiling.errors import CaptureStateError, ToolUnavailableError
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers.base import CaptureMixin

_GROUPS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "dp": "data_parallel",
}
"""Megatron's names of the parallel dimensions."""


class MegatronCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` that reads ranks, coordinates and sizes from ``parallel_state``."""

    def init_capture(  # type: ignore[override]
        self, config: ProfilingConfig | Mapping[str, Any] | None, *, role: str
    ) -> None:
        """Set this worker up, after ``parallel_state.initialize_model_parallel``.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group, e.g. ``actor``.

        Raises:
            CaptureStateError: Megatron's model parallelism is not initialised.
            ConfigError: The settings are wrong.
            ToolUnavailableError: Megatron-core is missing, or a tool cannot work on this machine.
        """
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            raise ToolUnavailableError(
                f"init_capture(role={role!r}): {type(self).__name__} needs megatron-core; install it with: "
                "pip install megatron-core"
            ) from error
        if not parallel_state.model_parallel_is_initialized():
            raise CaptureStateError(
                f"init_capture(role={role!r}): Megatron's parallelism is not initialised; call it after "
                "parallel_state.initialize_model_parallel()"
            )
        import torch.distributed as dist

        def dimensions(what: str) -> dict[str, int]:
            return {short: getattr(parallel_state, f"get_{name}_{what}")() for short, name in _GROUPS.items()}

        super().init_capture(
            config,
            role=role,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            topology=dimensions("rank"),
            sizes=dimensions("world_size"),
        )


class CaptureTimers:
    """Shows what Megatron times as stages; set it as ``timers`` of the ``TransformerConfig``.

    Megatron's schedules time the forward and the backward of each micro-batch, and each wait for
    a neighbour in the pipeline, under the names ``forward-compute``, ``backward-compute``,
    ``forward-recv``, ... With ``config.timers = CaptureTimers(config.timers)`` they become spans
    inside the stage that runs the schedule.

    Args:
        timers: Timers to call as well (Megatron's ``Timers``); ``None`` for none.
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
        """End it."""
        self._stage.__exit__(None, None, None)
        if self._inner is not None:
            self._inner.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
