"""Writes the step summaries of the watch into the run's folder, and returns their numbers.

``watch.jsonl`` has one line per step. A file that is full is renamed, and only the newest renamed
one is kept. Trackers get a summary as named numbers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path

import msgspec

from verl_profiling.files.opener import appended, move_file, whole_file
from verl_profiling.files.step_summary import OTHERS, StepSummary
from verl_profiling.files.watch_log import OLDER_WATCH_LOG, WATCH_LOG
from verl_profiling.manifest import useless_parts

logger = logging.getLogger(__name__)

Listener = Callable[[StepSummary], object]
Log = Callable[..., object]
"""Writes step summaries; its arguments are those that the watch has read at once."""

PREFIX = "profiling/watch/"
_IN_NO_STAGE = "in_no_stage"
_ENCODER = msgspec.json.Encoder()


def values_of(summary: StepSummary) -> dict[str, float]:
    """Return a summary as named numbers, e.g. ``profiling/watch/rollout/exposed_s``.

    A stage without a clear leader has no ``leader_rank``, because a slowest rank by chance means
    nothing.
    """
    ranks = {process.lane: process.rank for process in summary.processes}
    values = {f"{PREFIX}step_s": summary.seconds}
    for row in summary.exposed:
        stage = f"{PREFIX}{row.name or _IN_NO_STAGE}"
        values |= {f"{stage}/{name}": number for name, number in row.numbers.items()}
        if row.leader in ranks:
            values[f"{stage}/leader_rank"] = float(ranks[row.leader])
    for side, idle in (("trainer", summary.trainer_idle), ("rollout", summary.rollout_idle)):
        if idle is not None:
            values[f"{PREFIX}{side}_idle"] = idle.share
    if summary.helps is not None:
        saves = f"{PREFIX}{summary.helps.stage}/{summary.helps.change}_saves_s"
        values[saves] = summary.helps.saves_ns / 1e9
    values |= _useless(summary)
    for stage, work in summary.work.items():
        if work.tokens is not None:
            values[f"{PREFIX}{stage}/tokens"] = float(work.tokens)
    values |= {f"{PREFIX}{name}": rate for name, rate in summary.rates.items()}
    values |= {f"{PREFIX}counts/{name}": value for name, value in summary.counts.items()}
    values |= _memory(summary)
    for total in summary.spans:
        span = f"{PREFIX}spans/{total.name}"
        values[f"{span}/total_s"] = total.seconds
        values[f"{span}/count"] = float(total.runs)
        values[f"{span}/failed"] = float(total.failed)
    return values


def _memory(summary: StepSummary) -> dict[str, float]:
    """Return the memory of roles and machines as named numbers."""
    values = {}
    for role in summary.memory:
        sizes = {"peak": role.peak_bytes, "held": role.held_bytes, **role.kinds}
        for name, size in sizes.items():
            if size is not None:
                values[f"{PREFIX}memory/{role.role}/{name}_bytes"] = float(size)
        if role.no_cpu is not None:
            values[f"{PREFIX}no_cpu/{role.role}"] = role.no_cpu
    for row in summary.devices:
        values[f"{PREFIX}device/{row.role}/{row.stage}/peak_bytes"] = float(row.peak_bytes)
    if summary.hand_off is not None:
        values[f"{PREFIX}device/least_free_bytes"] = float(summary.hand_off.free_bytes)
    for machine in summary.machines:
        for name in ("used", "shared", "store", "cache"):
            size = getattr(machine, f"{name}_bytes")
            values[f"{PREFIX}machine/{machine.host}/{name}_bytes"] = float(size)
    return values


def _useless(summary: StepSummary) -> dict[str, float]:
    """Return the share of each stage's time that taught nothing, and of several tasks theirs."""
    values: dict[str, float] = {}
    for stage, lessons in summary.lessons.items():
        name = f"{PREFIX}{stage}/taught_nothing"
        values[name] = 0.0
        if len(lessons) > 1:
            values |= {f"{name}/{task or OTHERS}": 0.0 for task in lessons}
        for part in useless_parts(lessons):
            values[name] += part.share
            if len(lessons) > 1:
                values[f"{name}/{part.task or OTHERS}"] += part.share_of_task
    return values


class WatchLog:
    """The watch's log of a run; call it with the summary of each step.

    The file is closed after each call, so that readers on other hosts see the steps. The first
    write error is logged, and none reaches the training loop. The next call tries again.

    Args:
        folder: The run's folder.
        max_part_bytes: Size at which a new file begins. Only one older file is kept.
    """

    def __init__(self, folder: Path, max_part_bytes: int = 8 << 20) -> None:
        self._path, self._older = folder / WATCH_LOG, folder / OLDER_WATCH_LOG
        self._most = max_part_bytes
        self._lock = threading.Lock()
        self._complained = False

    def __call__(self, *summaries: StepSummary) -> None:
        """Append the summaries of steps, without the stages of single processes; thread-safe."""
        lines = _ENCODER.encode_lines([*map(_without_processes, summaries)])
        with self._lock:
            try:
                with appended(self._path) as file:
                    size = os.fstat(file.fileno()).st_size
                    is_full = size + len(lines) > self._most
                    if not is_full and file.write(lines) < len(lines):
                        file.truncate(size)
                        raise OSError(ENOSPC, os.strerror(ENOSPC))
                if is_full:
                    move_file(self._path, self._older)
                    with whole_file(self._path) as file:
                        file.write(lines)
            except OSError as error:
                if not self._complained:
                    logger.warning(
                        "the log of the watch cannot be written: %s: %s", self._path, error
                    )
                self._complained = True


def _without_processes(summary: StepSummary) -> StepSummary:
    return msgspec.structs.replace(summary, loop=[], workers=[], background=())
