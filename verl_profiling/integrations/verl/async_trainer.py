"""Profiles verl's trainers whose steps are coroutines: one-step-off, and fully asynchronous.

verl's timers are synchronous, so a step begins and ends around ``fit_step``. In these trainers, the
timer ``gen`` is the wait for a batch. Generation runs in the background of the step, as the stage
``rollout``. The rollouter of a fully asynchronous trainer has a role of its own, with its samples,
queue and pauses.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback
from verl_profiling.integrations.hooks import mark, missing
from verl_profiling.integrations.verl.profiler import Profiler, active_profiler
from verl_profiling.integrations.verl.stage_names import ASYNC_TRAINER_STAGES
from verl_profiling.integrations.verl.workers import ROLLOUTER, add_actor_methods, rollout_processes
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.trajectories import Span, count, span

_STEP, _GENERATION = "step", "generate_async"
_NO_MORE_STEPS = "TrainingStopException"
_SAMPLE, _VALIDATE = "_process_single_sample_streaming", "do_validate"
_IN_FLIGHT, _STALENESS = "samples in flight", "staleness samples"
# Names of counters by the key in the statistics of verl's rollouter.
_COUNTS = {
    "monitor/queue/mq_queue_size": "message queue",
    "monitor/active_tasks_size": _IN_FLIGHT,
    "count/staleness_samples": _STALENESS,
}
_PAUSE = "_verl_profiling_pause"


def awaits_its_steps(trainer: Any) -> bool:
    """Return whether ``fit`` and ``fit_step`` of a trainer are coroutines."""
    methods = (getattr(trainer, name, None) for name in ("fit", "fit_step"))
    return all(inspect.iscoroutinefunction(method) for method in methods)


class AsyncTrainerProfiler(Profiler):
    """Profiles one trainer while its ``fit`` runs, without blocking the event loop.

    A trainer with a ``current_param_version`` counts its steps by parameter version: one step is
    then several calls of ``fit_step``, and generation never ends.

    Args:
        trainer: A ``OneStepOffRayTrainer``, a ``FullyAsyncTrainer``, or a trainer that works like
            them.
        settings: The profiling settings.
    """

    stages = ASYNC_TRAINER_STAGES

    _callback: AsyncProfilingCallback

    def __init__(self, trainer: Any, settings: ProfilingConfig) -> None:
        super().__init__(trainer, settings, AsyncProfilingCallback(settings))
        self._by_version = hasattr(trainer, "current_param_version")
        self._step: int | None = None
        self._is_over = False
        self._generated_by = self._batch_version = 0

    @asynccontextmanager
    async def profiling(self) -> AsyncIterator[None]:
        """Profile the steps of the block; after its normal end,
        log the remaining summaries and numbers.
        """
        async with self._callback:
            with self.activated():
                if self._by_version:
                    self._callback.on_generation_begin()
                yield
                if self._by_version:
                    self._callback.on_generation_end()
        await asyncio.to_thread(self.log_rest)

    def begins(self, name: str) -> AbstractContextManager[None]:
        """Return the stage of a timer; no stage for ``generate_async``,
        which another hook records.
        """
        return nullcontext() if name in (_STEP, _GENERATION) else super().begins(name)

    def ends(self, name: str) -> None:
        """Record the end of the step when its timer ends."""
        if name == _STEP:
            self._is_over = not self._by_version or self._version() == self._step
            if self._is_over:
                self._callback.on_stages_end()

    async def step_begins(self) -> bool:
        """Begin a step; return ``False`` if the next batch has the current parameter version."""
        step = self._version() + 1 if self._by_version else self.trainer.global_steps
        if step == self._step:
            return False
        self._step = step
        self._is_over = False
        self._batch_version = self._generated_by
        await self._callback.on_step_begin(step, self.version_in(step))
        await self._callback.on_rollout_begin(in_background=True)
        return True

    def no_step(self) -> None:
        """Let the watch discard the step that has begun, because training ends without a batch."""
        watch = self._callback.watch
        if watch is not None:
            watch.no_step()

    async def step_ends(self) -> None:
        """End the step in the callback, if verl's timer of the step has ended."""
        if not self._is_over or self._step is None:
            return
        self._is_over = False
        metrics = self.taken()
        if not self._by_version:
            metrics["policy_version/batch"] = self._batch_version
        await self._callback.on_rollout_end()
        await self._callback.on_step_end(metrics)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Record the generation of a batch as the stage ``rollout``, in the background of steps."""
        self._generated_by = self.version_in(self.trainer.global_steps)
        self._callback.on_generation_begin()
        try:
            yield
        finally:
            self._callback.on_generation_end()

    def _version(self) -> int:
        version: int = self.trainer.current_param_version
        return version


def async_profiler(trainer: Any) -> AsyncTrainerProfiler | None:
    """Return the profiler of a trainer whose ``fit`` runs in this process."""
    profiler = active_profiler()
    if isinstance(profiler, AsyncTrainerProfiler) and profiler.trainer is trainer:
        return profiler
    return None


async def _around_step(fit_step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    profiler = async_profiler(self)
    if profiler is None:
        return await fit_step(self, *args, **kwargs)
    has_begun = await profiler.step_begins()
    try:
        result = await fit_step(self, *args, **kwargs)
    except Exception as error:
        if has_begun and type(error).__name__ == _NO_MORE_STEPS:
            profiler.no_step()
        raise
    await profiler.step_ends()
    return result


async def _around_generation(
    generate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    profiler = async_profiler(self)
    if profiler is None:
        return await generate(self, *args, **kwargs)
    with profiler.generation():
        return await generate(self, *args, **kwargs)


async def _behind_step(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    profiler = async_profiler(self)
    if profiler is not None:
        await profiler.step_ends()
    return await validate(self, *args, **kwargs)


def makes_samples(trainer_class: type[Any]) -> bool:
    """Return whether a trainer class of verl is a rollouter,
    which makes samples instead of training.
    """
    return hasattr(trainer_class, _SAMPLE)


def hook_rollouter(rollouter_class: type[Any]) -> None:
    """Give ``FullyAsyncRollouter`` the capture methods,
    before ``ray.remote`` makes an actor of it.
    """
    if _SAMPLE in vars(rollouter_class):
        add_actor_methods(rollouter_class, ROLLOUTER)
        rollouter_class.start_capture = start_capture
        rollouter_class.rollout_processes = rollout_processes_of
    if _VALIDATE in vars(rollouter_class):
        mark(rollouter_class, _VALIDATE, partial(span, "validate"))


def start_capture(self: Any, request: Any) -> Any:
    """Start or join a capture, and record the rollouter's current counts.
    The callback calls this method.
    """
    reply = self._verl_profiling.start_capture(request)
    count(_IN_FLIGHT, len(self.active_tasks))
    count(_STALENESS, self.staleness_samples)
    note_pause(self, bool(self.paused))
    return reply


def rollout_processes_of(self: Any) -> dict[str, list[Any]]:
    """Return the handles of the agent loop workers and of the reward loop workers, by role."""
    return rollout_processes(self, self.async_rollout_manager)


async def _as_sample(process: Callable[..., Any], self: Any, rollout_sample: Any) -> Any:
    # The sample's trajectories have the same group.
    with span("sample", group=f"uid_{getattr(rollout_sample, 'sample_id', '')}"):
        return await process(self, rollout_sample)


async def _counted(get_statistics: Callable[..., Any], self: Any) -> Any:
    """Record the rollouter's counts of its queue and its samples."""
    statistics = await get_statistics(self)
    for name, counter in _COUNTS.items():
        value = statistics.get(name)
        if isinstance(value, int):
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
    """Begin or end the span of a pause, in which the rollouter starts no new samples."""
    pause: Span | None = getattr(rollouter, _PAUSE, None)
    # A pause without a begin began while nothing was recorded.
    if pauses and not getattr(pause, "begin_ns", 0):
        pause = span(
            "pause",
            staleness_samples=rollouter.staleness_samples,
            most=rollouter.max_required_samples,
        )
        pause.__enter__()
        setattr(rollouter, _PAUSE, pause)
    elif not pauses and pause is not None:
        setattr(rollouter, _PAUSE, None)
        pause.__exit__(None, None, None)


_TRAINERS: dict[str, Callable[..., Any]] = {
    "fit_step": _around_step,
    "_async_gen_next_batch": _around_generation,
    "_fit_validate": _behind_step,
}
_ROLLOUTERS: dict[str, Callable[..., Any]] = {
    _SAMPLE: _as_sample,
    "get_statistics": _counted,
    "_should_pause_generation": _pausing,
    "reset_staleness": _resuming,
}
COROUTINES = _TRAINERS | _ROLLOUTERS
"""Wrappers for coroutines of trainers and rollouters by the method's name, applied when a class
is created.
"""


def _check(class_name: str, methods: Iterable[str], module: Any) -> None:
    """Report the methods that a class of verl lacks, or does not define as coroutines."""
    owner = getattr(module, class_name)
    for name in methods:
        if not inspect.iscoroutinefunction(getattr(owner, name, None)):
            missing(owner, name)


check_one_step_off = partial(
    _check, "OneStepOffRayTrainer", ("fit", "fit_step", "_async_gen_next_batch")
)
check_fully_async = partial(_check, "FullyAsyncTrainer", ("fit", "fit_step", "_fit_validate"))
check_rollouter = partial(_check, "FullyAsyncRollouter", _ROLLOUTERS)
