"""The base class of the profilers of verl's trainers, with synchronous and asynchronous steps."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.integrations.hooks import misfits, usable, wrap
from verl_profiling.integrations.verl import parts_of
from verl_profiling.integrations.verl.stage_names import TRAINER_STAGES
from verl_profiling.integrations.verl.versions import untested
from verl_profiling.integrations.verl.workers import ROLLOUTER, rollout_processes
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.log_writer import PREFIX, values_of

logger = logging.getLogger(__name__)

_OWN_PROFILER = ("start_profile", "stop_profile")
_ONWARD_ONLY = ("wandb", "vemlp_wandb")
"""Trackers that reject values of earlier steps."""
_CONSOLE = "console"
_MOST_WAITING = 1000  # summaries; trackers get one summary with each step that verl logs
OFF = "profiling is switched off, training goes on: %s"
# Each role, and the attribute of a trainer that holds the role's worker group.
_GROUPS = (("actor", "actor_rollout_wg"), ("ref", "ref_policy_wg"), ("critic", "critic_wg"))
_NO_METHODS = (
    "its workers have no capture methods; let their class inherit verl's class, or a mixin of "
    "verl_profiling.workers"
)

_active: Profiler | None = None
_failing: set[str] = set()
"""Names of trackers with a logged warning."""


def active_profiler() -> Profiler | None:
    """Return the profiler of the trainer whose ``fit`` runs in this process."""
    return _active


class Profiler:
    """Profiles one trainer while its ``fit`` runs.

    Args:
        trainer: The trainer.
        settings: The profiling settings.
        callback: The callback, asynchronous if the trainer's steps are coroutines.

    Raises:
        ConfigError: The settings do not fit the trainer's configuration.

    Attributes:
        trainer: The trainer.
        settings: The profiling settings.
        summaries: Step summaries of the watch that are logged with verl's next steps.
        misfits: Sentences on data of the run that is not recorded, with the reasons.
        sent_version: Number of the weights that the engines got last; ``None`` while unknown.
    """

    stages: Mapping[str, str] = TRAINER_STAGES
    """Stage names of the controller by timer of verl, if the two names differ, e.g. ``advantage``
    by ``adv``.
    """

    def __init__(
        self,
        trainer: Any,
        settings: ProfilingConfig,
        callback: ProfilingCallback | AsyncProfilingCallback,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self._callback = callback
        self.misfits: list[str] = []
        self.sent_version: int | None = None
        self._taken: dict[str, int] = {}
        if hasattr(trainer, "_update_actor"):
            wrap(trainer, "_update_actor", self._taking)
        self._tracking: Any = None
        self._logged_step = 0
        self.summaries: deque[StepSummary] = deque(maxlen=_MOST_WAITING)

    @contextmanager
    def timed(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        """Run one of verl's timers, with the callback's hooks around it."""
        stage = self.begins(name)
        with timer, stage:
            yield
        self.ends(name)

    def begins(self, name: str) -> AbstractContextManager[None]:
        """Return the stage of a timer that begins; timers of verl's own profiler have none."""
        return nullcontext() if name in _OWN_PROFILER else self.stage(self.stages.get(name, name))

    def ends(self, name: str) -> None:
        """End what began with a timer; nothing by default."""

    def version_in(self, step: int) -> int:
        """Return the policy version of the engines in a step.

        verl numbers new weights by the step that ends with them. Steps without an update, e.g. in
        the warm-up of a critic, leave the version as it is.
        """
        return step - 1 if self.sent_version is None else self.sent_version

    def _taking(self, update: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # a batch of a type without these fields
            self._taken["samples"] = self._taken.get("samples", 0) + len(batch)
            tokens = sum(batch.meta_info["global_token_num"])
            self._taken["tokens"] = self._taken.get("tokens", 0) + tokens
        return update(batch, *args, **kwargs)

    def taken(self) -> dict[str, int]:
        """Return the numbers of samples that the training took in this step, and of their tokens
        where verl counts them; and the policy version that the engines have got, if any.
        """
        taken, self._taken = self._taken, {}
        if self.sent_version is not None:
            taken["policy_version/end"] = self.sent_version
        return taken

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a stage of the controller."""
        return self._callback.stage(name)

    def begin(self, agent_loops: Any) -> None:
        """Add the trainer's workers to the callback, and log which data is not recorded.

        Args:
            agent_loops: The trainer's agent loop manager.

        Raises:
            ToolUnavailableError: Some data is not recorded, and the settings are strict.
        """
        self._add_groups()
        rollouter = getattr(self.trainer, "rollouter", None)
        if self.settings.for_role("rollout").enable:
            self._add_servers(rollouter)
        processes = {}
        if rollouter is None:
            processes = rollout_processes(self.trainer, agent_loops)
        elif hasattr(rollouter, "rollout_processes"):
            import ray

            processes = {**ray.get(rollouter.rollout_processes.remote()), ROLLOUTER: [rollouter]}
        for role, handles in processes.items():
            self.add_actors(role, handles)
        if (watch := self._callback.watch) is not None:
            watch.listeners.append(self.summaries.append)
        unrecorded = [*misfits(parts_of(self.trainer.config)), *self.misfits]
        for note in notes_on(unrecorded, strict=self.settings.strict):
            self._callback.add_note(note)

    def _add_groups(self) -> None:
        """Add the worker groups to the callback, the profiled groups first.

        Of groups that share processes, the first sets the processes up.
        """
        groups = []
        for role, name in _GROUPS:
            if hasattr(self.trainer, name):
                groups.append((role, getattr(self.trainer, name)))
        groups.sort(key=lambda item: not self.settings.for_role(item[0]).enable)
        set_up: list[Any] = []
        for role, group in groups:
            if not hasattr(group, "init_capture"):
                self._leave_out(role, _NO_METHODS)
                continue
            if not any(group is other for other in set_up):
                self.misfits += _joined(group.init_capture(self.settings, role))
                set_up.append(group)
            self._callback.add_workers(role, group)

    def _add_servers(self, rollouter: Any) -> None:
        """Add the rollout servers, unless they have no capture methods."""
        import ray

        try:
            if rollouter is None:
                replicas = _replicas(self.trainer)
            else:
                replicas = ray.get(rollouter.get_replicas.remote())
            servers = [replica.servers[0] for replica in replicas]
            if not servers:
                return
            self.misfits += _joined(
                ray.get([server.capture_misfits.remote() for server in servers])
            )
        except Exception as error:  # e.g. a dead server, or a replica without servers
            self._leave_out("rollout", f"its servers do not fit ({type(error).__name__}: {error})")
            return
        self._callback.add_rollout(servers)

    def add_actors(self, role: str, handles: Sequence[Any]) -> None:
        """Set up Ray actors and add them to the callback, if all of them can be captured.

        Args:
            role: Role of the actors.
            handles: Handles of the actors, in order of rank.
        """
        if not handles or not self.settings.for_role(role).enable:
            return
        if not all(hasattr(handle, "init_capture") for handle in handles):
            self._leave_out(role, _NO_METHODS)
            return
        try:
            import ray

            # Training waits for these actors as well, however long they take to come up.
            size = len(handles)
            calls = [
                handle.init_capture.remote(self.settings, rank=rank, world_size=size)
                for rank, handle in enumerate(handles)
            ]
            self.misfits += _joined(ray.get(calls))
        except Exception as error:
            self._leave_out(role, f"{type(error).__name__}: {error}")
            return
        self._callback.add_workers(role, handles)

    def _leave_out(self, role: str, why: str) -> None:
        self.misfits.append(f"not recorded: the role {role}, because {why}")

    def logged(self, tracking: Any, data: Mapping[str, Any], step: int) -> None:
        """Keep the metrics that verl logs after a step, and log one step summary of the watch."""
        self._tracking = tracking
        self._logged_step = step
        self._callback.add_metrics(step, data)
        self._log_summary(step)

    def _log_summary(self, step: int) -> None:
        """Log a step summary to verl's trackers except the console,
        under the summary's step if accepted.
        """
        if self.summaries:
            summary = self.summaries.popleft()
            values = {f"{PREFIX}step": summary.step, **values_of(summary)}
            trackers = {**self._tracking.logger}
            trackers.pop(_CONSOLE, None)
            log_values(trackers, values, summary.step, step)

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Make this the profiler of the trainer whose ``fit`` runs in this process."""
        global _active
        _active = self
        try:
            yield
        finally:
            _active = None

    def _give_up(self, why: str) -> None:
        """Switch this profiler off, and let training go on.

        Raises:
            ToolUnavailableError: The setting ``strict`` is on.
        """
        global _active
        _active = None
        if self.settings.strict:
            raise ToolUnavailableError(
                f"profiling.strict is true, and nothing can be recorded: {why}"
            )
        logger.error(OFF, why)

    def log_rest(self) -> None:
        """After training, log the waiting step summaries and the numbers of the reports to verl's
        trackers.
        """
        if self._tracking is None:
            return
        while self.summaries:
            self._log_summary(self._logged_step)
        folder = self._callback.last_folder
        if folder is not None:
            log_reports(self._tracking.logger, folder.parent, self._logged_step)


def log_reports(trackers: Mapping[str, Any], run_folder: Path, last_step: int) -> None:
    """Make the reports of the profiled steps, and log their numbers as ``profiling/...``.

    Each number is logged under its step. Reading traces takes a while, so training calls this at
    its end.

    Args:
        trackers: Trackers of the run's ``Tracking`` by name.
        run_folder: The folder of the step folders.
        last_step: Number of the last step that was logged.
    """
    from verl_profiling.report.build import build_report
    from verl_profiling.report.exports import scalars
    from verl_profiling.steps.inputs import find_steps, step_folders
    from verl_profiling.steps.read import read_step
    from verl_profiling.steps.step import one_by_one

    for folder in step_folders(run_folder):
        try:
            for inputs in one_by_one(find_steps(folder)[0]):
                report = build_report(inputs, read_step(inputs))
                values = {f"profiling/{name}": value for name, value in scalars(report)}
                log_values(trackers, values, inputs.step, last_step)
        except Exception as error:
            logger.warning("no report can be made of %s: %s", folder, error)


def log_values(
    trackers: Mapping[str, Any], values: Mapping[str, float | int], step: int | None, last_step: int
) -> None:
    """Log values under their step, or under ``last_step`` in trackers that reject earlier steps."""
    for name, tracker in trackers.items():
        try:
            tracker.log(data=values, step=last_step if name in _ONWARD_ONLY else step)
        except Exception as error:
            if name not in _failing:
                _failing.add(name)
                logger.warning(
                    "tracker %s lacks step %s: %s: %s", name, step, type(error).__name__, error
                )


def trainer_stage(name: str) -> AbstractContextManager[None]:
    """Return a stage of the profiled trainer in this process; without a trainer, a null context.

    In a running event loop, a null context is returned, too, because a stage around the whole
    awaited call exists already.
    """
    return nullcontext() if asyncio._get_running_loop() is not None else awaited_stage(name)


def awaited_stage(name: str) -> AbstractContextManager[None]:
    """Return a stage of the profiled trainer in this process, also in an event loop."""
    return nullcontext() if _active is None else _active.stage(name)


def _replicas(trainer: Any) -> list[Any]:
    """Return a trainer's rollout replicas; the first server of a replica acts for all
    of its nodes.
    """
    if hasattr(trainer, "_rollout_server_managers"):
        managers = trainer._rollout_server_managers()
    else:  # V0 trainers, and verl 0.9.0
        named = ("llm_server_manager", "standalone_server_manager")
        managers = [getattr(trainer, name) for name in named if hasattr(trainer, name)]
    return [replica for manager in managers for replica in manager.get_replicas()]


def _joined(replies: Iterable[Sequence[str] | None]) -> list[str]:
    """Return the sentences from the replies of several processes."""
    return [text for reply in replies for text in reply or ()]


def can_be_profiled(config: Any, settings: ProfilingConfig) -> bool:
    """Return whether any data of a run can be recorded; else log the reason.

    Raises:
        ToolUnavailableError: Some data cannot be recorded, and the settings are strict.
    """
    parts = parts_of(config)
    notes = sentences(misfits(parts), strict=settings.strict)
    if not usable(parts):
        logger.error(OFF, "; ".join(notes))
        return False
    return True


def notes_on(unrecorded: Iterable[str], *, strict: bool) -> list[str]:
    """Log each sentence on data that is not recorded once, and return them for the manifests.

    Args:
        unrecorded: The sentences from all processes, with repetitions.
        strict: Whether data that is not recorded ends the run.

    Raises:
        ToolUnavailableError: There is a sentence, and ``strict`` is set.
    """
    notes = sentences(unrecorded, strict=strict)
    let_lines_through()
    if notes:
        logger.warning("profiling: %s", "; ".join(notes))
    return notes


def let_lines_through() -> None:
    """Print log lines of this package from ``INFO`` up, unless its logger has a level of its own.

    verl sets the root logger to ``WARNING``. Importing vLLM's server sets the root logger and its
    handlers to ``ERROR``.
    """
    package = logging.getLogger(__name__.partition(".")[0])
    package.setLevel(package.level or logging.INFO)
    passing = min((handler.level for handler in logging.getLogger().handlers), default=sys.maxsize)
    if passing > package.level and not package.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.levelno < passing)
        package.addHandler(handler)


def sentences(unrecorded: Iterable[str], *, strict: bool) -> list[str]:
    """Return each sentence once, after a warning if the version of verl is untested.

    Args:
        unrecorded: Sentences on data that is not recorded.
        strict: Whether data that is not recorded ends the run.

    Raises:
        ToolUnavailableError: There is a sentence, and ``strict`` is set.
    """
    notes = list(dict.fromkeys(unrecorded))
    said = [note for note in (untested(), *notes) if note is not None]
    if notes and strict:
        problem = "profiling.strict is true, and parts of the run cannot be recorded"
        raise ToolUnavailableError(f"{problem}: {'; '.join(said)}")
    return said
