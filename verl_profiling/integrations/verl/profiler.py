"""The base class of a trainer's profiler, for synchronous and asynchronous steps."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.errors import TraceFormatError
from verl_profiling.integrations.hooks import misfits
from verl_profiling.integrations.verl.notices import give_up, notes_on
from verl_profiling.integrations.verl.processes import Processes
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.step_summary import StepSummary
from verl_profiling.watch.values import PREFIX, values_of

logger = logging.getLogger(__name__)

_STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate"}
_WEIGHT_UPDATE = "update_weights"
_OWN_PROFILER = ("start_profile", "stop_profile")
_ONWARD_ONLY = ("wandb", "vemlp_wandb")
"""Trackers that reject a step lower than the last one logged."""
_CONSOLE = "console"
_MOST_WAITING = 1000

_active: Profiler | None = None


def active_profiler() -> Profiler | None:
    """Return the profiler of the trainer whose ``fit`` runs in this process."""
    return _active


class Profiler:
    """Profiles one trainer while its ``fit`` runs.

    Args:
        trainer: The trainer.
        settings: What to profile.
        callback: The callback, asynchronous if the trainer's steps are coroutines.

    Raises:
        ConfigError: The settings do not fit the trainer's configuration.

    Attributes:
        trainer: The trainer.
        settings: What to profile.
        summaries: Step summaries of the watch that are logged with verl's next steps.
    """

    stages: Mapping[str, str] = _STAGES
    """Stage names of the controller by timer of verl, if the two names differ."""

    def __init__(
        self, trainer: Any, settings: ProfilingConfig, callback: ProfilingCallback | AsyncProfilingCallback
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self._callback = callback
        self._processes = Processes(callback, settings)
        self._policy_version = 0
        self._folders: dict[int, Path] = {}
        self._tracking: Any = None
        self._logged_step = 0
        self.summaries: deque[StepSummary] = deque(maxlen=_MOST_WAITING)
        self._failed_trackers: set[str] = set()

    @contextmanager
    def timed(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        """Run one of verl's timers, with the callback's hooks around it."""
        stage = self.begins(name)
        with timer, stage:
            yield
        self.ends(name)

    def begins(self, name: str) -> AbstractContextManager[None]:
        """Return the stage of a timer that begins; nothing is recorded of verl's own profiler."""
        return nullcontext() if name in _OWN_PROFILER else self.stage(self.stages.get(name, name))

    def ends(self, name: str) -> None:
        """Follow the policy version when a timer has ended."""
        if name == _WEIGHT_UPDATE:
            self._policy_version = getattr(self.trainer, "global_steps", self._policy_version)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a stage of the controller."""
        return self._callback.stage(name)

    def begin(self, agent_loops: Any) -> None:
        """Add the workers, and log which parts are not recorded.

        Args:
            agent_loops: The trainer's agent loop manager.

        Raises:
            ToolUnavailableError: A part is not recorded, and the settings are strict.
        """
        self._processes.add(self.trainer, agent_loops)
        if (watch := self._callback.watch) is not None:
            watch.listeners.append(self.summaries.append)
        found = [*misfits(self.trainer.config), *self._processes.misfits]
        for note in notes_on(found, strict=self.settings.strict):
            self._callback.add_note(note)

    def logged(self, tracking: Any, data: Mapping[str, Any], step: int) -> None:
        """Keep the metrics that verl logs after a step, and log one of the watch's summaries with them."""
        self._tracking, self._logged_step = tracking, step
        self._callback.add_metrics(step, data)
        self._log_summary(step)

    def _log_summary(self, step: int) -> None:
        """Log a summary to verl's trackers but the console, under the summary's step if accepted."""
        if not self.summaries:
            return
        summary = self.summaries.popleft()
        values = {f"{PREFIX}step": summary.step, **values_of(summary)}
        for name, tracker in self._tracking.logger.items():
            if name == _CONSOLE or name in self._failed_trackers:
                continue
            try:
                tracker.log(data=values, step=step if name in _ONWARD_ONLY else summary.step)
            except Exception as error:
                self._failed_trackers.add(name)
                logger.warning("watch: %s gets nothing more: %s: %s", name, type(error).__name__, error)

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
        """Remember the step folder, if a new one has been written."""
        folder = self._callback.last_folder
        if folder is not None and folder not in self._folders.values():
            self._folders[step] = folder

    def log_rest(self) -> None:
        """Log the remaining summaries and the numbers of the reports, when training has ended."""
        while self._tracking is not None and self.summaries:
            self._log_summary(self._logged_step)
        if self._tracking is not None and self._folders:
            log_reports(self._tracking, self._folders, self._logged_step)


def log_reports(tracking: Any, folders: Mapping[int, Path], last_step: int) -> None:
    """Report on the profiled steps, and log the numbers as ``profiling/...`` under their own steps.

    This reads traces, which takes a while, so it is called at the end of training. Trackers that reject
    earlier steps get the numbers of the last profiled step only, under ``last_step``.

    Args:
        tracking: The run's ``Tracking``.
        folders: Step folders by step; the folder of a continuous capture holds several steps.
        last_step: Number of the last step that was logged.
    """
    from verl_profiling.report.build import build_report
    from verl_profiling.report.files import scalars
    from verl_profiling.timeline.inputs import find_steps
    from verl_profiling.timeline.step import one_by_one

    onward = [name for name in tracking.logger if name in _ONWARD_ONLY]
    anywhere = [name for name in tracking.logger if name not in _ONWARD_ONLY]
    data: dict[str, float] = {}
    for last, folder in sorted(folders.items()):
        try:
            (capture,) = find_steps(folder)
            for inputs in one_by_one(capture):
                data = {f"profiling/{name}": value for name, value in scalars(build_report(inputs))}
                tracking.log(data, inputs.step, backend=anywhere)
        except (TraceFormatError, OSError) as error:
            logger.warning("step %d cannot be reported on: %s", last, error)
    if data and onward:
        tracking.log(data, last_step, backend=onward)


def trainer_stage(name: str) -> AbstractContextManager[None]:
    """Return a stage of this process's profiled trainer; without one, a context manager that does nothing.

    In a running event loop it does nothing either: the calls that the trainer awaits are marked as a whole.
    """
    if _active is None or asyncio._get_running_loop() is not None:
        return nullcontext()
    return _active.stage(name)
