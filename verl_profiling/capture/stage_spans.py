"""Stages: named spans, as context manager and decorator, for sync and async code.

A :class:`Stage` has no state, so one object per name serves every call, thread and task. The open
stages are in a context variable, so each thread and each asyncio task has its own nesting.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from threading import get_ident, get_native_id
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from verl_profiling import clock
from verl_profiling.capture.compiled_stages import (
    begin_in_graph,
    end_in_graph,
    replace_in_graphs,
)
from verl_profiling.capture.work import work_from
from verl_profiling.manifest import GC, WEIGHT_SYNC, StageSpan, Work
from verl_profiling.watch.process_recorder import note_failure
from verl_profiling.watch.process_sums import Begun, SpanSums, StageSums

logger = logging.getLogger(__name__)

MAX_SPANS = 20_000  # of a capture; further stages are only counted
LONG_NS = 1_000_000
PAUSE_NS = 10_000_000
F = TypeVar("F", bound=Callable[..., Any])


class StageSink(Protocol):
    """An object that receives the begin and the end of each stage while something is recorded."""

    def begin(self, name: str) -> object:
        """Begin a stage on this thread or task."""

    def end(self, name: str, failed: bool) -> object:
        """End the innermost open stage of this name."""


class StageSource(Protocol):
    """The owner of stages: the session of a worker's process, or the loop of a callback."""

    @property
    def sink(self) -> StageSink | None:
        """The receiver of the source's stages; ``None`` whenever nothing is recorded."""


class Stage:
    """A named part of a step. Without a recording, a stage costs less than
    ``contextlib.nullcontext()``.

    Args:
        source: Owner of the stage; its ``sink`` receives begin and end.
        name: Name of the stage.

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
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        sink = self._source.sink
        if sink is not None:
            if error is not None:
                note_failure(error, self.name)
            sink.end(self.name, kind is not None)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *exception: Any) -> None:
        self.__exit__(*exception)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; its return value and attributes are kept.

        Raises:
            TypeError: The function is a generator function, whose body runs after the call.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"stage({self.name!r}) cannot decorate the generator function "
                f"{function.__qualname__}: write `with stage(...)` inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_stage(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", async_stage)

        begin, end = Stage.__enter__, Stage.__exit__

        # Not `with self`: torch.compile up to 2.13 enters no context manager that exists before the
        # call.
        @functools.wraps(function)
        def sync_stage(*args: Any, **kwargs: Any) -> Any:
            begin(self)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                end(self, type(error), error)
                raise
            end(self)
            return result

        return cast("F", sync_stage)

    def given(
        self,
        *,
        lengths: Iterable[int] | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        tokens_squared: int | None = None,
        micro_batches: int | None = None,
        advantages: Iterable[float] | None = None,
        masks: Iterable[float] | None = None,
        reasons: Iterable[str] | None = None,
        tasks: Iterable[str] | None = None,
    ) -> Stage:
        """Return the stage for one block with a known amount of work.

        ``with stage("update_actor").given(tokens=512):``. Values that cannot be right are left out,
        and logged once. Nothing is computed unless the stage is recorded.

        Args:
            lengths: Lengths of the sequences, from which samples, tokens and squares follow.
            samples: Number of sequences.
            tokens: Sum of their lengths.
            tokens_squared: Sum of their squared lengths.
            micro_batches: Number of micro-batches.
            advantages: A number for each sequence; zero if it has no advantage, as all rewards of
                its group are equal.
            masks: Number of tokens of each sequence that count in the loss.
            reasons: Why nothing is learned from each sequence, e.g. ``truncated`` or ``stale``;
                empty if something is.
            tasks: Task or environment of each sequence.
        """
        facts = {
            "samples": samples,
            "tokens": tokens,
            "tokens_squared": tokens_squared,
            "micro_batches": micro_batches,
            "masks": masks,
            "advantages": advantages,
            "reasons": reasons,
            "tasks": tasks,
        }
        return _StageWithWork(self._source, self.name, facts, lengths)

    def __repr__(self) -> str:
        return f"stage({self.name!r})"


class _StageWithWork(Stage):
    """A stage for one ``with`` block, with the amount of work in it."""

    __slots__ = ("_facts", "_lengths")

    def __init__(
        self,
        source: StageSource,
        name: str,
        facts: Mapping[str, object],
        lengths: Iterable[object] | None,
    ) -> None:
        super().__init__(source, name)
        self._facts = facts
        self._lengths = lengths

    def __enter__(self) -> None:
        sink = self._source.sink
        if sink is not None:
            begun = sink.begin(self.name)
            if isinstance(begun, OpenStage):
                begun.given = work_from(self.name, self._facts, self._lengths)
                _set_work(begun, begun.given)


replace_in_graphs(Stage.__enter__, begin_in_graph)
replace_in_graphs(Stage.__exit__, end_in_graph)


def _checked_name(name: object) -> str:
    """Return the name of a stage as plain text; refuse names that cannot be recorded."""
    if isinstance(name, str):
        if not name.strip():
            raise ValueError(
                f'stage({str(name)!r}): the name is empty; write stage("update_actor")'
            )
        try:
            return name.encode().decode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"stage({str(name)!r}): the name cannot be written as UTF-8"
            ) from error
    if callable(name):
        function = getattr(name, "__name__", type(name).__name__)
        raise TypeError(
            f'stage() was given {function} instead of a name; write @stage("{function}") '
            "above a function"
        )
    raise TypeError(
        f"stage() was given {type(name).__name__} instead of a name; a stage's name is text"
    )


class OpenStage(Begun, eq=False, gc=False):
    """A stage that has begun, in the nesting of its thread or task. ``end_ns`` is 0 until it has
    ended.

    ``parent`` is the enclosing stage, perhaps of another source: a loop and its worker may share a
    process. ``sums`` is set if the watch counts the stage: an outermost stage, or one inside a
    weight update. ``mark`` is what ``SpanLog.begin_mark`` returned. ``given`` is the part of
    ``work`` that user code passed.

    The garbage collector does not track stages, so that thousands of them do not trigger it;
    :meth:`SpanLog.close` breaks the cycle of a log and its stages.
    """

    log: SpanLog
    parent: OpenStage | None
    thread: int = 0
    sums: StageSums | SpanSums | None = None
    mark: object = None
    end_ns: int = 0
    failed: bool = False
    work: Work | None = None
    given: Work | None = None
    bytes: int = 0

    def depth(self) -> int:
        """Return the number of enclosing stages in the same log."""
        depth = 0
        outer = self.parent
        while outer is not None:
            depth += outer.log is self.log
            outer = outer.parent
        return depth

    def end(self, failed: bool = False) -> None:
        """End the stage, which may have begun in another task or thread.

        Open stages inside this stage (timers, when user code raised) end with it, as failed.
        """
        inside = []
        inner = _innermost.get()
        while inner is not None and inner is not self:
            inside.append(inner)
            inner = inner.parent
        if inner is None:
            inside = []
        else:
            _innermost.set(self.parent)
        for stage in (*inside, self):
            log = stage.log
            if stage.end_ns or log.source is not self.log.source:
                continue
            if stage.mark is not None:
                log.end_mark_of(stage)
            stage.end_ns = end_ns = clock.now_ns()
            stage.failed = failed or stage is not self
            if stage.sums is not None:
                stage.sums.end(stage, end_ns)
            if end_ns - stage.begin_ns >= LONG_NS and log.long_stage_ended is not None:
                log.long_stage_ended(stage)


_innermost: ContextVar[OpenStage | None] = ContextVar(
    "verl_profiling_innermost_stage", default=None
)
"""The stage that began last in this thread or task; after its end,
the open stage is one of its parents.
"""


def add_work(facts: Mapping[str, object], lengths: Iterable[object]) -> None:
    """Add an amount of work to all open stages of this thread or task, in which it is done.

    Numbers that user code passed for a stage stand as they are.

    Args:
        facts: Facts by name, e.g. ``{"tokens": 512}``, as of :meth:`Stage.given`.
        lengths: Lengths of the sequences.
    """
    stage = _innermost.get()
    work = None if stage is None else work_from(stage.name, facts, lengths)
    while stage is not None and work is not None:
        if not stage.end_ns:
            added = None if stage.work is stage.given else stage.work
            total = work if added is None else added + work
            _set_work(stage, total if stage.given is None else total.replaced_by(stage.given))
        stage = stage.parent


def _set_work(stage: OpenStage, work: Work | None) -> None:
    """Set the amount of work of a stage; the watch's list of outermost stages has it once."""
    is_first = stage.work is None
    stage.work = work
    if is_first and work is not None and isinstance(stage.sums, StageSums):
        stage.sums.given.append(stage)


@dataclass(eq=False, slots=True)
class SpanLog:
    """Receives the stages of a loop or its worker, for one capture, for the watch, or for both.

    A ``StageSink``, written for speed: one object and no lock per stage.

    Attributes:
        source: The owner of the stages. A stage may end in a later log of the same owner.
        sums: The watch's totals per stage, which receive the outermost stages; ``None`` if it is
            off.
        spans: The first ``MAX_SPANS`` stages of a capture, to bound the memory; ``None`` without a
            capture.
        pauses: Pauses of the process during a capture; see :func:`record_pauses`.
        since_ns: Earliest begin of a stage in the capture; 0 for any.
        begin_mark: Called with the name when a stage begins, to show it in an artifact.
        end_mark: Called at the end of the stage with the value that ``begin_mark`` returned.
        long_stage_ended: Called with each ended stage of at least ``LONG_NS``. For shorter stages,
            a system call would cost more than the stage.
    """

    source: object
    sums: StageSums | None = None
    spans: list[OpenStage] | None = field(default_factory=list)
    begin_mark: Callable[[str], object] | None = None
    end_mark: Callable[[Any], object] | None = None
    long_stage_ended: Callable[[OpenStage], object] | None = None
    pauses: list[StageSpan] = field(default_factory=list)
    since_ns: int = 0
    _left_out: int = 0
    _marks_failed: str = ""

    def begin(self, name: str) -> OpenStage:
        """Begin a stage on this thread or task."""
        parent = _innermost.get()
        while parent is not None and parent.end_ns:
            parent = parent.parent
        spans = self.spans
        if spans is None:
            stage = OpenStage(name, clock.now_ns(), self, parent)
        else:
            stage = OpenStage(name, clock.now_ns(), self, parent, get_ident())
            begin_mark = self.begin_mark
            if begin_mark is not None:
                try:
                    stage.mark = begin_mark(name)
                except Exception as error:
                    self._mark_nothing_more(error)
            if len(spans) < MAX_SPANS:
                spans.append(stage)
            else:
                self._left_out += 1
        _innermost.set(stage)
        sums = self.sums
        if sums is not None:
            while parent is not None and (parent.log.sums is not sums or parent.end_ns):
                parent = parent.parent
            if parent is None:
                stage.sums = sums
                sums.open[id(stage)] = stage
                if sums.memory.last:
                    sums.memory.begins(stage)
            elif parent.name == WEIGHT_SYNC != name:
                stage.sums = sums.spans
        return stage

    def take_over(self, sums: StageSums, begin_ns: int) -> None:
        """Record the stages of other tasks and threads that are open as a capture begins.

        For example, the rollout of an asynchronous loop began in the step before. Stages around the
        loop itself are left out, because the stages inside them are the outermost ones of the step.

        Args:
            sums: The watch's totals, which know the open stages.
            begin_ns: Begin of the capture, from which these stages count.
        """
        if self.since_ns or self.spans is None:
            return
        self.since_ns = begin_ns
        around = set()
        outer = _innermost.get()
        while outer is not None:
            around.add(id(outer))
            outer = outer.parent
        begun = [stage for stage in list(sums.open.values()) if isinstance(stage, OpenStage)]
        for stage in begun:
            is_of_loop = stage.log.source is self.source and stage.log is not self
            if is_of_loop and id(stage) not in around:
                self.spans.append(stage)

    def ended(self, name: str, begin_ns: int, end_ns: int, size: int = 0) -> None:
        """Record a part of a weight update that has ended, inside the stage that is open now.

        Args:
            name: Name of the part.
            begin_ns: Its begin.
            end_ns: Its end.
            size: Bytes that it moved; 0 if unknown.
        """
        if self.spans is not None and len(self.spans) >= MAX_SPANS:
            self._left_out += 1
        elif self.spans is not None:
            parent = _innermost.get()
            while parent is not None and parent.end_ns:
                parent = parent.parent
            part = OpenStage(name, begin_ns, self, parent, get_ident(), end_ns=end_ns, bytes=size)
            self.spans.append(part)
        if self.sums is not None:
            self.sums.spans.end(Begun(name, begin_ns), end_ns)

    def end(self, name: str, failed: bool) -> OpenStage | None:
        """End the innermost open stage of that name, unless its begin was not recorded."""
        stage = _innermost.get()
        while stage is not None and stage.end_ns:
            stage = stage.parent
        if stage is not None and stage.log is self and stage.name == name:
            if stage.mark is not None:  # the common case of OpenStage.end(), inlined to save a call
                self.end_mark_of(stage)
            stage.end_ns = end_ns = clock.now_ns()
            if failed:
                stage.failed = True
            if stage.sums is not None:
                stage.sums.end(stage, end_ns)
            if end_ns - stage.begin_ns >= LONG_NS and self.long_stage_ended is not None:
                self.long_stage_ended(stage)
            return stage
        while stage is not None and (
            stage.log.source is not self.source or stage.name != name or stage.end_ns
        ):
            stage = stage.parent
        if stage is not None:
            stage.end(failed)
        return stage

    def end_mark_of(self, stage: OpenStage) -> None:
        """End the range that shows a stage in the artifact of a tool."""
        mark, stage.mark = stage.mark, None
        if self.end_mark is not None:
            try:
                self.end_mark(mark)
            except Exception as error:
                self._mark_nothing_more(error)

    def _mark_nothing_more(self, error: Exception) -> None:
        """Show no further stages in artifacts after a tool's error; log and note the error."""
        self.begin_mark = self.end_mark = None
        problem = f"{type(error).__name__}: {error}"
        self._marks_failed = (
            f"a tool failed to mark a stage in its artifact, and marks no more: {problem}"
        )
        logger.error("%s", self._marks_failed)

    def stop_marking(self) -> None:
        """End this thread's ranges in the artifact, and begin no more, as the tool stops.

        Ranges of other threads stay open.
        """
        here = get_ident()
        self.begin_mark = None
        for stage in reversed(self.spans or ()):
            if not stage.end_ns and stage.thread == here and stage.mark is not None:
                self.end_mark_of(stage)
        self.end_mark = None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record a ``with`` block as a stage, which may end in another task or thread."""
        stage = self.begin(name)
        failed = True
        try:
            yield
            failed = False
        finally:
            stage.end(failed)

    def so_far(self, open_fails: bool = False) -> list[StageSpan]:
        """Return all stages in order of their begin; open stages end now in the returned list."""
        now_ns = clock.now_ns()
        native_ids = {thread.ident: thread.native_id for thread in threading.enumerate()}
        spans = []
        for stage in self.spans or ():
            end_ns = stage.end_ns or now_ns
            begin_ns = max(stage.begin_ns, min(self.since_ns, end_ns))
            failed = stage.failed or (open_fails and not stage.end_ns)
            thread_id = native_ids.get(stage.thread) or stage.thread
            span = StageSpan(
                stage.name,
                begin_ns,
                end_ns,
                thread_id,
                stage.depth(),
                failed,
                stage.work,
                stage.bytes,
            )
            spans.append(span)
        return sorted(spans, key=attrgetter("begin_ns", "depth"))

    def close(self) -> list[StageSpan]:
        """Return all stages in order of their begin, and forget them.

        Stages that are open count as failed here; the watch still sees their real end.
        """
        spans = self.so_far(open_fails=True)
        stages = self.spans or ()
        self.spans = []
        self.long_stage_ended = None
        if self.sums is None:
            for stage in stages:
                stage.end_ns = stage.end_ns or clock.now_ns()
        return spans

    def notes(self) -> list[str]:
        """Return sentences for the user on stages that no artifact shows, and on stages that were
        left out.
        """
        notes = []
        if self._marks_failed:
            notes.append(self._marks_failed)
        if self._left_out:
            notes.append(
                f"{self._left_out} stages after the first {MAX_SPANS} were left out; is one in a "
                "hot loop?"
            )
        return notes


_logs: dict[StageSource, SpanLog] = {}
"""The logs that record pauses, by owner."""
_collects_since_ns = 0


def record_pauses(source: StageSource, log: SpanLog | None) -> None:
    """Record pauses of Python's garbage collector of at least ``PAUSE_NS``, as long as any log
    records.

    Args:
        source: An owner of stages, whose log receives the pauses.
        log: The owner's log from now on; ``None`` if it records nothing.
    """
    _logs.pop(source, None)
    if log is not None:
        _logs[source] = log
    if (_collected in gc.callbacks) != bool(_logs):
        (gc.callbacks.append if _logs else gc.callbacks.remove)(_collected)


def _collected(phase: str, _: object) -> None:
    """Record the pause at the end of a collection, unless its begin was not seen."""
    global _collects_since_ns
    now_ns = clock.now_ns()
    begin_ns, _collects_since_ns = _collects_since_ns, now_ns if phase == "start" else 0
    if phase == "stop" and begin_ns and now_ns - begin_ns >= PAUSE_NS:
        logs = list(_logs.values())
        for log in logs:
            if log.spans is not None:
                log.pauses.append(StageSpan(GC, begin_ns, now_ns, get_native_id()))
        for sums in {id(log.sums): log.sums for log in logs if log.sums is not None}.values():
            sums.spans.add(GC, begin_ns, now_ns, False)


os.register_at_fork(after_in_child=_logs.clear)
