"""Records what the rollouter of a fully asynchronous trainer does: samples, its queue, and its pauses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from verl_profiling.integrations.hooks import mark, missing, wrap
from verl_profiling.integrations.verl.processes import ROLLOUTER, add_actor_methods, rollout_processes
from verl_profiling.trajectories import Span, count, span

__all__ = ["hook_rollouter", "is_rollouter"]

_SAMPLE = "_process_single_sample_streaming"
_VALIDATE = "do_validate"
_IN_FLIGHT, _STALENESS = "samples in flight", "staleness samples"
_COUNTS = {
    "monitor/queue/mq_queue_size": "message queue",
    "monitor/active_tasks_size": _IN_FLIGHT,
    "count/staleness_samples": _STALENESS,
}
_PAUSE = "_verl_profiling_pause"


def is_rollouter(trainer_class: type[Any]) -> bool:
    """Return whether a class of verl's trainers makes samples for one, instead of training."""
    return hasattr(trainer_class, _SAMPLE)


def hook_rollouter(rollouter_class: type[Any]) -> None:
    """Give ``FullyAsyncRollouter`` the capture methods, and record what it does."""
    if _SAMPLE in vars(rollouter_class):
        add_actor_methods(rollouter_class, ROLLOUTER)
        rollouter_class.start_capture = start_capture
        rollouter_class.rollout_processes = rollout_processes_of
    for name, wrapper in _HOOKS.items():
        if name in vars(rollouter_class):
            wrap(rollouter_class, name, wrapper)
    if _VALIDATE in vars(rollouter_class):
        mark(rollouter_class, _VALIDATE, partial(span, "validate"))


def check_rollouter(module: Any) -> None:
    """Note what the rollouter does not have; it is hooked when its class is made, before ``ray.remote``."""
    for name in (*_HOOKS, _VALIDATE):
        if not hasattr(module.FullyAsyncRollouter, name):
            missing(module.FullyAsyncRollouter, name)


def start_capture(self: Any, request: Any) -> Any:
    """Start or join a capture, with what is known of the rollouter by then. The callback calls this."""
    reply = self._verl_profiling.start_capture(request)
    count(_IN_FLIGHT, len(self.active_tasks))
    count(_STALENESS, self.staleness_samples)
    note_pause(self, bool(self.paused))
    return reply


def rollout_processes_of(self: Any) -> tuple[list[Any], list[Any]]:
    """Return the handles of the processes that run trajectories, and of those that score them."""
    return rollout_processes(self, self.async_rollout_manager)


async def _as_sample(process: Callable[..., Any], self: Any, rollout_sample: Any) -> Any:
    # Its trajectories have this group.
    with span("sample", group=f"uid_{getattr(rollout_sample, 'sample_id', '')}"):
        return await process(self, rollout_sample)


async def _counted(get_statistics: Callable[..., Any], self: Any) -> Any:
    """Record the counts that the rollouter has of its queue and its samples."""
    statistics = await get_statistics(self)
    for name, counter in _COUNTS.items():
        if isinstance(value := statistics.get(name), int):
            count(counter, value)
    return statistics


async def _pausing(should_pause: Callable[..., Any], self: Any) -> bool:
    pauses: bool = await should_pause(self)
    note_pause(self, pauses)
    return pauses


async def _resuming(reset_staleness: Callable[..., Any], self: Any) -> Any:
    with span("reset_staleness"):
        result = await reset_staleness(self)
    note_pause(self, False)
    return result


def note_pause(rollouter: Any, pauses: bool) -> None:
    """Begin or end the span in which the rollouter hands out no new samples."""
    pause: Span | None = getattr(rollouter, _PAUSE, None)
    if pauses and not getattr(pause, "begin_ns", 0):  # none, or one from when nothing recorded
        why = {"staleness_samples": rollouter.staleness_samples, "most": rollouter.max_required_samples}
        pause = span("pause", **why)
        pause.__enter__()
        setattr(rollouter, _PAUSE, pause)
    elif not pauses and pause is not None:
        setattr(rollouter, _PAUSE, None)
        pause.__exit__(None, None, None)


_HOOKS: dict[str, Callable[..., Any]] = {
    _SAMPLE: _as_sample,
    "get_statistics": _counted,
    "_should_pause_generation": _pausing,
    "reset_staleness": _resuming,
}
