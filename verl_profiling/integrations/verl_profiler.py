"""What the profilers of verl's trainers have in common, whether their ``fit`` is a coroutine or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.integrations.hooks import misfits
from verl_profiling.integrations.verl_support import give_up, notes_on
from verl_profiling.integrations.verl_targets import Targets
from verl_profiling.integrations.verl_watch import WatchTracking
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["TIMED_STAGES", "Fates", "Profiler", "active_profiler", "say_fates", "trainer_stage"]

logger = logging.getLogger(__name__)

_STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate"}
_WEIGHT_UPDATE = "update_weights"
_OWN_PROFILER = ("start_profile", "stop_profile")

TIMED_STAGES = frozenset((*_STAGES.values(), _WEIGHT_UPDATE, "rollout", "reward", "old_log_prob")) | {
    *("values", "update_critic", "update_actor", "save_checkpoint", "dump_rollout_generations"),
    *("wait:rollout", "switch_to_trainer", "switch_to_rollout", "switch_wait", "sync_rollout_weights"),
}
"""Stages of the controller that verl's timers are."""

Fates = Sequence[tuple[str, int | None, str]]

_active: Profiler | None = None


def active_profiler() -> Profiler | None:
    """Return the profiler of the trainer whose ``fit`` runs in this process."""
    return _active


class Profiler:
    """Profiles one trainer while its ``fit`` runs.

    Args:
        trainer: The trainer.
        settings: What to profile.
        callback: The callback that goes with its ``fit``.

    Raises:
        ConfigError: The settings do not fit the trainer's configuration.

    Attributes:
        trainer: The trainer.
        settings: What to profile.
    """

    stages: Mapping[str, str] = _STAGES
    """Stages of the controller by verl's timers, where the two have different names."""

    def __init__(
        self, trainer: Any, settings: ProfilingConfig, callback: ProfilingCallback | AsyncProfilingCallback
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self._told = callback
        self._targets = Targets(callback, settings)
        self._policy_version = 0
        self._folders: dict[int, Path] = {}
        self._tracking: Any = None
        self._logged_step = 0
        self._watched: WatchTracking | None = None

    @contextmanager
    def timed(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        """Run one of verl's timers, as a stage of the controller unless it times verl's own profiler."""
        if name in _OWN_PROFILER:
            with timer:
                yield
            return
        with timer, self.stage(self.stages.get(name, name)):
            yield
        if name == _WEIGHT_UPDATE:
            self._policy_version = getattr(self.trainer, "global_steps", self._policy_version)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a stage of the controller."""
        return self._told.stage(name)

    def say_fates(self, fates: Callable[[], Fates]) -> None:
        """Have what became of trajectories recorded beside them, if a step is captured."""
        if not (self._targets.agent_loops and self._told.capturing):
            return
        try:
            if said := fates():
                self._targets.agent_loops[0].trajectory_fates.remote(said)
        except Exception as error:
            logger.warning("what became of trajectories is not recorded: %s: %s", type(error).__name__, error)

    def logged(self, tracking: Any, data: Mapping[str, Any], step: int) -> None:
        """Keep the metrics that verl logs after a step, and the tracker that they go to."""
        self._tracking, self._logged_step = tracking, step
        self._told.add_metrics(step, data)
        if self._watched is not None:
            self._watched.log(tracking, step)

    def begin(self, agent_loops: Any) -> None:
        """Add the workers, and say what is not recorded.

        Args:
            agent_loops: What the trainer has its trajectories made by.

        Raises:
            ToolUnavailableError: Something is not recorded, and the settings are strict.
        """
        self._targets.add(self.trainer, agent_loops)
        watch = self._told.watch
        if watch is not None:
            self._watched = WatchTracking()
            watch.listeners.append(self._watched.completed)
        found = [*misfits(self.trainer.config), *self._targets.misfits]
        for note in notes_on(found, strict=self.settings.strict):
            self._told.add_note(note)

    def _activate(self) -> None:
        global _active
        _active = self

    def _deactivate(self) -> None:
        global _active
        _active = None

    def _give_up(self, why: str) -> None:
        """Let training go on without this profiler.

        Raises:
            ToolUnavailableError: The settings are strict.
        """
        self._deactivate()
        give_up(why, strict=self.settings.strict)

    def _note_folder(self, step: int) -> None:
        """Keep the step folder that has been written, if one has."""
        folder = self._told.last_folder
        if folder is not None and folder not in self._folders.values():
            self._folders[step] = folder

    def _log_reports(self) -> None:
        """Log the numbers of the reports. Reading traces takes a while, and training must not wait for it."""
        if self._tracking is not None and self._watched is not None:
            self._watched.log_rest(self._tracking, self._logged_step)
        if self._tracking is not None and self._folders:
            from verl_profiling.integrations.verl_tracking import log_reports

            log_reports(self._tracking, self._folders, self._logged_step)


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
