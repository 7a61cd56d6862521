"""Connects the callback to verl's trainers.

verl times every part of a step with ``marked_timer``; a wrapper calls the hooks of the callback.
The timer ``step`` is the step, the timer ``gen`` is the rollout, and all other timers are stages of
the controller. A trainer whose ``fit`` and ``fit_step`` are coroutines has a profiler of its own
(:mod:`~verl_profiling.integrations.verl.async_trainer`).

In V1, agent loops put responses into TransferQueue, and the trainer polls the queue every two
seconds. So a rollout ends some time after its last trajectory. Stages inside the rollout show the
trainer's work.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

from verl_profiling.controller.callback import ProfilingCallback
from verl_profiling.errors import ProfilingError, ToolUnavailableError
from verl_profiling.files.process_marks import marked, note_import
from verl_profiling.integrations.hooks import mark, misfits, missing, wrap
from verl_profiling.integrations.verl.async_trainer import (
    COROUTINES,
    AsyncTrainerProfiler,
    awaits_its_steps,
    hook_rollouter,
    makes_samples,
)
from verl_profiling.integrations.verl.bridge import (
    captured_steps,
    settings_of,
    why_nothing,
    without_group,
)
from verl_profiling.integrations.verl.launch import start_workers_under_nsys
from verl_profiling.integrations.verl.profiler import (
    OFF,
    Profiler,
    active_profiler,
    awaited_stage,
    can_be_profiled,
    let_lines_through,
    sentences,
    trainer_stage,
)
from verl_profiling.integrations.verl.stage_names import (
    START_PARTS,
    TRANSFER_QUEUE_STAGES,
    WEIGHT_SYNC_STAGES,
)
from verl_profiling.integrations.verl.workers import SETTINGS_KEY
from verl_profiling.manifest import POLLING
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.trajectories import span, trajectory_status

logger = logging.getLogger(__name__)

_STEP, _ROLLOUT = "step", "gen"
_ATTRIBUTE = "_verl_profiler"
_LAST_STEP = "total_training_steps"
_LOADS = "_next_train_batch"

_NO_HOOK = (
    "profiling: this run is not profiled, because no method of its trainer is hooked. A trainer "
    "class of your own inherits verl_profiling.integrations.verl.trainer.ProfilingTrainerMixin"
)

_hooked = False
"""Whether this process has a hooked trainer."""

_TRANSFER_QUEUE_OF_AGENT_LOOPS = {
    "async_kv_batch_get": "wait:get_response",
    "async_kv_batch_put": "wait:put_response",
}


class TrainerProfiler(Profiler):
    """Profiles one trainer with synchronous steps while its ``fit`` runs.

    If ``fit`` is a coroutine, the begin and end of a step block its event loop, as calls of verl's
    worker groups do.

    Args:
        trainer: A V1 ``PPOTrainer`` or a ``RayPPOTrainer``.
        settings: The profiling settings.
    """

    _callback: ProfilingCallback

    def __init__(self, trainer: Any, settings: ProfilingConfig) -> None:
        blocks = inspect.iscoroutinefunction(trainer.fit)
        super().__init__(trainer, settings, ProfilingCallback(settings, blocks_event_loop=blocks))
        if hasattr(trainer, "on_sample_end"):
            # Here V1 trainers free the memory of engines, or abort the remaining requests.
            mark(trainer, "on_sample_end", partial(trainer_stage, "on_sample_end"))
        self._generating = False

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Profile the steps of the block; after its normal end,
        log the remaining summaries and numbers.
        """
        with self._callback, self.activated():
            yield
        self.log_rest()

    def begins(self, name: str) -> AbstractContextManager[None]:
        """Begin the step or the rollout by their timers; return the stage of any other timer."""
        if name == _STEP:
            self._step_begin()
        elif name == _ROLLOUT:
            self.rollout_begin()
        else:
            return super().begins(name)
        return nullcontext()

    def ends(self, name: str) -> None:
        """End the step or the rollout when its timer ends."""
        if name == _STEP and self is active_profiler():
            self._callback.on_step_end(self.taken())
        elif name == _ROLLOUT:
            self._generating = False
            self._callback.on_rollout_end()

    def rollout_begin(self) -> None:
        """Begin generation, unless generation has begun already."""
        if not self._generating:
            self._generating = True
            self._callback.on_rollout_begin()

    def _step_begin(self) -> None:
        step = getattr(self.trainer, "global_steps", None)
        if step is None:
            self._give_up(
                f"{type(self.trainer).__name__} has no global_steps, so its steps have no numbers"
            )
            return
        self._generating = False
        self._callback.on_step_begin(step, self.version_in(step))


def hook_timers(module: Any) -> None:
    """Wrap verl's timers to call the trainer's profiler."""
    wrap(module, "marked_timer", _timed)


def _timed(
    marked_timer: Callable[..., Any], name: str, *args: Any, **kwargs: Any
) -> AbstractContextManager[None]:
    timer: AbstractContextManager[None] = marked_timer(name, *args, **kwargs)
    profiler = active_profiler()
    return timer if profiler is None else profiler.timed(name, timer)


def hook_tracking(module: Any) -> None:
    """Store the metrics of a profiled step, as verl logs them, with the capture."""
    wrap(module.Tracking, "__init__", _checked)
    wrap(module.Tracking, "log", _stored)


def _checked(init: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    if not _hooked:
        say_no_trainer_is_hooked(kwargs.get("config", args[3] if len(args) > 3 else None))


def say_no_trainer_is_hooked(config: Any) -> None:
    """Log an error if profiling is switched on, but the trainer is not hooked.

    Raises:
        ToolUnavailableError: The setting ``strict`` is on.
    """
    given = config.get("profiling") if isinstance(config, Mapping) else None
    settings = {"enable": True} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or not settings.get("enable"):
        return
    text = "; ".join([_NO_HOOK, *sentences(misfits(), strict=False)])
    if settings.get("strict"):
        raise ToolUnavailableError(text)
    logger.error("%s", text)


def _stored(
    log: Callable[..., Any],
    self: Any,
    data: Mapping[str, Any],
    step: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    profiler = active_profiler()
    if profiler is not None:
        profiler.logged(self, data, step)
    with awaited_stage("log_metrics"):
        log(self, data, step, *args, **kwargs)


def hook_weight_sync(module: Any) -> None:
    """Mark the parts of a weight update that the trainer runs, and note the version that it
    sends.
    """
    manager = module.CheckpointEngineManager
    for name, part in WEIGHT_SYNC_STAGES.items():
        with _inside_auto_await(module, manager, name):
            mark(manager, name, partial(awaited_stage, part))
    with _inside_auto_await(module, manager, "update_weights"):
        mark(manager, "update_weights", partial(marked, "weight_sync"))
        wrap(manager, "update_weights", _noted_version)


@contextmanager
def _inside_auto_await(module: Any, manager: type[Any], name: str) -> Iterator[None]:
    """Let the block hook a coroutine method inside of verl's ``auto_await``."""
    coroutine = getattr(getattr(manager, name, None), "__wrapped__", None)
    if coroutine is not None:
        setattr(manager, name, coroutine)
    yield
    if coroutine is not None:
        setattr(manager, name, module.auto_await(getattr(manager, name)))


async def _noted_version(
    update_weights: Callable[..., Any],
    self: Any,
    global_steps: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = await update_weights(self, global_steps, *args, **kwargs)
    profiler = active_profiler()
    if profiler is not None and global_steps is not None:
        profiler.sent_version = global_steps
    return result


def hook_v1_trainer(module: Any) -> None:
    """Profile the trainers of ``trainer.use_v1=True``, in all of their modes."""
    _hook_trainer(module.PPOTrainer)


def hook_v1_rollout(module: Any) -> None:
    """Begin the rollout when prompts go to the engines,
    before the timer that waits for responses.
    """
    wrap(module.PPOTrainer, "_add_batch_to_generate", _beginning_rollout)
    mark(module.PPOTrainer, _LOADS, partial(trainer_stage, "load_prompts"))
    for name, part in START_PARTS.items():
        if hasattr(module.PPOTrainer, name):  # else this part of the start is no part of it
            mark(module.PPOTrainer, name, partial(marked, part))


def hook_data_loader(module: Any) -> None:
    """Mark the wait for each batch of a data loader as a stage of the trainer."""
    mark(module._StatefulBaseDataLoaderIter, "__next__", _loading)


def _loading() -> AbstractContextManager[None]:
    """Return the stage ``load_prompts``; none in a V1 trainer, where one stage of this name
    already spans all loads of a step.
    """
    profiler = active_profiler()
    is_v1 = profiler is not None and hasattr(profiler.trainer, _LOADS)
    return nullcontext() if is_v1 else awaited_stage("load_prompts")


def _beginning_rollout(add_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    profiler = active_profiler()
    if isinstance(profiler, TrainerProfiler):
        profiler.rollout_begin()
    return add_batch(*args, **kwargs)


def hook_dispatch(module: Any) -> None:
    """Mark the dispatch of prompts to the agent loops as a stage."""
    mark(
        module.AgentLoopManagerTQ, "generate_sequences", partial(trainer_stage, "dispatch_prompts")
    )


def hook_transfer_queue(module: Any) -> None:
    """Mark calls of TransferQueue, as stages of the trainer and as spans of agent loops."""
    for name, part in TRANSFER_QUEUE_STAGES.items():
        mark(module, name, partial(trainer_stage, part))
    for name, waits in _TRANSFER_QUEUE_OF_AGENT_LOOPS.items():
        mark(module, name, partial(span, waits))


def hook_replay_buffer(module: Any) -> None:
    """Mark the trainer's sleep between two polls of the replay buffer as a stage."""
    mark(module.ReplayBuffer, "_wait_for_next_poll", partial(trainer_stage, POLLING))
    if hasattr(module.ReplayBuffer, "_evict_terminal_groups"):  # not before verl 0.9.1
        wrap(module.ReplayBuffer, "_evict_terminal_groups", _evicted)


def _evicted(
    evict: Callable[..., Any],
    self: Any,
    global_steps: int,
    partition_id: str,
    eviction_reasons: Sequence[Any],
) -> Any:
    """Set the status of the groups that the replay buffer drops."""
    stale, filtered, *_ = eviction_reasons
    for status, groups in (("stale", stale), ("filtered", filtered)):
        for group in groups:
            trajectory_status(group, status)
    return evict(self, global_steps, partition_id, eviction_reasons)


def hook_v0_trainer(module: Any) -> None:
    """Profile ``RayPPOTrainer`` and its subclasses:
    one-step-off and fully asynchronous trainers.
    """
    _hook_trainer(module.RayPPOTrainer)


def _hook_trainer(trainer_class: type[Any]) -> None:
    """Hook a trainer class, and overridden methods of its subclasses."""
    for name in _CALLED.keys() - vars(trainer_class).keys():
        missing(trainer_class, name)
    hook_overrides(trainer_class)

    def hook_subclass(cls: type[Any], /, **kwargs: Any) -> None:
        super(trainer_class, cls).__init_subclass__(**kwargs)
        hook_overrides(cls)

    trainer_class.__init_subclass__ = classmethod(hook_subclass)  # type: ignore[assignment]


def hook_overrides(cls: type[Any]) -> None:
    """Hook the methods that a class itself defines,
    before ``ray.remote`` makes an actor class of it.
    """
    if cls.__module__.partition(".")[0] == "ray":
        return  # a subclass made by ``ray.remote``; the methods of its base are hooked
    for name, method in list(vars(cls).items()):
        wrappers = _AWAITED if inspect.iscoroutinefunction(method) else _CALLED
        if name in wrappers:
            wrap(cls, name, wrappers[name])
    if makes_samples(cls):
        hook_rollouter(cls)


class ProfilingTrainerMixin:
    """A mixin for your trainers that override ``fit``, as a coroutine or not; verl's trainers need
    none.

    ``class MyTrainer(ProfilingTrainerMixin, RayPPOTrainer): def fit(self): ...``
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hook_overrides(cls)


def _made(init: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    global _hooked
    _hooked = True
    note_import()
    init(self, *args, **kwargs)
    with _training_goes_on():
        prepare(self)


@contextmanager
def _training_goes_on() -> Iterator[None]:
    """Log an unexpected error, e.g. of a verl with other classes; wrong settings are raised."""
    try:
        yield
    except ProfilingError:
        raise
    except Exception as error:
        logger.error(OFF, f"{type(error).__name__}: {error}")


def prepare(trainer: Any) -> None:
    """Give a trainer a profiler and its rollout servers the settings, if its configuration enables
    profiling.

    Raises:
        ConfigError: The settings do not fit the trainer's configuration.
        ToolUnavailableError: A part cannot be recorded, and the settings are strict.
    """
    if hasattr(trainer, _ATTRIBUTE):
        return  # prepared already: a base class has a hooked ``__init__``, too
    setattr(trainer, _ATTRIBUTE, None)
    problem = without_group(trainer.config)
    if problem:
        logger.error(OFF, f"profiling {problem}")
        return
    settings = settings_of(trainer.config)
    if settings is None:
        why = why_nothing(trainer.config)
        if why:
            let_lines_through()
            logger.warning("profiling: nothing is profiled: %s", why)
        return
    if not can_be_profiled(trainer.config, settings):
        return
    if not makes_samples(type(trainer)):
        made = AsyncTrainerProfiler if awaits_its_steps(trainer) else TrainerProfiler
        setattr(trainer, _ATTRIBUTE, made(trainer, settings))
    from omegaconf import open_dict

    rollout = trainer.config.actor_rollout_ref.rollout
    with open_dict(rollout):  # verl passes engine_kwargs to every rollout server of the policy
        rollout.engine_kwargs = {**(rollout.engine_kwargs or {}), SETTINGS_KEY: settings.to_dict()}
    start_workers_under_nsys(settings)


def _profiled(fit: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with profiling_of(self, args, kwargs):
        return fit(self, *args, **kwargs)


async def _profiled_coroutine(fit: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    profiling = profiling_of(self, args, kwargs)
    if isinstance(profiling, AbstractAsyncContextManager):
        async with profiling:
            return await fit(self, *args, **kwargs)
    with profiling:
        return await fit(self, *args, **kwargs)


def profiling_of(trainer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Add all workers to a trainer's profiler; return a context manager that profiles ``fit``.

    Args:
        trainer: The trainer. Without a profiler, or with an active profiler, the context manager
            does nothing.
        args: Positional arguments of the call of ``fit``.
        kwargs: Keyword arguments of the call of ``fit``.
    """
    profiler = getattr(trainer, _ATTRIBUTE, None)
    if profiler is None or profiler is active_profiler():
        return nullcontext()
    with _training_goes_on():
        # V1 passes the agent loop manager to fit; a V0 trainer has it as an attribute.
        agent_loops = kwargs.get("agent_loop_manager", args[0] if args else None)
        if agent_loops is None:
            agent_loops = getattr(trainer, "async_rollout_manager", None)
        profiler.begin(agent_loops)
        settings = profiler.settings
        # If steps are parameter versions, total_training_steps is not the number of the last step.
        last_step = getattr(trainer, _LAST_STEP, None)
        if hasattr(trainer, "current_param_version"):
            last_step = None
        steps = captured_steps(settings.schedule, last_step)
        logger.info(
            "profiling is on in %s: %s captures of %s", settings.save_path, settings.mode, steps
        )
        return profiler.profiling()
    return nullcontext()


# Wrappers by the name of the method: of plain methods, and of coroutines.
_CALLED = {"__init__": _made, "fit": _profiled}
_AWAITED = {"fit": _profiled_coroutine, **COROUTINES}
