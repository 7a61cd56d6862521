"""Reads a run that may go on, for ``top``, ``view`` and ``report``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_profiling.commands.common import warn
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import read_run
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import WATCH_LOG, WatchLogReader, latest_step, read_watch_log
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.report.watch_frame import (
    RunView,
    captures_so_far,
    logged_steps,
    thresholds_of,
    varying_stages,
)
from verl_profiling.steps.deaths import death_in
from verl_profiling.steps.start_up import start_up_of
from verl_profiling.units import duration, local_time

_STEPS = 200  # the latest steps that `top` shows
_CAPTURES = 5  # the most captures that a view of a run names
_RECENT = 1000  # steps by which stages are judged to vary: longer takes seconds


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


def run_view(
    run: Path, info: RunInfo | None, steps: Sequence[StepSummary], hangs: str, note: str = ""
) -> RunView:
    """Return the present state of a run, for ``top``, ``report`` and the pages of a run.

    Args:
        run: The run's folder.
        info: The content of its ``run.json``; ``None`` without a readable file.
        steps: The steps in its watch log.
        hangs: A sentence on the step that hangs; empty if no step does.
        note: Advice for the user, e.g. on how to capture a step.
    """
    over = "" if info is None else info.over
    is_gone = info is not None and bool(over) and info.end_ns is None
    death = death_in(run, info) if over else None
    captures, latest = captures_so_far(run, _CAPTURES)
    return RunView(
        run=run,
        state=_state(run, info, over if death is None else _broken_off(info, over), hangs),
        hangs=hangs,
        is_over=bool(over),
        is_well=not hangs and not is_gone and death is None,
        death=death,
        watch=steps,
        varying=varying_stages(steps[-_RECENT:], thresholds_of(info)),
        captures=captures,
        latest=latest,
        note=note,
        start_up=start_up_of(run),
    )


def _broken_off(info: RunInfo | None, over: str) -> str:
    """Return why a run with a death is over: an exception ended it, or its process is gone."""
    if info is None or info.end_ns is None:
        return over
    return f"an exception ended training in step {info.last_step}, at {local_time(info.end_ns)}"


def _state(run: Path, info: RunInfo | None, over: str, hangs: str) -> str:
    """Return the state of the job, and when its watch logged last, as text."""
    logged = "no step logged yet"
    with suppress(OSError):  # the log does not exist, or was just rotated
        quiet_s = time.time() - (run / WATCH_LOG).stat().st_mtime
        subject = "hang" if hangs else "last step"
        logged = f"{subject} logged {duration(max(round(quiet_s), 0))} ago"
    if info is None:
        return f"has no {RUN_NAME}; {logged}"
    return f"{over}; {logged}" if over else f"{info.process}, {logged}"


def watched(run: Path) -> tuple[list[StepSummary], str]:
    """Return the steps in the watch log of a run, and a sentence on a step that hangs.

    Warn if the log is unreadable.
    """
    try:
        lines = read_watch_log(run)
    except TraceFormatError as error:
        warn(str(error))
        return [], ""
    return logged_steps(lines), "".join(line.hangs for line in latest_step(lines))
