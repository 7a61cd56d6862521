"""Writes the step summaries of the watch into the run's folder, from the begin of training to its end."""

from __future__ import annotations

import logging

from verl_profiling.controller.spmd import place_of
from verl_profiling.controller.step_folder import StepFolders
from verl_profiling.controller.targets import Roster
from verl_profiling.controller.watch import Watch
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.event_file import EventFile
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.step_summary import StepSummary
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch.values import values_of

logger = logging.getLogger(__name__)


class WatchOutlet:
    """Writes every step summary to the watch's log and, if set, to a TensorBoard file, on the watch's thread.

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
        self._log: WatchLog | None = None
        self._curves: EventFile | None = None
        self._complained = False

    def begin(self) -> None:
        """Open the log, unless another rank writes it."""
        leads = place_of(self._config, self._roster.targets)[0] == 0
        if self._watch is None or self._log is not None or not leads:
            return
        try:
            run = self._folders.run
        except OSError as error:
            if not self._complained:
                logger.warning("watch: its steps are not logged: %s", error)
            self._complained = True
            return
        self._log = WatchLog(run.path)
        if "tensorboard" in (self._config.watch.sinks or ()):
            try:
                self._curves = EventFile(run.path / "tensorboard", "watch.sinks: tensorboard")
            except (ToolUnavailableError, OSError) as error:
                logger.warning("watch.sinks: tensorboard gets nothing: %s", error)
        self._watch.listeners.append(self._listen)

    def end(self) -> None:
        """Close the log; the next :meth:`begin` opens it again."""
        if self._watch is not None and self._log is not None:
            self._watch.listeners.remove(self._listen)
        if self._curves is not None:
            self._curves.close()
        self._log = self._curves = None

    def _listen(self, summary: StepSummary) -> None:
        if self._log is not None:
            self._log(summary)
        if self._curves is not None:
            self._curves.add(summary.step, values_of(summary))
