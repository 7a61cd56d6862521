"""The last stages of a process, in a memory of fixed size. Written for speed: every stage passes here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from struct import Struct

import msgspec

from verl_profiling import clock
from verl_profiling.step_account import OTHERS
from verl_profiling.watch.memory import process_memory

__all__ = [
    "OTHERS",
    "SLOT",
    "STAGES_OF_A_STEP",
    "OpenStage",
    "StageRing",
    "forget_process_ring",
    "process_ring",
]

STAGES_OF_A_STEP = 16
"""Room for so many outermost stages is kept for each step."""

SLOT = Struct("=qiqqqq")
"""One stage: its number, its name's, begin and duration in ns, and the peak and the size of the memory."""

MAX_NAMES = 256
"""The names after these are one, ``OTHERS``."""

_LONGEST_NAME = 200
_PAUSE = 1_000
"""So many times as long as reading the memory took is waited before it is read again."""

_OTHERS_PAUSE = 10
"""So many pauses are waited for the stage after which it was read last: another one's size is no growth."""

_SLACK_NS = 1_000_000_000


class OpenStage(msgspec.Struct, eq=False, gc=False):
    """A stage that has begun. The garbage collector does not track it, and so does not run for it."""

    ring: StageRing
    parent: OpenStage | None
    name: str
    begin_ns: int
    ended: bool = False


_innermost: ContextVar[OpenStage | None] = ContextVar("verl_profiling_innermost_watched", default=None)
"""The stage that began last in this thread or task; if it has ended, the innermost one is around it."""


class StageRing:
    """Keeps the outermost stages of this process that ended last; a stage inside of another is not kept.

    Any thread and task may use it. A slot is written in one call, so no lock is needed for it.

    Args:
        stages: How many are kept.
        memory: Returns the peak and the size of the process's memory. It is asked at the end of a stage,
            but for a thousandth of the time at most, and where stages are quick after the same one each time;
            at the end of the others nothing is known of it.
    """

    def __init__(self, stages: int, memory: Callable[[], tuple[int, int]] = process_memory) -> None:
        self.capacity = stages
        self._memory = memory
        self._asked_ns = self._asked_after = self._pause_ns = 0
        self._slots = bytearray(stages * SLOT.size)
        self._numbers = count(1)
        self._last = 0
        self._told = 0
        self._names = [OTHERS]
        self._index: dict[str, int] = {}
        self._naming = threading.Lock()

    def begin(self, name: str) -> OpenStage:
        """Begin a stage on this thread or task."""
        parent = _innermost.get()
        while parent is not None and parent.ended:
            parent = parent.parent
        stage = OpenStage(self, parent, name, clock.now_ns())
        _innermost.set(stage)
        return stage

    def end(self, name: str, failed: bool) -> None:
        """End the innermost open stage of that name; one that began before the ring was there has none."""
        stage = _innermost.get()
        while stage is not None and (stage.ended or stage.name != name or stage.ring is not self):
            stage = stage.parent
        if stage is not None:
            _innermost.set(stage.parent)
            self._end(stage)

    def end_stage(self, stage: OpenStage) -> None:
        """End a stage that may have begun in another thread or task."""
        inner = _innermost.get()
        while inner is not None and inner is not stage:
            inner = inner.parent
        if inner is not None:
            _innermost.set(stage.parent)
        if not stage.ended:
            self._end(stage)

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Keep a stage that lies in no other."""
        duration_ns = max(0, end_ns - begin_ns)
        index = self._index.get(name)
        if index is None:
            index = self._new_name(name)
        peak, held = self._ask_memory(end_ns, index) if self._is_due(end_ns, index) else (0, 0)
        number = next(self._numbers)
        place = number % self.capacity * SLOT.size
        SLOT.pack_into(self._slots, place, number, index, begin_ns, duration_ns, peak, held)
        self._last = number

    def read(self, since_ns: int | None) -> tuple[list[str], bytes]:
        """Return the names, and the stages that have ended since then as ``SLOT`` after ``SLOT``.

        Args:
            since_ns: Since when; a second before it is told again, for stages of other threads that ended
                while it was read. ``None``: what was not told before.
        """
        last = self._last
        found = []
        for number in range(last, max(0, last - self.capacity), -1):
            place = number % self.capacity * SLOT.size
            slot = bytes(self._slots[place : place + SLOT.size])
            kept, _, begin_ns, duration_ns, _, _ = SLOT.unpack(slot)
            if kept != number:  # another thread has its place by now, or has not written it yet
                continue
            if kept <= self._told if since_ns is None else begin_ns + duration_ns < since_ns - _SLACK_NS:
                break
            found.append(slot)
        self._told = last
        return list(self._names), b"".join(reversed(found))

    def _end(self, stage: OpenStage) -> None:
        stage.ended = True
        outer = stage.parent
        while outer is not None and outer.ring is not self:
            outer = outer.parent
        if outer is None:
            self.add(stage.name, stage.begin_ns, clock.now_ns())

    def _is_due(self, now_ns: int, index: int) -> bool:
        waited_ns = abs(now_ns - self._asked_ns)  # the clock may be set back
        return waited_ns >= self._pause_ns * (1 if index == self._asked_after else _OTHERS_PAUSE)

    def _ask_memory(self, now_ns: int, index: int) -> tuple[int, int]:
        begin_ns = time.thread_time_ns()
        found = self._memory()
        self._asked_ns, self._asked_after = now_ns, index
        self._pause_ns = _PAUSE * (time.thread_time_ns() - begin_ns)
        return found

    def _new_name(self, name: str) -> int:
        name = name[:_LONGEST_NAME]
        with self._naming:
            if name not in self._index:
                if len(self._names) > MAX_NAMES:
                    return 0
                self._names.append(name)
                self._index[name] = len(self._names) - 1
        return self._index[name]


_of_process: list[StageRing] = []


def process_ring(stages: int) -> StageRing:
    """Return the ring that the workers of this process share, and its loop where every rank runs the loop.

    Args:
        stages: How many it keeps, if it is not there yet.
    """
    if not _of_process:
        _of_process.append(StageRing(stages))
    return _of_process[0]


def forget_process_ring() -> None:
    """Let the process begin with another, as a forked child does."""
    _of_process.clear()
