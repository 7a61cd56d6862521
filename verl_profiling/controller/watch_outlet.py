"""From the begin of training to its end: what the watch finds goes to the run's folder and to the sinks."""

from __future__ import annotations

import logging

from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import leads
from verl_profiling.controller.step_folder import StepFolders
from verl_profiling.controller.watch import Watch
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch.outlet import Outlet

__all__ = ["WatchOutlet"]

logger = logging.getLogger(__name__)


class WatchOutlet:
    """Has what the watch finds written.

    Args:
        config: The settings.
        roster: The workers.
        folders: The run's folder.
        watch: The watch; ``None`` if it is off.
    """

    def __init__(
        self, config: ProfilingConfig, roster: Roster, folders: StepFolders, watch: Watch | None
    ) -> None:
        self._config = config
        self._roster = roster
        self._folders = folders
        self._watch = watch
        self._outlet: Outlet | None = None
        self._complained = False

    def begin(self) -> None:
        """Begin, unless this process follows another rank."""
        if self._watch is None or self._outlet is not None or not leads(self._config, self._roster.targets):
            return
        try:
            run = self._folders.run
        except OSError as error:
            if not self._complained:
                logger.warning("watch: its steps are not logged: %s", error)
            self._complained = True
            return
        self._outlet = Outlet(run.path, self._config.watch.sinks or (), WatchLog(run.path))
        self._watch.early.append(self._outlet.step_ended)
        self._watch.listeners.append(self._outlet.completed)

    def end(self, timeout_s: float) -> None:
        """Write what is left; the next begin of training begins anew."""
        outlet, self._outlet = self._outlet, None
        if outlet is not None and self._watch is not None:
            self._watch.early.remove(outlet.step_ended)
            self._watch.listeners.remove(outlet.completed)
            outlet.close(timeout_s)
