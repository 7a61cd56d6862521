"""Watches what a recording takes while it grows, and says when it has to end."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_profiling.capture.prediction import Measured
from verl_profiling.settings.limits import Limits
from verl_profiling.tools import Destination, Footprint, Recording, Tool
from verl_profiling.tools.process_memory import available_bytes
from verl_profiling.units import byte_size

__all__ = ["Guard", "RunningTool", "overrun"]

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
_USUAL_WORKERS_OF_A_HOST = 8


class RunningTool(NamedTuple):
    """A tool that records."""

    tool: Tool
    recording: Recording
    destination: Destination
    measured: Measured


class Guard:
    """Looks at the recordings of a capture now and then, on a thread of its own, and after each mini-batch.

    Attributes:
        mini_batches: How many there were since the tools were started.

    Args:
        limits: The limits.
        workers: How many workers are captured in all.
        recordings: Returns what records now.
        end_early: Ends one of them, with the reason, on the thread that has done a mini-batch.
        ask_to_end: Lets one be ended, if it exceeds the limits then; called on a thread that may not do so.
    """

    def __init__(
        self,
        limits: Limits,
        workers: int,
        recordings: Callable[[], Sequence[RunningTool]],
        end_early: Callable[[RunningTool, str], None],
        ask_to_end: Callable[[RunningTool], None],
    ) -> None:
        self._limits = limits
        self._neighbours = _neighbours(workers)
        self._recordings = recordings
        self._end_early = end_early
        self._ask_to_end = ask_to_end
        self.mini_batches = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look at what records from now on, if it can grow."""
        self.mini_batches = 0
        if self._thread is None and any(running.recording.footprint() for running in self._recordings()):
            self._thread = threading.Thread(target=self._run, name="verl-profiling-guard", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End, once a recording that is being ended has been."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def mini_batch(self) -> None:
        """End what would exceed the limits if the next mini-batch were as large as those so far."""
        self.mini_batches += 1
        if self._thread is not None:
            done = f"ended after {self.mini_batches} mini-batches, before the next one: "
            for running in self._recordings():
                if reason := self.overrun(running, (self.mini_batches + 1) / self.mini_batches):
                    self._end_early(running, done + reason)

    def exceeds(self, footprint: Footprint, folder: Path) -> str:
        """Return why a recording of that size cannot be; empty if it can."""
        return overrun(self._limits, footprint, folder, self._neighbours)

    def overrun(self, running: RunningTool, growth: float = 1.0) -> str:
        """Return why a recording has to end, or would if larger by a factor; empty if it may go on."""
        try:
            footprint = running.recording.footprint()
        except Exception:
            logger.exception("tool %s does not say what it takes", running.tool.name)
            return ""
        return self.exceeds(footprint.scaled(growth), running.destination.folder) if footprint else ""

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            for running in self._recordings():
                if self.overrun(running):
                    self._ask_to_end(running)


def _neighbours(workers: int) -> int:
    """Return how many processes of this host record at once, as far as the launcher says.

    Args:
        workers: How many workers are captured in all.
    """
    for name in ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text):
            return int(text)
    return max(1, min(workers, _USUAL_WORKERS_OF_A_HOST))


def overrun(limits: Limits, footprint: Footprint, folder: Path, workers: int) -> str:
    """Return why a recording of that size has to end; empty if it may go on.

    Args:
        limits: The limits.
        footprint: What the recording takes now, and what it would take to stop it.
        folder: Where it will be written.
        workers: How many workers of this host share memory and disk.
    """
    if limits.max_events is not None and footprint.events > limits.max_events:
        return f"about {footprint.events} events are more than limits.max_events={limits.max_events}"
    if limits.memory_bytes is not None and footprint.stop_bytes > limits.memory_bytes:
        return (
            f"writing {footprint} takes {byte_size(footprint.stop_bytes)} of memory, more than "
            f"limits.memory_bytes={byte_size(limits.memory_bytes)}"
        )
    more = footprint.stop_bytes - footprint.held_bytes
    available = available_bytes()
    if available is not None and more > limits.memory_share * available / workers:
        shared = f" for {workers} workers" if workers > 1 else ""
        return (
            f"writing {footprint} takes {byte_size(more)} more memory, and limits.memory_share="
            f"{limits.memory_share:g} of {byte_size(available)}{shared} is less"
        )
    try:
        room = shutil.disk_usage(folder).free - limits.min_free_bytes
    except OSError:
        return ""
    if footprint.disk_bytes * workers > room:
        each = f"{byte_size(footprint.disk_bytes)} of {folder}" + (" per worker" if workers > 1 else "")
        free = byte_size(max(0, room))
        return f"writing {footprint} takes {each}, and {free} are free above limits.min_free_bytes"
    return ""
