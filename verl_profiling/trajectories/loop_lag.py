"""Event loop lag: the delay with which a loop runs a due callback, and the task that blocked the
loop.

A callback is scheduled when a span begins or ends, and when the sampling thread sees a running
task. The delay of the callback is the lag. While a callback is late, the thread samples the running
task. So an idle loop costs only the samples, and any type of event loop works.

The sampled task counts as the blocker, never the span that scheduled the callback. If a sample is
late and the loop's thread used the CPU for most of the time, the time counts for the task. Else it
counts against the task: other threads held the GIL, or the process got no CPU, which the kernel
counts.

A block is a period in which one task keeps its event loop busy. It often begins with a span. So if
a span began or ended since the last sample, the block begins there.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby, zip_longest
from types import FrameType
from typing import Any, Final, NamedTuple

from verl_profiling import clock
from verl_profiling.files.cpu_waits import times_ns
from verl_profiling.files.trajectory_log import NO_CPU, NO_SPAN, Block, LoopRecord

LOOK_S = 0.02
"""Time between two samples."""

LATE_NS = 30_000_000
"""Time since the last sample from which a sample is late."""

BLOCKED_NS = 50_000_000
"""Lag from which an event loop counts as blocked."""

PAUSE_NS = 20_000_000
"""Time after a measured lag before the begin or end of a span measures again."""

MOST_BLOCKS = 100_000
_NEVER: Final = 1 << 62
_LOOP = (asyncio.BaseEventLoop.run_forever.__code__, asyncio.run.__code__)
_OWN = (sysconfig.get_path("stdlib"), __file__.rpartition("/")[0])


class _Sample(NamedTuple):
    """One sample of a loop's thread: the running task, its span and function; empty if unknown.

    Since the previous sample, the task ran for ``known_ns``; for ``held_ns``, it could not run, and
    for ``starved_ns`` of that its thread was ready to run and got no CPU.
    """

    at_ns: int
    task: Any = None
    span: int = NO_SPAN
    function: str = ""
    known_ns: int = 0
    held_ns: int = 0
    starved_ns: int = 0


class LoopLag:
    """Measures the lag of a process's event loops until :meth:`end`.

    Attributes:
        blocks: Periods in which a task blocked its event loop, with the task.

    Args:
        span_of: Function that returns the number of a task's innermost open span, or -1.
    """

    def __init__(self, span_of: Callable[[object], int]) -> None:
        self.blocks: list[Block] = []
        self._span_of = span_of
        self._states: dict[int, LoopState] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def measure(self, loop: asyncio.AbstractEventLoop) -> LoopState:
        """Begin to measure the event loop of this thread; return its state."""
        state = self._states.get(id(loop))
        if state is not None:
            return state
        with self._lock:
            state = self._states[id(loop)] = LoopState(loop, len(self._states), self)
            if self._thread is None:
                name = "verl-profiling-loop-lag"
                self._thread = threading.Thread(target=self._look, name=name, daemon=True)
                self._thread.start()
        return state

    def number(self, loop: asyncio.AbstractEventLoop | None) -> int:
        """Return the number of a measured loop; -1 for other loops."""
        state = self._states.get(id(loop))
        return NO_SPAN if state is None else state.record.id

    def end(self) -> None:
        """Stop measuring, and end open blocks."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        for state in self._states.values():
            state.end()

    def loops(self) -> list[LoopRecord]:
        """Return one record per measured loop."""
        return [state.record for state in self._states.values()]

    def _look(self) -> None:
        """Sample all loops every ``LOOK_S`` seconds, until measuring ends."""
        while not self._ended.wait(LOOK_S):
            for state in list(self._states.values()):
                # It may be closed, or its thread may end, meanwhile.
                with suppress(RuntimeError, OSError):
                    state.look(self._span_of)


class LoopState:
    """The measurement of one event loop.

    Attributes:
        loop: The loop.
        record: Number and thread of the loop, as in the trajectory file.
        next_ns: Earliest time at which the begin or end of a span measures the lag again.
        span_ns: Time of the last begin or end of a span in the loop.
        ended: Whether measuring has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int, lag: LoopLag) -> None:
        thread = threading.current_thread()
        self.record = LoopRecord(number, thread.native_id or 0, thread.name)
        self.next_ns = 0
        self.span_ns = 0
        self.ended = False
        self.loop = loop
        self._lag = lag
        self._ident = threading.get_ident()
        self._cpu = time.pthread_getcpuclockid(self._ident)
        self._looked_ns, self._cpu_ns = clock.now_ns(), time.thread_time_ns()
        self._starved_ns = self._starved()
        self._due_ns = 0
        self._samples: list[_Sample] = []

    def ask(self, now_ns: int, on_this_thread: bool = True) -> None:
        """Schedule the callback that measures the lag;
        ``on_this_thread`` if the loop runs on this thread.
        """
        self.next_ns = _NEVER
        self._due_ns, self._samples = now_ns, []
        (self.loop.call_soon if on_this_thread else self.loop.call_soon_threadsafe)(self._answer)

    def look(self, span_of: Callable[[object], int]) -> None:
        """Sample the loop's thread if the callback is due;
        else schedule the callback if a task runs.
        """
        if not self.loop.is_running():
            return
        now_ns, last_ns = clock.now_ns(), self._looked_ns
        passed = self._passed(now_ns)
        task = asyncio.current_task(self.loop)
        if self.next_ns == _NEVER:
            span = NO_SPAN if task is None else span_of(task)
            function = _function(sys._current_frames().get(self._ident))
            self._samples.append(_Sample(now_ns, task, span, function, *passed))
        elif task is not None:
            self.ask(self.span_ns if self.span_ns > last_ns else now_ns, on_this_thread=False)

    def _passed(self, now_ns: int) -> tuple[int, int, int]:
        """Return the times since the last call that count for the running task and against it,
        and for how long the thread got no CPU (ns).
        """
        cpu_ns = time.clock_gettime_ns(self._cpu)
        since_ns, ran_ns = now_ns - self._looked_ns, cpu_ns - self._cpu_ns
        self._looked_ns, self._cpu_ns = now_ns, cpu_ns
        before_ns, self._starved_ns = self._starved_ns, self._starved()
        if since_ns < LATE_NS or 2 * ran_ns > since_ns:
            return since_ns, 0, 0
        return 0, since_ns, min(since_ns, self._starved_ns - before_ns)

    def _starved(self) -> int:
        with suppress(OSError, ValueError):  # another kernel: unknown
            return times_ns(self.record.thread)[1]
        return 0

    def end(self) -> None:
        """Stop measuring, and record an open block."""
        self.ended = True
        if self.next_ns == _NEVER and self.loop.is_running():
            self._keep(clock.now_ns())

    def _answer(self) -> None:
        if self.ended or self.next_ns != _NEVER:
            return  # measuring has ended, or two callbacks were scheduled
        now_ns = clock.now_ns()
        self._keep(now_ns)
        self.next_ns = now_ns + PAUSE_NS

    def _keep(self, now_ns: int) -> None:
        """Record the blocks of the last lag, if it was at least ``BLOCKED_NS``."""
        samples, self._samples = self._samples, []
        if now_ns - self._due_ns >= BLOCKED_NS and len(self._lag.blocks) < MOST_BLOCKS:
            _, *held = self._passed(now_ns)
            samples.append(_Sample(now_ns, None, NO_SPAN, "", 0, *held))
            self._lag.blocks += _blocks(self.record.id, self._due_ns, samples)


def _blocks(loop: int, due_ns: int, samples: list[_Sample]) -> Iterator[Block]:
    """Yield the blocks between ``due_ns`` and the last sample, which is of the end only; samples in
    a row with the same task and span are one block.
    """
    *samples, end = samples
    alike = groupby(
        samples or [_Sample(due_ns)], lambda one: (id(one.task), one.span, bool(one.function))
    )
    runs = [list(run) for _, run in alike]
    begin_ns = due_ns
    for run, later in zip_longest(runs, runs[1:]):
        # The times of a sample are those before it, so the first ones of the next run count here.
        until = end if later is None else later[0]
        others = [*run[1:], until]
        if run is runs[0]:
            others.append(run[0])
        known_ns = run[0].known_ns + sum(sample.known_ns for sample in run[1:])
        against_ns = sum(sample.held_ns for sample in others)
        starved_ns = sum(sample.starved_ns for sample in others)
        who = _Sample(begin_ns)
        if known_ns > against_ns:
            who = run[-1]
        elif 2 * starved_ns > against_ns:
            who = _Sample(begin_ns, function=NO_CPU)
        task = "" if who.task is None else str(who.task.get_name())[:200]
        yield Block(loop, begin_ns, until.at_ns, who.span, task, who.function)
        begin_ns = until.at_ns


def _function(frame: FrameType | None) -> str:
    """Return the innermost function outside the standard library: ``module.function (file:line)``.

    The result is empty if the event loop itself runs, because its caller does not block it.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        # Packages under site-packages lie inside the standard library's folder, but are not of it.
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = None if frame.f_code in _LOOP else frame.f_back
    if frame is None:
        return ""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    file = code.co_filename.rpartition("/")[2]
    return f"{frame.f_globals.get('__name__', '')}.{name} ({file}:{frame.f_lineno})"
