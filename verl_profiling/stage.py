"""Stages: named spans, as context manager and decorator, for sync and async code.

A :class:`Stage` holds no state of its own, so one object per name serves every call,
thread and task. What is open is kept in a context variable: each thread and each asyncio
task has its own nesting.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from verl_profiling import clock
from verl_profiling.manifest import StageSpan

__all__ = ["OpenSpan", "SpanLog", "Stage", "StageSink", "StageSource"]

F = TypeVar("F", bound=Callable[..., Any])


class StageSink(Protocol):
    """What takes note of stages while something records."""

    def begin(self, name: str) -> None:
        """Note that a stage begins on this thread or task."""

    def end(self, name: str, failed: bool) -> None:
        """Note that it ends."""


class StageSource(Protocol):
    """Owner of stages."""

    @property
    def sink(self) -> StageSink | None:
        """Where stages go; ``None`` whenever nothing records."""


class Stage:
    """A named part of a step. Costs less than ``contextlib.nullcontext()`` when nothing records."""

    __slots__ = ("_source", "name")

    def __init__(self, source: StageSource, name: str) -> None:
        self._source = source
        self.name = name

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


class OpenSpan:
    """A stage that has begun and not ended."""

    __slots__ = ("begin_ns", "depth", "log", "name", "parent", "range", "thread")

    def __init__(
        self, log: SpanLog, name: str, parent: OpenSpan | None, range: AbstractContextManager[object] | None
    ) -> None:
        self.log = log
        self.name = name
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.range = range
        self.thread = threading.get_native_id()
        self.begin_ns = clock.now_ns()


_innermost: ContextVar[OpenSpan | None] = ContextVar("verl_profiling_innermost_stage", default=None)


class SpanLog:
    """The spans of one capture, in order of their begin once :meth:`close` has sorted them."""

    def __init__(self) -> None:
        self._closed: list[StageSpan] = []
        self._open: dict[int, OpenSpan] = {}

    def innermost(self) -> OpenSpan | None:
        """Return the innermost open span of this thread or task."""
        span = _innermost.get()
        return span if span is not None and span.log is self else None

    def begin(self, name: str, range: AbstractContextManager[object] | None = None) -> OpenSpan:
        """Open a span; ``range`` is entered with it and left with it."""
        span = OpenSpan(self, name, self.innermost(), range)
        self._open[id(span)] = span
        _innermost.set(span)
        if range is not None:
            range.__enter__()
        return span

    def end(self, name: str, failed: bool) -> OpenSpan | None:
        """Close the innermost span if it bears that name; a stage entered before the capture does not."""
        span = self.innermost()
        if span is None or span.name != name or self._open.pop(id(span), None) is None:
            return None
        if span.range is not None:
            span.range.__exit__(None, None, None)
        self._closed.append(
            StageSpan(span.name, span.begin_ns, clock.now_ns(), span.thread, span.depth, failed)
        )
        _innermost.set(span.parent)
        return span

    def close(self) -> list[StageSpan]:
        """Close what is still open, as failed, and return all spans in order of their begin.

        Ranges of this thread are left as well; those of other threads belong to their threads.
        """
        here = threading.get_native_id()
        while self._open:
            _, span = self._open.popitem()
            if span.range is not None and span.thread == here:
                span.range.__exit__(None, None, None)
            self._closed.append(
                StageSpan(span.name, span.begin_ns, clock.now_ns(), span.thread, span.depth, True)
            )
        return sorted(self._closed, key=lambda span: (span.begin_ns, span.depth))
