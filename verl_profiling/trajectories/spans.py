"""Trajectories and their spans, as context managers for threads and asyncio tasks.

The innermost open one is in a context variable: concurrent tasks have one each, and
:func:`asyncio.to_thread` hands it on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import numbers
import os
import threading
from asyncio import _get_running_loop, current_task
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from threading import get_ident
from types import TracebackType
from typing import Any, Final

import msgspec

from verl_profiling import clock
from verl_profiling.trajectories.loop_lag import LoopLag, LoopState
from verl_profiling.trajectory_log import (
    NO_SPAN,
    Block,
    Counted,
    Fact,
    FateChange,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)

__all__ = [
    "TRAJECTORY",
    "OpenLog",
    "Span",
    "Trajectory",
    "count",
    "current_trajectory",
    "keep_trajectories",
    "span",
    "start_log",
    "stop_log",
    "total_spans",
    "trajectory",
    "trajectory_fate",
    "unrecorded_trajectories",
]


_LONGEST_TEXT = 200
_MOST_FACTS = 50

_log: OpenLog | None = None
_totals: Any = None
_kept = False
_unrecorded = 0
_open: dict[int, Trajectory | Span] = {}


class _Ready:
    """Something awaitable that is done at once."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._value
        yield


_DONE: Final = _Ready(None)


class _Async:
    """What ``async with`` does with something is what ``with`` does, without a turn of the event loop."""

    __slots__ = ()

    def __aenter__(self: AbstractContextManager[Any]) -> _Ready:
        return _Ready(self.__enter__())

    def __aexit__(
        self: AbstractContextManager[Any],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> _Ready:
        self.__exit__(kind, error, trace)
        return _DONE


TRAJECTORY: Final = "trajectory"
"""Name of trajectories where they are added up beside their spans."""
_FAILED: Final = "failed"


class Trajectory(_Async, msgspec.Struct, eq=False):
    """One rollout of one prompt, from its dispatch to its response; made by :func:`trajectory`.

    Attributes:
        fate: What became of it; set it to say more than ``done``, e.g. ``aborted``.
        facts: What is known about it; see :meth:`add`.
    """

    group: object
    sample: int | str | None
    facts: dict[str, Any]
    fate: str = ""
    error: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    thread: int = 0
    running_loop: Any = None
    loop: LoopState | None = None
    parent: Any = None

    @property
    def trajectory(self) -> Trajectory:
        """Itself: spans inside belong to it."""
        return self

    def add(self, /, **facts: Any) -> None:
        """Add facts, e.g. ``turns=3, response_tokens=512``; a later value replaces an earlier."""
        self.facts.update(facts)

    def __enter__(self) -> Trajectory:
        self.parent = _innermost()
        self.begin_ns = clock.now_ns()
        self.end_ns = 0
        self.thread = get_ident()
        self.running_loop = _get_running_loop()
        _open[id(self)] = self
        _current.set(self)
        if _log is not None:
            _log.add_trajectory(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.fate:
            self.fate = _fate(kind)
            if self.fate == _FAILED:
                self.error = f"{kind.__name__}: {_said(error)}"
        self.end_ns = clock.now_ns()
        _open.pop(id(self), None)
        _leave(self)
        if _totals is not None:
            _totals.add(TRAJECTORY, self.begin_ns, self.end_ns, self.fate == _FAILED)


class Span(_Async, msgspec.Struct, eq=False, gc=False):
    """What a trajectory does for a while; made by :func:`span`.

    The garbage collector does not track spans, so that thousands of them do not make it run.

    Attributes:
        name: Its name.
        request: The engine's id of the request that it waits for; may be set while it is open.
        facts: What is known about it.
    """

    name: str
    request: str
    facts: dict[str, Any]
    parent: Any = None
    trajectory: Trajectory | None = None
    begin_ns: int = 0
    end_ns: int = 0
    thread: int = 0
    loop: LoopState | None = None
    task: Any = None
    failed: bool = False
    entered_ns: int = 0

    def add(self, /, **facts: Any) -> None:
        """Add facts; a later value replaces an earlier."""
        self.facts.update(facts)

    def __enter__(self) -> Span:
        if self.begin_ns:  # entered again: one span, to the last end
            self.end_ns, self.entered_ns = 0, clock.now_ns()
            return self
        log = _log
        self.thread = thread = get_ident()
        measured = None
        parent = _current.get()
        while parent is not None and parent.end_ns:
            parent = parent.parent
        if parent is not None:
            self.parent = parent
            self.trajectory = parent.trajectory
            if parent.thread == thread:
                measured = parent.loop
        if log is not None and (measured is None or measured.ended):
            running = _get_running_loop()  # takes longer than all the rest, up to Python 3.11
            measured = None if running is None else log.lag.measure(running)
        _current.set(self)
        _open[id(self)] = self
        self.begin_ns = self.entered_ns = begin_ns = clock.now_ns()
        if log is None:
            return self
        log.add_span(self)
        if measured is not None:
            self.loop = measured
            self.task = current_task(measured.loop)
            if begin_ns > measured.next_ns:
                measured.ask(begin_ns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.begin_ns and not self.end_ns:
            self.end_ns = end_ns = clock.now_ns()
            _open.pop(id(self), None)
            self.task = None
            measured = self.loop
            if measured is not None and end_ns > measured.next_ns and _get_running_loop() is measured.loop:
                measured.ask(end_ns)
            if kind is not None:
                self.failed = True
            if _current.get() is self:
                _current.set(self.parent)
            else:
                _leave(self)
            if _totals is not None:
                _totals.add(self.name, self.entered_ns, end_ns, kind is not None)


Node = Trajectory | Span
_current: ContextVar[Node | None] = ContextVar("verl_profiling_innermost_span", default=None)
"""What began last in this thread or task; if it has ended, the innermost open one is around it."""


class _Idle:
    """What :func:`span` and :func:`trajectory` return while nothing records; it keeps nothing."""

    __slots__ = ()

    def __enter__(self) -> _Idle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __aenter__(self) -> _Ready:
        return _READY_IDLE

    def __aexit__(self, *_: object) -> _Ready:
        return _DONE

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def add(self, /, **facts: Any) -> None:
        pass


_IDLE: Final[Any] = _Idle()
_READY_IDLE: Final = _Ready(_IDLE)
_make_span: type[Span] | None = None
"""Makes spans; ``None`` while nobody wants any."""


def trajectory(group: object = "", sample: int | str | None = None, **facts: Any) -> Trajectory:
    """Return a trajectory, to be used with ``with`` or ``async with``.

    ``async with trajectory(group=uid, sample=3) as t: ...``. Spans inside belong to it, in its task, in
    tasks that it starts, and in ``asyncio.to_thread``; an executor of your own is given
    ``contextvars.copy_context().run``.
    An exception makes it ``failed``, a cancellation ``cancelled``, and both pass through.

    Args:
        group: What all samples of its prompt share.
        sample: Which of them it is.
        **facts: Numbers, texts and truth values to keep. The report knows ``validate``, ``turns``,
            ``tool_calls``, ``prompt_tokens``, ``response_tokens``, ``reward``, and ``min_version`` and
            ``max_version``: the policy versions that made it.
    """
    if _log is None:
        global _unrecorded
        _unrecorded += 1
    return Trajectory(group, sample, facts) if _kept else _IDLE


def span(name: str, /, *, request: str = "", **facts: Any) -> Span:
    """Return a span, to be used with ``with`` or ``async with``: what a trajectory, or the process, does.

    Args:
        name: ``generate``, ``tool:search``, ``environment:start``, ``reward``, ``wait:queue``, or your own.
        request: The engine's id of the request that it waits for.
        **facts: Numbers, texts and truth values to keep.
    """
    return _IDLE if _make_span is None else _make_span(name, request, facts)


def trajectory_fate(group: object, fate: str, sample: int | str | None = None) -> None:
    """Say what became of trajectories that have ended, e.g. that dynamic sampling filtered their group out.

    Args:
        group: The group.
        fate: ``filtered``, ``aborted``, ``abandoned``, or your own word.
        sample: The sample; ``None`` for all of the group.
    """
    if _log is not None and len(_log.fates) < _log.max_spans:
        _log.fates.append(FateChange(str(group), sample, fate, clock.now_ns()))


def count(name: str, value: int | float) -> None:
    """Say how much of something there is now, e.g. how long a queue is; the timeline draws it over time.

    Args:
        name: What is counted.
        value: How much.
    """
    if _log is not None and len(_log.counts) < _log.max_spans:
        _log.counts.append(Counted(str(name), clock.now_ns(), value))


def current_trajectory() -> Trajectory | None:
    """Return the trajectory that this task or thread works for; ``None`` outside of one."""
    node = _innermost()
    return node.trajectory if node is not None else None


def unrecorded_trajectories() -> int:
    """Return how many trajectories this process has begun while nothing recorded them."""
    return _unrecorded


def keep_trajectories() -> None:
    """Know this process's trajectories from now on, so that a capture shows those that began before it."""
    global _kept
    _kept = True


def start_log(log: OpenLog) -> None:
    """Record from now on, what is open included: all trajectories, and the spans that were not idle."""
    global _log
    keep_trajectories()
    for running in list(_open.values()):
        if isinstance(running, Trajectory):
            log.add_trajectory(running)
        else:
            running.loop = None
            log.add_span(running)
    _log = log
    _choose_span()


def stop_log(log: OpenLog) -> None:
    """Record no more."""
    global _log
    if _log is log:
        _log = None
        _choose_span()


def total_spans(totals: Any) -> None:
    """Add up all spans and trajectories of this process from now on; ``None``: no more.

    Args:
        totals: A :class:`~verl_profiling.watch.span_tally.SpanTally`.
    """
    global _totals
    if totals is not None:
        keep_trajectories()
    _totals = totals
    _choose_span()


def _choose_span() -> None:
    global _make_span
    _make_span = None if _log is None and _totals is None else Span


def _forget() -> None:
    """Record nothing in a forked child: its parent does."""
    global _log
    _log = None
    _open.clear()
    total_spans(None)


os.register_at_fork(after_in_child=_forget)


def _innermost() -> Node | None:
    node = _current.get()
    while node is not None and node.end_ns:
        node = node.parent
    return node


def _leave(ended: Node) -> None:
    """Go back to what is around an ended one, also from inside of what was left open in it."""
    node = _current.get()
    while node is not None and node is not ended:
        node = node.parent
    if node is ended:
        _current.set(ended.parent)


def _said(error: BaseException | None) -> str:
    """Return an exception's text, unless it has none: the exception itself goes on either way."""
    try:
        return str(error)
    except Exception as problem:
        return f"(its text raised {type(problem).__name__})"


def _fate(kind: type[BaseException]) -> str:
    if issubclass(kind, asyncio.CancelledError | concurrent.futures.CancelledError):
        return "cancelled"
    return "abandoned" if issubclass(kind, GeneratorExit) else _FAILED


class OpenLog:
    """What a process has recorded so far: bounded, and without a lock per span.

    Args:
        max_spans: Spans that are kept at most; and as many trajectories, fates and counts.
    """

    def __init__(self, max_spans: int) -> None:
        self.max_spans = max_spans
        self.spans: list[Span] = []
        self.trajectories: list[Trajectory] = []
        self.fates: list[FateChange] = []
        self.counts: list[Counted] = []
        self.lag = LoopLag(self.span_of)
        self._begin_ns = clock.now_ns()
        self._end_ns = 0
        self._threads: dict[int | None, int | None] = {}
        self._spans_left_out = 0
        self._trajectories_left_out = 0

    def add_span(self, span: Span) -> None:
        """Keep a span that begins."""
        facts = span.facts
        if facts:
            _shorten(facts)
        spans = self.spans
        if len(spans) < self.max_spans:
            spans.append(span)
        else:
            self._spans_left_out += 1

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Keep a trajectory that begins, or was open when recording began."""
        _shorten(trajectory.facts)
        if len(self.trajectories) < self.max_spans:
            self.trajectories.append(trajectory)
        else:
            self._trajectories_left_out += 1
        loop = trajectory.running_loop
        if loop is not None and trajectory.thread == threading.get_ident() and loop.is_running():
            trajectory.loop = self.lag.measure(loop)

    def span_of(self, task: object) -> Span | None:
        """Return the innermost open span of a task; another thread asks while the task blocks its loop."""
        for span in reversed(self.spans[-20_000:]):
            if span.task is task and not span.end_ns:
                return span
        return None

    def end(self) -> None:
        """Note the end of recording; what is still open has no end in the records."""
        self._end_ns = clock.now_ns()
        self.lag.end()
        self._threads = {thread.ident: thread.native_id for thread in threading.enumerate()}

    def close(self, lane: str) -> TrajectoryLog:
        """Return the records of a log that has ended, and let go of them; any thread may do so, once.

        Args:
            lane: Lane of the process.
        """
        spans, self.spans = self.spans, []
        trajectories, self.trajectories = self.trajectories, []
        numbers_of = {id(found): number for number, found in enumerate([*trajectories, *spans])}
        first = len(trajectories)
        return TrajectoryLog(
            lane=lane,
            begin_ns=self._begin_ns,
            end_ns=self._end_ns,
            loops=self.lag.loops(),
            trajectories=[self._trajectory(number, found) for number, found in enumerate(trajectories)],
            spans=[self._span(number, found, numbers_of, first) for number, found in enumerate(spans)],
            lags=self.lag.lags,
            blocks=[
                Block(*seen[:3], numbers_of.get(id(seen.span), first + NO_SPAN) - first, *seen[4:])
                for seen in self.lag.blocks
            ],
            fates=self.fates,
            counts=self.counts,
            spans_left_out=self._spans_left_out,
            trajectories_left_out=self._trajectories_left_out,
        )

    def _trajectory(self, number: int, found: Trajectory) -> TrajectoryRecord:
        ended = 0 < found.end_ns <= self._end_ns
        return TrajectoryRecord(
            number,
            _text(found.group),
            found.sample if isinstance(found.sample, int | None) else _text(found.sample),
            found.begin_ns,
            found.end_ns if ended else self._end_ns,
            (_text(found.fate) or "done") if ended else "running",
            self.lag.number(found.running_loop),
            _text(found.error),
            _facts(found.facts),
        )

    def _span(self, number: int, found: Span, numbers_of: Mapping[int, int], first: int) -> SpanRecord:
        owner, around = found.trajectory, found.parent
        limit_ns = self._end_ns
        if owner is not None and owner.end_ns:
            limit_ns = min(limit_ns, owner.end_ns)
        ended = 0 < found.end_ns <= limit_ns
        while around is not None and around is not owner and id(around) not in numbers_of:
            around = around.parent
        return SpanRecord(
            number,
            NO_SPAN if owner is None else numbers_of.get(id(owner), NO_SPAN),
            NO_SPAN if around is None or around is owner else numbers_of[id(around)] - first,
            _text(found.name),
            found.begin_ns,
            found.end_ns if ended else max(limit_ns, found.begin_ns),
            self._threads.get(found.thread) or found.thread,
            NO_SPAN if found.loop is None else found.loop.number,
            found.failed and ended,
            _text(found.request),
            _facts(found.facts),
            not ended,
        )


def _shorten(facts: dict[str, Any]) -> None:
    """Keep no prompt in memory that somebody passes as a fact."""
    for name, value in facts.items():
        if type(value) is str and len(value) > _LONGEST_TEXT:
            facts[name] = value[:_LONGEST_TEXT]


def _facts(facts: Mapping[str, Any]) -> dict[str, Fact]:
    return {_text(name): _fact(value) for name, value in list(facts.items())[:_MOST_FACTS]}


def _fact(value: Any) -> Fact:
    """Return a value that JSON has; of anything else, its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    try:
        if isinstance(value, numbers.Integral):
            return int(value) if abs(int(value)) < 1 << 63 else str(int(value))
        if isinstance(value, numbers.Real):
            return float(value)
    except Exception:
        return type(value).__name__
    return _text(value)


def _text(value: object) -> str:
    """Return a short text that can be written as UTF-8."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:
        text = type(value).__name__
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
