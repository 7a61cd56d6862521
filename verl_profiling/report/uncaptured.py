"""A run of which no step was captured: what its watch has logged, and how to have a step captured."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.run_files import read_run
from verl_profiling.timeline.inputs import is_step, step_folders
from verl_profiling.watch_log import LoggedStep, has_watch_log

__all__ = ["UncapturedRun", "how_to_capture", "is_uncaptured"]


class UncapturedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a program is told of such a run, in place of the reports of its steps.

    Attributes:
        run: Its folder.
        note: That no step was captured, and how one is.
        watch: What its watch has logged, in order of the steps.
    """

    run: str
    note: str
    watch: list[LoggedStep]


def is_uncaptured(path: Path) -> bool:
    """Return whether a path is the folder of a run that has a log of its watch, and no step folder."""
    return path.is_dir() and has_watch_log(path) and not (is_step(path) or step_folders(path))


def how_to_capture(run: Path) -> str:
    """Return that no step of a run was captured, and how one is."""
    try:
        info = read_run(run)
    except TraceFormatError:
        info = None
    ask = f"`verl-profiling trigger {shlex.quote(str(run))}`"
    if info is not None and info.end_ns is None and info.process.alive() is not False:
        return f"No step was captured so far; {ask} asks the job for its next one."
    over = ", and the job has ended" if info is not None else ""
    return (
        f"No step was captured{over}. schedule.steps names steps beforehand, watch.trigger has what becomes "
        f"slow captured, and {ask} asks a job while it runs."
    )
