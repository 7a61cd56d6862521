"""Connects the callback to verl's trainers.

verl times every part of a step with ``marked_timer``, and from there the hooks of the callback are
called. The timer ``step`` is the step, ``gen`` is the rollout, and all others are stages of the
controller.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_profiling.controller.callback import ProfilingCallback
from verl_profiling.integrations.hooks import misfits
from verl_profiling.integrations.verl_actors import add_actors
from verl_profiling.integrations.verl_config import settings_of
from verl_profiling.integrations.verl_nsys import start_workers_under_nsys
from verl_profiling.integrations.verl_servers import SETTINGS_KEY
from verl_profiling.integrations.verl_support import (
    can_be_profiled,
    check_request,
    notes_on,
    remember_request,
)
from verl_profiling.integrations.wrapping import around, wrap
from verl_profiling.settings.config import ProfilingConfig

__all__ = [
    "ProfilingTrainerMixin",
    "hook_timers",
    "hook_tracking",
    "hook_v0_trainer",
    "hook_v1_rollout",
    "hook_v1_trainer",
    "say_fates",
    "trainer_stage",
]

logger = logging.getLogger(__name__)

_STEP, _ROLLOUT = "step", "gen"
_STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate"}
_GROUPS = (("actor", "actor_rollout_wg"), ("ref", "ref_policy_wg"), ("critic", "critic_wg"))
_ATTRIBUTE = "_verl_profiling"
_AGENT_LOOPS, _REWARDS = "agent_loop", "reward"

Fates = Sequence[tuple[str, int | None, str]]

_active: TrainerProfiler | None = None


class TrainerProfiler:
    """Profiles one trainer while its ``fit`` runs.

    Args:
        trainer: A V1 ``PPOTrainer`` or a ``RayPPOTrainer``.
        settings: What to profile.

    Raises:
        ConfigError: The settings do not fit the trainer's configuration.

    Attributes:
        agent_loops: What the trainer has its trajectories made by.
    """

    def __init__(self, trainer: Any, settings: ProfilingConfig) -> None:
        self._trainer = trainer
        if hasattr(trainer, "on_sample_end"):
            # In every V1 trainer's own way engines free their memory here, or give up the rest.
            wrap(trainer, "on_sample_end", around(functools.partial(trainer_stage, "on_sample_end")))
        self._settings = settings
        self._callback = ProfilingCallback(settings)
        self.agent_loops: Any = None
        self._agent_loop_workers: list[Any] = []
        self._generating = False
        self._policy_version = 0
        self._folders: dict[int, Path] = {}
        self._tracking: Any = None
        self._misfits = misfits(trainer.config)

    def __enter__(self) -> None:
        global _active
        self._add_workers()
        for note in notes_on(self._misfits, strict=self._settings.strict):
            self._callback.add_note(note)
        self._callback.__enter__()
        _active = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        self._callback.__exit__(kind, error, trace)
        if error is None and self._tracking is not None and self._folders:
            # Reading traces takes a while, and training must not wait for it.
            from verl_profiling.integrations.verl_tracking import log_reports

            log_reports(self._tracking, self._folders, self._trainer.global_steps)

    @contextmanager
    def timed(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        """Run one of verl's timers, and call the callback's hooks around it."""
        if name == _STEP:
            self._step_begin()
            with timer:
                yield
            self._callback.on_step_end({"policy_version/end": self._policy_version})
            folder = self._callback.last_folder
            if folder is not None and folder not in self._folders.values():
                self._folders[self._trainer.global_steps] = folder
        elif name == _ROLLOUT:
            self.rollout_begin()
            with timer:
                yield
            self._generating = False
            self._callback.on_rollout_end()
        else:
            with timer, self._callback.stage(_STAGES.get(name, name)):
                yield
            if name == "update_weights":
                self._policy_version = self._trainer.global_steps

    def rollout_begin(self) -> None:
        """Begin generation, unless it has begun already."""
        if not self._generating:
            self._generating = True
            self._callback.on_rollout_begin()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a stage of the controller."""
        return self._callback.stage(name)

    def say_fates(self, fates: Callable[[], Fates]) -> None:
        """Have what became of trajectories recorded beside them, if a step is captured."""
        if not (self._agent_loop_workers and self._callback.capturing):
            return
        try:
            if said := fates():
                self._agent_loop_workers[0].trajectory_fates.remote(said)
        except Exception as error:
            logger.warning("what became of trajectories is not recorded: %s: %s", type(error).__name__, error)

    def logged(self, tracking: Any, data: Mapping[str, Any], step: int) -> None:
        """Keep the metrics that verl logs after a step, and the tracker that they go to."""
        self._tracking = tracking
        self._callback.add_metrics(step, data)

    def _step_begin(self) -> None:
        # Every trainer of verl 0.9 sends the weights of a step to the engines at its end.
        step = self._trainer.global_steps
        self._policy_version = step - 1
        self._generating = False
        self._callback.on_step_begin(step, self._policy_version)

    def _add_workers(self) -> None:
        """Add worker groups and servers; of groups that share processes, first one that is profiled."""
        groups = [
            (role, getattr(self._trainer, name)) for role, name in _GROUPS if hasattr(self._trainer, name)
        ]
        groups.sort(key=lambda item: not self._settings.for_role(item[0]).enable)
        told: list[Any] = []
        for role, group in groups:
            if not hasattr(group, "init_capture"):
                self._misfits.append(
                    f"the role {role}: not recorded, because its workers have no capture methods"
                )
                continue
            if not any(group is other for other in told):
                self._misfits += _each(group.init_capture(self._settings, role))
                told.append(group)
            self._callback.add_workers(role, group)
        if self._settings.for_role("rollout").enable:
            self._add_servers()
        self._add_rollout_processes()

    def _add_servers(self) -> None:
        """Add the rollout servers, if they have been started so that they can be captured."""
        import ray

        try:
            servers = self._servers()
            self._misfits += _each(ray.get([server.capture_misfits.remote() for server in servers]))
        except AttributeError as error:
            self._misfits.append(f"the role rollout: not recorded, because its servers do not fit ({error})")
            return
        if servers:
            self._callback.add_rollout(servers)

    def _add_rollout_processes(self) -> None:
        """Add the processes that run trajectories, and those that score them."""
        rewards = getattr(self._trainer, "reward_loop_manager", None)
        loops = list(getattr(self.agent_loops, "agent_loop_workers", None) or ())
        if add_actors(self._callback, self._settings, _AGENT_LOOPS, loops, self._misfits):
            self._agent_loop_workers = loops
        scorers = list(getattr(rewards, "reward_loop_workers", None) or ())
        add_actors(self._callback, self._settings, _REWARDS, scorers, self._misfits)

    def _servers(self) -> list[Any]:
        """Return the server on the first node of every replica, which acts for the other nodes."""
        trainer = self._trainer
        if hasattr(trainer, "_rollout_server_managers"):
            managers = trainer._rollout_server_managers()
        else:  # the V0 trainer, and verl 0.9.0
            named = ("llm_server_manager", "standalone_server_manager")
            managers = [getattr(trainer, name) for name in named if hasattr(trainer, name)]
        return [replica.servers[0] for manager in managers for replica in manager.get_replicas()]


class ProfilingTrainerMixin:
    """A mixin for trainers that override ``fit``; the ``fit`` of verl's own trainers is hooked already.

    ``class MyTrainer(ProfilingTrainerMixin, RayPPOTrainer): def fit(self): ...``
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "fit" in vars(cls):
            cls.fit = _profiled_fit(vars(cls)["fit"])  # type: ignore[attr-defined]


def trainer_stage(name: str) -> AbstractContextManager[None]:
    """Return a stage of this process's trainer, if it has a profiled one; else one that does nothing.

    Inside of a coroutine it does nothing either: what the trainer awaits there is marked as a whole.
    """
    if _active is None or asyncio._get_running_loop() is not None:
        return nullcontext()
    return _active.stage(name)


def say_fates(fates: Callable[[], Fates]) -> None:
    """Say what this process's trainer did with trajectories that had ended.

    Args:
        fates: Returns groups, samples (``None``: all of the group) and fates; called if a step is captured.
    """
    if _active is not None:
        _active.say_fates(fates)


def hook_timers(module: Any) -> None:
    """Make verl's timers call the trainer's profiler."""
    wrap(module, "marked_timer", _timed)


def _timed(marked_timer: Callable[..., Any]) -> Callable[..., Any]:
    def timer(name: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        timer: AbstractContextManager[None] = marked_timer(name, *args, **kwargs)
        return timer if _active is None else _active.timed(name, timer)

    return timer


def hook_tracking(module: Any) -> None:
    """Store the metrics that verl logs for a profiled step with its capture."""
    wrap(module.Tracking, "__init__", remember_request)
    wrap(module.Tracking, "log", _stored)


def _stored(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        if _active is not None:
            _active.logged(self, data, step)
        else:
            check_request(self)
        original(self, data, step, *args, **kwargs)

    return log


def hook_v1_trainer(module: Any) -> None:
    """Profile the trainers of ``trainer.use_v1=True``, in all of their modes."""
    _hook_trainer(module.PPOTrainer)


def hook_v1_rollout(module: Any) -> None:
    """Begin the rollout when the prompts go to the engines: before the timer that waits for responses."""
    wrap(module.PPOTrainer, "_add_batch_to_generate", _beginning_rollout)
    wrap(module.PPOTrainer, "_next_train_batch", around(functools.partial(trainer_stage, "load_prompts")))


def _beginning_rollout(add_batch_to_generate: Callable[..., Any]) -> Callable[..., Any]:
    def add_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active is not None:
            _active.rollout_begin()
        return add_batch_to_generate(self, *args, **kwargs)

    return add_batch


def hook_v0_trainer(module: Any) -> None:
    """Profile ``RayPPOTrainer``."""
    _hook_trainer(module.RayPPOTrainer)


def _hook_trainer(trainer_class: type[Any]) -> None:
    wrap(trainer_class, "fit", _profiled_fit)
    wrap(trainer_class, "__init__", _made)


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings = settings_of(self.config)
        if settings is not None and can_be_profiled(self.config, settings):
            setattr(self, _ATTRIBUTE, TrainerProfiler(self, settings))
            _hand_to_servers(self.config, settings)
            start_workers_under_nsys(settings)

    return init


def _each(replies: Sequence[Sequence[str] | None]) -> list[str]:
    """Return what several processes said that does not fit."""
    return [text for reply in replies for text in reply or ()]


def _profiled_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def profiled_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        profiler: TrainerProfiler | None = getattr(self, _ATTRIBUTE, None)
        if profiler is None or profiler is _active:
            return fit(self, *args, **kwargs)
        # V1 trainers are handed what makes their trajectories; the V0 trainer has made it itself.
        handed = kwargs.get("agent_loop_manager", args[0] if args else None)
        profiler.agent_loops = handed if handed is not None else getattr(self, "async_rollout_manager", None)
        with profiler:
            return fit(self, *args, **kwargs)

    return profiled_fit


def _hand_to_servers(config: Any, settings: ProfilingConfig) -> None:
    """Put the settings into the configuration that every rollout server of the policy gets."""
    from omegaconf import open_dict

    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        rollout.engine_kwargs = {**(rollout.engine_kwargs or {}), SETTINGS_KEY: settings.to_dict()}
