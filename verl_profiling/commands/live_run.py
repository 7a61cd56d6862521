"""Reads a run that may go on, for ``top`` and for ``view``."""

from __future__ import annotations

from pathlib import Path

from verl_profiling.commands.common import run_view
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import read_run
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import WatchLogReader, latest_step
from verl_profiling.manifest import RunInfo
from verl_profiling.report.watch_frame import RunView, logged_steps

_STEPS = 200  # the latest steps that `top` shows


class LiveRun:
    """Reads the watch log and ``run.json`` of a run again and again.

    Args:
        run: The run's folder.
        most: Number of the latest steps that are kept.

    Attributes:
        run: The run's folder.
    """

    # Whether the next read may fail: on a busy network share, one read fails now and then.
    _may_fail = False

    def __init__(self, run: Path, most: int = _STEPS) -> None:
        self.run = run
        self._most = most
        self._log = WatchLogReader(run)
        self._steps: list[StepSummary] = []
        self._latest: list[StepSummary] = []
        self._info: RunInfo | None = None

    def read(self, note: str = "") -> RunView:
        """Read the new steps of the watch log, and return the run as it is now.

        Args:
            note: Advice for the user.
        """
        try:
            self._read()
            self._may_fail = True
        except TraceFormatError:
            if not self._may_fail:
                raise
            self._may_fail = False
        hangs = "".join(line.hangs for line in self._latest)
        return run_view(self.run, self._info, self._steps, hangs, note)

    def _read(self) -> None:
        lines: list[StepSummary] = []
        try:
            lines.extend(self._log.read())
        finally:  # lines before an error are not read again
            self._steps = logged_steps(lines, self._steps)[-self._most :]
            self._latest = latest_step([*self._latest, *lines])
        self._info = read_run(self.run)
