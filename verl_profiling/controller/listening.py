"""From the begin of training to its end: the ways in which people may ask a running job for captures."""

from __future__ import annotations

import logging

from verl_profiling.aim import Aim
from verl_profiling.controller.asked_by_signal import SignalAsking
from verl_profiling.controller.control_folder import ControlFolder
from verl_profiling.controller.decision import Decisions
from verl_profiling.controller.demands import Demands
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import has_peers, leads
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.demand import LoopState
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ProcessId
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Listening"]

logger = logging.getLogger(__name__)

_IN_STEP = (
    "this loop runs on several ranks, each of which decides by the schedule alone: list the step in "
    "schedule.steps"
)


class Listening:
    """Lets captures be asked for, where ``watch.enable`` is set.

    Args:
        config: The settings.
        roster: The workers.
        folders: The run's folder.
        decisions: Where what is asked for comes to.
    """

    def __init__(
        self, config: ProfilingConfig, roster: Roster, folders: StepFolders, decisions: Decisions
    ) -> None:
        self._config = config
        self._roster = roster
        self._folders = folders
        self._decisions = decisions
        self._demands: Demands | None = None
        self._signal: SignalAsking | None = None
        self.begun = not config.watch.enable

    def begin(self) -> None:
        """Begin to listen, unless this process follows another rank."""
        if self.begun:
            return
        self.begun = True
        if not leads(self._config, self._roster.targets):
            return
        together = has_peers(self._config, self._roster.targets)
        check = _refuse if together else self._roster.check_aim
        self._demands = demands = Demands(self._config.schedule, check)
        self._decisions.askers.insert(0, demands)
        if not together:
            self._signal = SignalAsking(demands.signal)
            self._signal.begin()
        try:
            run = self._folders.run
            if run.remote is not None:
                logger.info("save_path is a URL: captures are asked for with SIGUSR2 alone")
                return
            refuses = _IN_STEP if together else ""
            state = LoopState(
                process=ProcessId.current(), run_id=run.run_id, start=run.start, refuses=refuses
            )
            demands.open(ControlFolder(run.path), state)
        except OSError as error:
            logger.warning("captures cannot be asked for in the run's folder: %s", error)

    def end(self) -> None:
        """Listen no more; the next begin of training may."""
        if self._signal is not None:
            self._signal.end()
        if self._demands is not None:
            self._decisions.askers.remove(self._demands)
        self._signal = self._demands = None
        self.begun = not self._config.watch.enable


def _refuse(aim: Aim) -> None:
    raise ConfigError("", _IN_STEP)
