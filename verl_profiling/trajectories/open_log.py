"""The log of trajectories while it is written: bounded, and without a lock per span."""

from __future__ import annotations

import asyncio
import numbers
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from verl_profiling import clock
from verl_profiling.trajectories.loop_lag import LoopLag, LoopState
from verl_profiling.trajectories.spans import Span, Trajectory
from verl_profiling.trajectory_log import (
    NO_SPAN,
    Fact,
    FateChange,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)

__all__ = ["OpenLog"]

_LONGEST_TEXT = 200
_MOST_FACTS = 50


class OpenLog:
    """What a process has recorded so far.

    Args:
        max_spans: Spans that are kept at most; and as many trajectories and fates.
    """

    def __init__(self, max_spans: int) -> None:
        self.begin_ns = clock.now_ns()
        self.spans: list[Span] = []
        self.trajectories: list[Trajectory] = []
        self._fates: list[FateChange] = []
        self._max_spans = max_spans
        self._spans_left_out = 0
        self._trajectories_left_out = 0
        self._loop: tuple[asyncio.AbstractEventLoop, LoopState] | None = None
        self._lag = LoopLag(self.span_of)

    def add_span(self, span: Span) -> None:
        """Keep a span that begins."""
        facts = span.facts
        if facts:
            _shorten(facts)
        spans = self.spans
        if len(spans) < self._max_spans:
            spans.append(span)
        else:
            self._spans_left_out += 1

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Keep a trajectory that begins, or was open when recording began."""
        _shorten(trajectory.facts)
        if len(self.trajectories) < self._max_spans:
            self.trajectories.append(trajectory)
        else:
            self._trajectories_left_out += 1
        if trajectory.loop is not None and trajectory.loop is asyncio._get_running_loop():
            self.measured(trajectory.loop)

    def add_fate(self, fate: FateChange) -> None:
        """Keep what became of trajectories."""
        if len(self._fates) < self._max_spans:
            self._fates.append(fate)

    def measured(self, loop: asyncio.AbstractEventLoop) -> LoopState:
        """Return the loop that runs on this thread; its lag is measured from now on."""
        known = self._loop
        if known is None or known[0] is not loop:
            known = self._loop = (loop, self._lag.measure(loop))
        return known[1]

    def span_of(self, task: object) -> Span | None:
        """Return the innermost open span of a task; another thread asks while the task blocks its loop."""
        for span in reversed(self.spans[-20_000:]):
            if span.task is task and not span.end_ns:
                return span
        return None

    def close(self, lane: str) -> TrajectoryLog:
        """Return the records; what is open ends now.

        Args:
            lane: Lane of the process.
        """
        end_ns = clock.now_ns()
        self._lag.end()
        trajectories = {id(found): number for number, found in enumerate(self.trajectories)}
        spans = {id(found): number for number, found in enumerate(self.spans)}
        threads = {thread.ident: thread.native_id for thread in threading.enumerate()}
        log = TrajectoryLog(
            lane=lane,
            begin_ns=self.begin_ns,
            end_ns=end_ns,
            loops=self._lag.loops(),
            trajectories=[
                _trajectory_record(number, found, end_ns, self._lag.number(found.loop))
                for number, found in enumerate(self.trajectories)
            ],
            spans=[
                _span_record(
                    number,
                    found,
                    end_ns,
                    NO_SPAN if found.trajectory is None else trajectories.get(id(found.trajectory), NO_SPAN),
                    _parent(found, spans),
                    threads.get(found.thread) or found.thread,
                )
                for number, found in enumerate(self.spans)
            ],
            lags=self._lag.lags,
            blocks=self._lag.blocks(spans),
            fates=self._fates,
            spans_left_out=self._spans_left_out,
            trajectories_left_out=self._trajectories_left_out,
        )
        self.spans, self.trajectories, self._loop = [], [], None
        return log


def _trajectory_record(number: int, found: Trajectory, end_ns: int, loop: int) -> TrajectoryRecord:
    return TrajectoryRecord(
        number,
        _text(found.group),
        found.sample if isinstance(found.sample, int | None) else _text(found.sample),
        found.begin_ns,
        found.end_ns or end_ns,
        _text(found.fate) or ("done" if found.end_ns else "running"),
        loop,
        _text(found.error),
        _facts(found.facts),
    )


def _span_record(
    number: int, found: Span, log_end_ns: int, trajectory: int, parent: int, thread: int
) -> SpanRecord:
    end_ns, failed = found.end_ns, found.failed
    limit_ns = found.trajectory.end_ns if found.trajectory is not None else 0
    if not end_ns or (limit_ns and end_ns > limit_ns):
        end_ns, failed = max(limit_ns or log_end_ns, found.begin_ns), True
    return SpanRecord(
        number,
        trajectory,
        parent,
        _text(found.name),
        found.begin_ns,
        end_ns,
        thread,
        NO_SPAN if found.loop is None else found.loop.number,
        failed,
        _text(found.request),
        _facts(found.facts),
    )


def _parent(span: Span, numbers_of: Mapping[int, int]) -> int:
    """Return the number of the innermost span around one that was kept."""
    around = span.parent
    while around is not None and around is not span.trajectory:
        if (number := numbers_of.get(id(around))) is not None:
            return number
        around = around.parent
    return NO_SPAN


def _shorten(facts: dict[str, Any]) -> None:
    """Keep no prompt in memory that somebody passes as a fact."""
    for name, value in facts.items():
        if type(value) is str and len(value) > _LONGEST_TEXT:
            facts[name] = value[:_LONGEST_TEXT]


def _facts(facts: Mapping[str, Any]) -> dict[str, Fact]:
    return {_text(name): _fact(value) for name, value in _first(facts.items())} if facts else {}


def _first(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return list(items)[:_MOST_FACTS]


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
