"""Trajectories and their spans, as context managers for threads and asyncio tasks.

The innermost open span is in a context variable: each task has its own, and
:func:`asyncio.to_thread` passes it to the thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import traceback
from asyncio import _get_running_loop, current_task
from collections import deque
from contextvars import ContextVar
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import msgspec

from verl_profiling import clock
from verl_profiling.files.trajectory_log import Counted
from verl_profiling.manifest import StatusChange
from verl_profiling.trajectories.loop_lag import LoopState

if TYPE_CHECKING:
    from typing_extensions import Self

_log: Any = None
_totals: Any = None
_kept = False
"""Whether :func:`trajectory` makes real trajectories, also before a capture begins."""
_open: dict[int, Span] = {}


TRAJECTORY: Final = "trajectory"
"""Name of all trajectories in the span totals of the watch."""
FAILED: Final = "failed"
LEFT: Final = ("cancelled", "abandoned")
"""Statuses of a span that was left early without a failure."""
later_statuses: Final = deque[StatusChange](maxlen=16_384)
"""The last statuses that were set after the end of trajectories, in this process."""
_MOST_COUNTED: Final = 1 << 53  # largest value of a counter, which the timeline draws as a float
_MOST_TOKENS: Final = 1 << 40


class Span(msgspec.Struct, eq=False, gc=False):
    """A named part of a trajectory; made by :func:`span`.

    The garbage collector does not track spans, so that thousands of spans do not trigger it.

    Attributes:
        name: Name of the span.
        request: The engine's id of the awaited request; may be set while the span is open.
        facts: Named values that user code passes, e.g. ``turns``; see :meth:`add`.
        parent: The span around this span, if any.
        begin_ns: Begin of the span (unix ns); 0 before.
        end_ns: End of the span (unix ns); 0 before.
        thread: Python's id of the thread in which the span began.
        loop: Measurement of the event loop in which the span began, if the loop's lag is measured.
        task: The asyncio task in which the span began, until its end; ``None`` if unmeasured.
        status: ``failed``, ``cancelled`` or ``abandoned`` after an exception; else empty.
    """

    name: str
    request: str
    facts: dict[str, Any]
    parent: Span | None = None
    begin_ns: int = 0
    end_ns: int = 0
    thread: int = 0
    loop: LoopState | None = None
    task: Any = None
    status: str = ""

    @property
    def trajectory(self) -> Trajectory | None:
        """The innermost trajectory around the span."""
        node: Span | None = self
        while node is not None and not isinstance(node, Trajectory):
            node = node.parent
        return node

    def add(self, /, **facts: Any) -> None:
        """Add facts, e.g. ``turns=3, response_tokens=512``; a later value replaces an earlier."""
        self.facts.update(facts)

    def __enter__(self) -> Self:
        log = _log
        self.thread = thread = get_ident()
        measured = None
        parent = _current.get()
        while parent is not None and parent.end_ns:
            parent = parent.parent
        if parent is not None:
            self.parent = parent
            if parent.thread == thread:
                measured = parent.loop
        if log is not None and (measured is None or measured.ended):
            running = _get_running_loop()  # takes longer than all the rest, up to Python 3.11
            measured = None if running is None else log.lag.measure(running)
        _current.set(self)
        _open[id(self)] = self
        self.begin_ns = begin_ns = clock.now_ns()
        if log is None:
            return self
        log.add(self)
        if measured is not None:
            self.loop = measured
            self.task = current_task(measured.loop)
            measured.span_ns = begin_ns
            if begin_ns > measured.next_ns:
                measured.ask(begin_ns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self.begin_ns and not self.end_ns:
            self.end_ns = end_ns = clock.now_ns()
            _open.pop(id(self), None)
            self.task = None
            measured = self.loop
            if measured is not None:
                measured.span_ns = end_ns
                if end_ns > measured.next_ns and _get_running_loop() is measured.loop:
                    measured.ask(end_ns)
            if kind is not None and not self.status:
                self.status = _status(kind)
            if _current.get() is self:
                _current.set(self.parent)
            else:
                _leave(self)
            # a trajectory that was cancelled, e.g. as training ends, made no sample
            if _totals is not None and not (self.name is TRAJECTORY and self.status in LEFT):
                tokens = _tokens(self.facts) if self.facts else 0
                _totals.add(self.name, self.begin_ns, end_ns, self.status == FAILED, tokens)

    async def __aenter__(self) -> Self:  # awaits nothing, so that no other task runs
        return self.__enter__()

    async def __aexit__(self, *exception: Any) -> None:
        self.__exit__(*exception)


class Trajectory(Span, gc=True):
    """One rollout of one prompt, from its dispatch to its response; made by :func:`trajectory`.

    Attributes:
        group: Id that all samples of the prompt share.
        sample: Index or id of this sample.
        error: The exception that ended the trajectory, in one line; else empty.
        running_loop: The event loop in which the trajectory began, if any.
        status: Outcome of the trajectory, by default ``done``; may be set, e.g. to ``aborted``.
    """

    group: object = ""
    sample: int | str | None = None
    error: str = ""
    running_loop: Any = None

    def __enter__(self) -> Self:
        self.running_loop = _get_running_loop()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        said = self.status
        is_first = self.begin_ns and not self.end_ns
        super().__exit__(kind, error, trace)
        if is_first and _totals is not None:
            _totals.ended.append(self)
        if kind is not None and not said and self.status == FAILED:
            # Lines of code (of a SyntaxError) are indented; then come the error and its notes.
            lines = traceback.format_exception_only(kind, error)
            self.error = next(line for line in lines if not line.startswith(" ")).strip()


class _Idle(Trajectory):
    """The result of :func:`span` and :func:`trajectory` without a recording,
    which keeps nothing.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def add(self, /, **facts: Any) -> None:
        pass


_current: ContextVar[Span | None] = ContextVar("verl_profiling_innermost_span", default=None)
"""The span that began last in this thread or task; after its end,
the open span is one of its parents.
"""
_IDLE: Final = _Idle("", "", {})


def trajectory(group: object = "", sample: int | str | None = None, **facts: Any) -> Trajectory:
    """Return a trajectory, to be used with ``with`` or ``async with``.

    ``async with trajectory(group=uid, sample=3) as t: ...``. Spans inside belong to the trajectory:
    in its task, in tasks that it starts, and in ``asyncio.to_thread``. For an executor of your own,
    submit ``contextvars.copy_context().run``. The status is ``failed`` after an exception and
    ``cancelled`` after a cancellation; both propagate.

    Args:
        group: An id that all samples of the prompt share.
        sample: Index or id of this sample.
        **facts: Numbers, texts and truth values to keep. The report uses ``validate``, ``turns``,
            ``tool_calls``, ``prompt_tokens``, ``response_tokens``, ``reward``, ``task``,
            ``environment``, and the policy versions ``min_version`` and ``max_version``.
    """
    return Trajectory(TRAJECTORY, "", facts, group=group, sample=sample) if _kept else _IDLE


def span(name: str, /, request: str = "", **facts: Any) -> Span:
    """Return a named part of a trajectory or process, to be used with ``with`` or ``async with``.

    Args:
        name: ``generate``, ``tool:search``, ``environment:start``, ``reward``, ``wait:queue``, or
            your own.
        request: The engine's id of the awaited request.
        **facts: Numbers, texts and truth values to keep.
    """
    return _IDLE if _log is None and _totals is None else Span(name, request, facts)


def trajectory_status(group: object, status: str, sample: int | str | None = None) -> None:
    """Set the status of ended trajectories, e.g. of a group that dynamic sampling has filtered out.

    Args:
        group: The id that was given to :func:`trajectory` as ``group``.
        status: ``filtered``, ``aborted``, ``abandoned``, or your own word.
        sample: The id of one sample; ``None`` for all samples of the group.
    """
    later_statuses.append(StatusChange(str(group), sample, status, clock.now_ns()))


def count(name: str, value: int | float) -> None:
    """Record the current value of a counter, e.g. the length of a queue.

    The timeline draws it over time, and the watch shows the last value.

    Args:
        name: Name of the counter.
        value: Value of the counter from now on, below 2**53; other values are left out.
    """
    if _log is None and _totals is None:
        return
    try:
        value = value if isinstance(value, int) else float(value)  # of NumPy or torch
    except Exception:  # as with odd facts, the loop goes on
        return
    if not abs(value) < _MOST_COUNTED:
        return
    if _log is not None and len(_log.counts) < _log.max_spans:
        _log.counts.append(Counted(str(name), clock.now_ns(), value))
    if _totals is not None:
        _totals.count(str(name), value)


def current_span() -> Span | None:
    """Return the innermost open span or trajectory of this task or thread, or ``None``."""
    node = _current.get()
    while node is not None and node.end_ns:
        node = node.parent
    return node


def current_trajectory() -> Trajectory | None:
    """Return the innermost open trajectory of this task or thread, or ``None``."""
    node = current_span()
    return node.trajectory if node is not None else None


def open_spans() -> list[Span]:
    """Return the open trajectories and spans of this process, in any thread or task; spans that
    began while nothing was recorded are unknown.
    """
    return [*_open.values()]


def keep_trajectories() -> None:
    """Remember open trajectories of this process from now on,
    so that a later capture includes them.
    """
    global _kept
    _kept = True


def start_log(log: Any) -> None:
    """Record spans and trajectories into a log from now on, including open ones.

    Args:
        log: A :class:`~verl_profiling.tools.trajectories.OpenLog`.
    """
    global _log
    keep_trajectories()
    for running in open_spans():
        running.loop = None
        log.add(running)
    _log = log


def stop_log(log: Any) -> None:
    """Stop recording into a log, if it is the current one."""
    global _log
    if _log is log:
        _log = None


def total_spans(totals: Any) -> None:
    """From now on, add each ended span and trajectory of this process to totals of the watch.

    Args:
        totals: A :class:`~verl_profiling.watch.process_sums.SpanSums`; ``None`` ends this.
    """
    global _totals
    if totals is not None:
        keep_trajectories()
    _totals = totals


def _forget() -> None:
    """Stop recording in a forked child; the parent process continues."""
    global _log
    _log = None
    _open.clear()
    total_spans(None)


os.register_at_fork(after_in_child=_forget)


def _leave(ended: Span) -> None:
    """Make the parent of an ended span the innermost open span,
    even if spans inside are still open.
    """
    node = _current.get()
    while node is not None and node is not ended:
        node = node.parent
    if node is ended:
        _current.set(ended.parent)


def _tokens(facts: dict[str, Any]) -> int:
    """Return the tokens of prompt and response among the facts of a span."""
    tokens = 0
    for name in ("prompt_tokens", "response_tokens"):
        value = facts.get(name)
        if type(value) is int and 0 < value < _MOST_TOKENS:
            tokens += value
    return tokens


def _status(kind: type[BaseException]) -> str:
    """Return the status after an exception: neither a cancellation nor
    a closed stream is a failure.
    """
    if issubclass(kind, asyncio.CancelledError | concurrent.futures.CancelledError):
        return "cancelled"
    return "abandoned" if issubclass(kind, GeneratorExit) else FAILED
