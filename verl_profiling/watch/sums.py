"""The stages that a process records for the watch, ended and open, and its memory after them.

Written for speed: every stage begins and ends here.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import islice
from operator import attrgetter
from types import TracebackType
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.step_summary import OTHERS, Period, RankUse, StageUse
from verl_profiling.tools.process_memory import own_bytes, process_peak_bytes
from verl_profiling.watch.span_sums import SpanSums

STAGES_OF_A_STEP = 16
"""Ended outermost stages that a process keeps, per step that the watch keeps."""

MOST_PERIODS = 16
"""Maximum number of periods of a stage in a step; further runs extend the last period."""

MOST_NAMES = 256
"""Maximum number of stage names in a step; stages with further names are summed as ``OTHERS``."""

LONG_NS = 20_000_000
"""After a stage of this length or longer, memory is always read."""

PAUSE_NS = 50_000_000
"""Minimum interval of memory readings after short stages; 10 times as long after another stage."""

_DEVICES = ("cuda", "npu")
_LATEST = 256
"""Ended stages that a reply copies; all of them, if these do not cover its steps."""

_LONGEST_NAME = 200
_TOUCHING_NS = 1_000_000
_SLACK_NS = 1_000_000_000
_SMALL_PART = 100
"""An ended stage counts in a step that contains 1/100 of the stage, or that the stage fills.
An open stage counts if it takes 1/100 of the step."""


class OpenStage(msgspec.Struct, eq=False, gc=False):
    """A stage that has begun. With ``gc=False``, creating it never triggers the garbage collector."""

    sums: StageSums
    parent: OpenStage | None
    name: str
    begin_ns: int
    ended: bool = False


_innermost: ContextVar[OpenStage | None] = ContextVar("verl_profiling_innermost_watched", default=None)
"""The stage that began last in this thread or task. If it has ended, its nearest open parent is innermost."""


def process_memory() -> tuple[int, int]:
    """Return peak and current memory of this process, in bytes; 0 for an unknown value.

    On a device: the bytes that torch's allocator has allocated, and their peak since the process began or the
    program reset torch's peak statistics. On the host: the resident memory of this process without shared
    pages, and the kernel's peak of all its resident memory. Nothing is reset or imported here.
    """
    torch = sys.modules.get("torch")
    for name in _DEVICES:
        device = getattr(torch, name, None)
        if device is not None and (found := _of_device(device)) is not None:
            return found
    return process_peak_bytes(), own_bytes() or 0


def _of_device(device: Any) -> tuple[int, int] | None:
    """Return peak and current bytes of one kind of device; ``None`` if this process does not use it."""
    try:
        if not device.is_initialized():
            return None
        statistics = device.memory.memory_stats_as_nested_dict()
        allocated = statistics["allocated_bytes"]["all"]
        return allocated["peak"], allocated["current"]
    except Exception:  # another version of torch, or a failed device, which training reports itself
        return None


class StageSums:
    """Records the outermost stages of this process; nested stages are not recorded.

    Any thread and task may use it.

    Args:
        most: Number of ended stages that are kept.
        memory: Returns the peak and the current memory of the process, in bytes.

    Attributes:
        spans: Sums of the process's trajectories and spans; ``None`` where it has none.
    """

    def __init__(self, most: int, memory: Callable[[], tuple[int, int]] = process_memory) -> None:
        self.spans: SpanSums | None = None
        self._ended: deque[tuple[str, int, int, int, int]] = deque(maxlen=most)
        self._open: dict[int, OpenStage] = {}
        self._memory = memory
        self._measured_ns, self._measured_after = 0, ""
        self._since_ns = clock.now_ns()
        self._count = self._reported = 0

    def begin(self, name: str) -> OpenStage:
        """Begin a stage on this thread or task."""
        parent = _innermost.get()
        while parent is not None and parent.ended:
            parent = parent.parent
        stage = OpenStage(self, parent, name, clock.now_ns())
        _innermost.set(stage)
        while parent is not None and (parent.sums is not self or parent.ended):
            parent = parent.parent
        if parent is None:
            self._open[id(stage)] = stage
        return stage

    def end(self, name: str, failed: bool) -> None:
        """End the innermost open stage of that name, if any: a stage may have begun before the watch."""
        stage = _innermost.get()
        while stage is not None and (stage.ended or stage.name != name or stage.sums is not self):
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

    def open(self, name: str) -> OpenStage:
        """Begin a stage outside of the nesting, without parent or children; :meth:`end_stage` ends it."""
        stage = OpenStage(self, None, name, clock.now_ns())
        self._open[id(stage)] = stage
        return stage

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record an outermost stage that has ended."""
        peak = held = 0
        waited_ns = abs(end_ns - self._measured_ns)  # the clock may be set back
        pause_ns = PAUSE_NS if name == self._measured_after else 10 * PAUSE_NS
        if end_ns - begin_ns >= LONG_NS or waited_ns >= pause_ns:
            peak, held = self._memory()
            self._measured_ns, self._measured_after = end_ns, name
        self._count += 1
        self._ended.append((name, begin_ns, max(begin_ns, end_ns), peak, held))

    def of_steps(self, who: RankUse, steps: Sequence[Period], ahead_ns: int = 0) -> list[RankUse | None]:
        """Return the process's stages, memory and spans in each step; ``None`` for steps before it began.

        A stage that crosses the end of a step is divided between both steps. An open stage counts until now.

        Args:
            who: Lane, role, rank and replica of the process.
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's. Results are on the loop's clock.
        """
        begins, now_ns = [begin_ns for begin_ns, _ in steps], clock.now_ns() - ahead_ns
        self._since_ns = min(self._since_ns, now_ns + ahead_ns)  # the clock may be set back
        runs: list[dict[str, list[Period]]] = [{} for _ in steps]
        memory: list[tuple[int, int]] = [(0, 0)] * len(steps)
        for name, begin_ns, end_ns, peak, held in self._latest(begins[0] + ahead_ns if steps else 0):
            begin_ns, end_ns = begin_ns - ahead_ns, end_ns - ahead_ns
            if steps and end_ns < begins[0] - _SLACK_NS:
                break
            at = _divide(runs, name, begin_ns, end_ns, steps, begins)
            if peak and at is not None:
                memory[at] = max(peak, memory[at][0]), memory[at][1] or held
        for stage in list(self._open.values()):
            _divide(runs, stage.name, stage.begin_ns - ahead_ns, now_ns, steps, begins, is_open=True)
        totals = self.spans.of_steps(steps, ahead_ns) if self.spans is not None else [[] for _ in steps]
        return [
            RankUse(
                lane=who.lane,
                role=who.role,
                rank=who.rank,
                replica=who.replica,
                stages=sorted((_use(*of_stage) for of_stage in of_step.items()), key=_begin_ns),
                peak_bytes=memory[at][0] or None,
                held_bytes=memory[at][1] or None,
                spans=totals[at],
            )
            if steps[at][1] >= self._since_ns - ahead_ns
            else None
            for at, of_step in enumerate(runs)
        ]

    def _latest(self, since_ns: int) -> list[tuple[str, int, int, int, int]]:
        """Return the stages that ended after ``since_ns``, and some earlier ones, the latest first."""
        try:
            latest = list(islice(reversed(self._ended), _LATEST))
        except RuntimeError:  # a stage ended meanwhile, on another thread
            return list(self._ended)[::-1]
        return list(self._ended)[::-1] if latest and latest[-1][2] >= since_ns - _SLACK_NS else latest

    def take_dropped(self) -> int:
        """Return how many stages ended since the last call and were dropped, because the queue was full."""
        new, self._reported = self._count - self._reported, self._count
        return max(0, new - (self._ended.maxlen or 0))

    def _end(self, stage: OpenStage) -> None:
        stage.ended = True
        if self._open.pop(id(stage), None) is not None:
            self.add(stage.name, stage.begin_ns, clock.now_ns())


def _divide(
    runs: list[dict[str, list[Period]]],
    name: str,
    begin_ns: int,
    end_ns: int,
    steps: Sequence[Period],
    begins: Sequence[int],
    is_open: bool = False,
) -> int | None:
    """Add a stage to each step that it overlaps; return the index of the last such step."""
    at = max(bisect_right(begins, begin_ns) - 1, 0)
    last = None
    while at < len(steps) and begins[at] <= end_ns:
        first_ns, last_ns = max(begins[at], begin_ns), min(steps[at][1], end_ns)
        step_ns = steps[at][1] - begins[at]
        least_ns = step_ns if is_open else min(end_ns - begin_ns, _SMALL_PART * step_ns)
        if first_ns <= last_ns and _SMALL_PART * (last_ns - first_ns) >= least_ns:
            of_step = runs[at]
            shown = name[:_LONGEST_NAME] if name in of_step or len(of_step) < MOST_NAMES else OTHERS
            of_step.setdefault(shown, []).append((first_ns, last_ns))
            last = at
        at += 1
    return last


def _use(name: str, runs: list[Period]) -> StageUse:
    """Return the total duration, count and periods of all runs of a stage in one step."""
    if len(runs) == 1:
        begin_ns, end_ns = runs[0]
        return StageUse(name, end_ns - begin_ns, 1, begin_ns)
    periods: list[Period] = []
    for begin_ns, end_ns in sorted(runs):
        if periods and (begin_ns - periods[-1][1] <= _TOUCHING_NS or len(periods) == MOST_PERIODS):
            periods[-1] = (periods[-1][0], max(periods[-1][1], end_ns))
        else:
            periods.append((begin_ns, end_ns))
    duration_ns = sum(end_ns - begin_ns for begin_ns, end_ns in runs)
    return StageUse(name, duration_ns, len(runs), periods[0][0], tuple(periods))


class Busy:
    """A stage that is open while at least one request, or one trajectory, is in progress.

    Wrap each request in ``with busy:``, in any thread or task.

    Args:
        sums: The sums that record the stage.
        name: Name of the stage.
        spans: Receives number and total duration of the requests, if given, as spans of that name.
    """

    def __init__(self, sums: StageSums, name: str, spans: SpanSums | None = None) -> None:
        self._sums = sums
        self._name = name
        self._spans = spans
        self._under_way = self._changed_ns = self._requests_ns = 0
        self._stage: OpenStage | None = None
        self._lock = threading.RLock()  # reentrant: garbage collection may call _end under the lock

    def __enter__(self) -> None:
        with self._lock:
            self._change(1)
            if self._stage is None:
                self._stage = self._sums.open(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def while_alive(self, stream: object) -> None:
        """Count a streamed response as in progress until the object is garbage-collected."""
        self.__enter__()
        weakref.finalize(stream, self._end).atexit = False

    def _end(self) -> None:
        with self._lock:
            self._change(-1)
            if not self._under_way and self._stage is not None:
                self._sums.end_stage(self._stage)
                self._stage = None

    def _change(self, by: int) -> None:
        now_ns = clock.now_ns()
        self._requests_ns += self._under_way * max(0, now_ns - self._changed_ns)
        self._changed_ns = now_ns
        self._under_way += by
        if by < 0 and self._spans is not None:  # the sum over all is right, whichever of them has ended
            self._spans.add(self._name, now_ns - self._requests_ns, now_ns, False)
            self._requests_ns = 0


_begin_ns = attrgetter("begin_ns")
_of_process: list[StageSums] = []


def process_sums(most: int) -> StageSums:
    """Return this process's sums, shared by its workers and, in an SPMD loop, by the loop itself.

    Args:
        most: Number of ended stages to keep, if this call creates the sums.
    """
    if not _of_process:
        _of_process.append(StageSums(most))
    return _of_process[0]


def forget_process_sums() -> None:
    """Drop the sums, so that a forked child begins with new ones."""
    _of_process.clear()
