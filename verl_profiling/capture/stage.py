"""Stages: named spans, as context manager and decorator, for sync and async code.

A :class:`Stage` has no state, so one object per name serves every call, thread and task. The open
stages are in a context variable, so each thread and each asyncio task has its own nesting.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from threading import get_ident
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import msgspec

from verl_profiling import clock
from verl_profiling.manifest import StageSpan

logger = logging.getLogger(__name__)

MAX_SPANS = 20_000
LONG_NS = 1_000_000
F = TypeVar("F", bound=Callable[..., Any])


class StageSink(Protocol):
    """Receives stages while something records."""

    def begin(self, name: str) -> object:
        """Begin a stage on this thread or task."""

    def end(self, name: str, failed: bool) -> object:
        """End the innermost open stage of this name."""


@dataclass(eq=False, slots=True)
class Both:
    """Passes stages on to the log of a capture and to the watch.

    The watch's stage does not contain the time that a tool takes to start or stop.
    """

    _log: StageSink
    _sums: StageSink

    def begin(self, name: str) -> None:
        """Begin a stage on this thread or task."""
        self._log.begin(name)
        self._sums.begin(name)

    def end(self, name: str, failed: bool) -> None:
        """End the innermost open stage of this name."""
        self._sums.end(name, failed)
        self._log.end(name, failed)


class StageSource(Protocol):
    """The owner of stages."""

    @property
    def sink(self) -> StageSink | None:
        """The receiver of its stages; ``None`` whenever nothing records."""


class Stage:
    """A named part of a step. Costs less than ``contextlib.nullcontext()`` when nothing records.

    Args:
        source: Its owner.
        name: Its name.

    Raises:
        TypeError: The name is not text.
        ValueError: The name is empty, or cannot be written as UTF-8.
    """

    __slots__ = ("_source", "name")

    def __init__(self, source: StageSource, name: str) -> None:
        self._source = source
        self.name = _checked_name(name)

    def __enter__(self) -> None:
        sink = self._source.sink
        if sink is not None:
            sink.begin(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sink = self._source.sink
        if sink is not None:
            sink.end(self.name, kind is not None)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; its return value and attributes are kept.

        Raises:
            TypeError: For a generator function, whose body runs after it has returned.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"stage({self.name!r}) cannot decorate the generator function {function.__qualname__}: "
                "write `with stage(...)` inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_stage(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", async_stage)

        @functools.wraps(function)
        def sync_stage(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", sync_stage)

    def __repr__(self) -> str:
        return f"stage({self.name!r})"


def _checked_name(name: object) -> str:
    """Return a stage's name as plain text; a name that cannot be recorded is refused at once."""
    if isinstance(name, str):
        if not name.strip():
            raise ValueError(f'stage({str(name)!r}): the name is empty; write stage("update_actor")')
        try:
            return name.encode().decode()
        except UnicodeEncodeError as error:
            raise ValueError(f"stage({str(name)!r}): the name cannot be written as UTF-8") from error
    if callable(name):
        function = getattr(name, "__name__", type(name).__name__)
        raise TypeError(
            f'stage() was given {function} instead of a name; write @stage("{function}") above a function'
        )
    raise TypeError(f"stage() was given {type(name).__name__} instead of a name; a stage's name is text")


class OpenSpan(msgspec.Struct, eq=False, gc=False):
    """A stage that has begun. ``end_ns`` is 0 until it has ended.

    ``parent`` is the span around it, even one of another log: a loop and its worker may share a
    process. The garbage collector does not track spans, so that thousands of them do not make it
    run; :meth:`SpanLog.close` breaks the reference cycle of a log and its spans.
    """

    log: SpanLog
    parent: OpenSpan | None
    name: str
    thread: int
    begin_ns: int
    mark: object = None
    end_ns: int = 0
    failed: bool = False

    def depth(self) -> int:
        """Return the number of spans of the same log around it."""
        depth, outer = 0, self.parent
        while outer is not None:
            depth += outer.log is self.log
            outer = outer.parent
        return depth


_innermost: ContextVar[OpenSpan | None] = ContextVar("verl_profiling_innermost_stage", default=None)
"""The span that began last in this thread or task; if it has ended, the innermost span is around it."""


@dataclass(eq=False)
class SpanLog:
    """The spans of one capture. Written for speed: one object and no lock per span.

    Only the first ``MAX_SPANS`` are kept, so that a stage inside a hot loop does not fill the memory.

    Attributes:
        begin_mark: Called with the name when a span begins, to show it in an artifact.
        end_mark: Called with what ``begin_mark`` returned when the span ends.
        long_stage_ended: Called with the name when an outermost span ends that took at least
            ``LONG_NS``. For a shorter one, a system call would cost more than the span itself.
    """

    begin_mark: Callable[[str], object] | None = None
    end_mark: Callable[[Any], object] | None = None
    long_stage_ended: Callable[[str], object] | None = None
    _left_out: int = 0
    _marks_failed: str = ""
    _spans: list[OpenSpan] = field(default_factory=list)

    def begin(self, name: str) -> OpenSpan:
        """Open a span."""
        parent = _innermost.get()
        while parent is not None and parent.end_ns:
            parent = parent.parent
        begin_ns = clock.now_ns()
        begin_mark = self.begin_mark
        try:
            mark = None if begin_mark is None else begin_mark(name)
        except Exception as error:
            mark = None
            self._mark_nothing_more(error)
        span = OpenSpan(self, parent, name, get_ident(), begin_ns, mark)
        spans = self._spans
        if len(spans) < MAX_SPANS:
            spans.append(span)
        else:
            self._left_out += 1
        _innermost.set(span)
        return span

    def end(self, name: str, failed: bool) -> OpenSpan | None:
        """Close the innermost open span of that name; a stage entered before the capture has none.

        Spans inside it that are still open (timers, when user code raised) end with it, as failed.
        """
        span = _innermost.get()
        while span is not None and span.end_ns:
            span = span.parent
        if span is not None and span.log is self and span.name == name:
            if failed or span.mark is not None:
                self._end(span, failed)
                return span
            span.end_ns = end_ns = clock.now_ns()  # the common case, inlined to save a call
            if end_ns - span.begin_ns >= LONG_NS:
                self._notice_long(span)
            return span
        while span is not None and (span.log is not self or span.name != name or span.end_ns):
            span = span.parent
        if span is not None:
            self.end_span(span, failed)
        return span

    def end_span(self, span: OpenSpan, failed: bool) -> None:
        """Close a span, which may have begun in another task or thread."""
        inside = []
        inner = _innermost.get()
        while inner is not None and inner is not span:
            inside.append(inner)
            inner = inner.parent
        if inner is span:
            for inner in inside:
                if inner.log is self and not inner.end_ns:
                    self._end(inner, failed=True)
            _innermost.set(span.parent)
        if not span.end_ns:
            self._end(span, failed)

    def _end(self, span: OpenSpan, failed: bool) -> None:
        if span.mark is not None:
            self._end_mark(span)
        span.end_ns = end_ns = clock.now_ns()
        if failed:
            span.failed = True
        if end_ns - span.begin_ns >= LONG_NS:
            self._notice_long(span)

    def _notice_long(self, span: OpenSpan) -> None:
        if self.long_stage_ended is not None and not span.depth():
            self.long_stage_ended(span.name)

    def _end_mark(self, span: OpenSpan) -> None:
        mark, span.mark = span.mark, None
        if self.end_mark is not None:
            try:
                self.end_mark(mark)
            except Exception as error:
                self._mark_nothing_more(error)

    def _mark_nothing_more(self, error: Exception) -> None:
        """Keep a tool's error out of user code: log it once, and note it."""
        self.begin_mark = self.end_mark = None
        problem = f"{type(error).__name__}: {error}"
        self._marks_failed = f"a tool could not show a stage in its artifact and shows no others: {problem}"
        logger.error("%s", self._marks_failed)

    def stop_marking(self) -> None:
        """End the open marks of this thread; those of other threads stay open."""
        here, self.begin_mark = get_ident(), None
        for span in reversed(self._spans):
            if not span.end_ns and span.thread == here and span.mark is not None:
                self._end_mark(span)
        self.end_mark = None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record a ``with`` block as a span; it may end in another task or thread."""
        span, failed = self.begin(name), True
        try:
            yield
            failed = False
        finally:
            self.end_span(span, failed)

    def so_far(self) -> list[StageSpan]:
        """Return all spans in order of their begin; open spans end now in the returned list."""
        now_ns = clock.now_ns()
        native_ids: dict[int | None, int | None] = {}
        for thread in threading.enumerate():
            native_ids[thread.ident] = thread.native_id
        found = []
        for span in self._spans:
            end_ns, thread_id = span.end_ns or now_ns, native_ids.get(span.thread) or span.thread
            found.append(StageSpan(span.name, span.begin_ns, end_ns, thread_id, span.depth(), span.failed))
        return sorted(found, key=attrgetter("begin_ns", "depth"))

    def close(self) -> list[StageSpan]:
        """Close open spans as failed, and return all spans in order of their begin."""
        closed_ns = clock.now_ns()
        self.long_stage_ended = None
        for span in self._spans:
            if not span.end_ns:
                span.end_ns = closed_ns
                span.failed = True
        found, self._spans = self.so_far(), []
        return found

    def notes(self) -> list[str]:
        """Return notes for the user on the spans."""
        notes = [self._marks_failed] if self._marks_failed else []
        if self._left_out:
            text = f"{self._left_out} stages after the first {MAX_SPANS} were left out; is one in a hot loop?"
            notes.append(text)
        return notes
