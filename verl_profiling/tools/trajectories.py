"""The ``trajectories`` tool: the spans of each trajectory of a rollout,
and the lag of event loops.

The log is in memory until the stop, and then becomes the records of a trajectory file.
"""

from __future__ import annotations

import numbers
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.files.trajectory_log import (
    LOG_SUFFIX,
    NO_SPAN,
    Counted,
    Fact,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    write_log,
)
from verl_profiling.manifest import Artifact, StatusChange
from verl_profiling.tools.base import Destination, Output, Recording, Tool
from verl_profiling.trajectories.loop_lag import LoopLag
from verl_profiling.trajectories.spans import (
    FAILED,
    LEFT,
    Span,
    Trajectory,
    keep_trajectories,
    later_statuses,
    start_log,
    stop_log,
)
from verl_profiling.typed_values import Positive

_LONGEST_TEXT = 200
_MOST_FACTS = 50
_EVERY_KEY = 1 << 32
_LOOKED_THROUGH = 20_000  # latest spans in which the innermost span of a task is searched


@dataclass(frozen=True, kw_only=True)
class TrajectoriesOptions:
    """Options of the ``trajectories`` tool.

    Attributes:
        max_spans: Maximum number of spans that a process keeps in a capture, and also of
            trajectories. Each takes about 400 bytes of memory. Of more, a sample of whole groups
            of trajectories is kept, over the whole time; the others are counted and reported.
    """

    max_spans: Positive = 200_000


class TrajectoriesTool(Tool):
    """Records :func:`verl_profiling.trajectory` and :func:`verl_profiling.span`, and the lag of
    event loops.

    The file is read by :func:`verl_profiling.files.trajectory_log.read_log`.
    """

    name = "trajectories"
    suffix = LOG_SUFFIX
    options_class = TrajectoriesOptions
    options: TrajectoriesOptions

    def prepare(self) -> None:
        """Remember open trajectories, for captures that begin during a trajectory."""
        keep_trajectories()

    def start(self, destination: Destination) -> Recording:
        """Start to record into a new log."""
        log = OpenLog(self.options.max_spans)
        start_log(log)
        return _TrajectoryRecording(destination, log)


@dataclass(eq=False)
class _TrajectoryRecording(Recording):
    _destination: Destination
    _log: OpenLog

    def stop(self) -> Sequence[Output]:
        self.discard()
        artifact = self._destination.artifact(TrajectoriesTool)
        events = len(self._log.spans) + len(self._log.trajectories)
        if not events:
            reason = "no trajectory and no span ran in this process"
            return [Output(artifact.with_status("skipped", reason))]
        pending = artifact.with_status("pending", events=events)
        return [Output(pending, lambda: self._written(pending))]

    def discard(self) -> None:
        stop_log(self._log)
        self._log.end()

    def _written(self, artifact: Artifact) -> Artifact:
        log = self._log.close(self._destination.lane)
        size = write_log(self._destination.path(LOG_SUFFIX), log)
        if not self._log.left_out:
            return artifact.with_status("ok", bytes=size)
        reason = (
            f"the log is a sample of groups: {self._log.left_out[Span]:,} spans and "
            f"{self._log.left_out[Trajectory]:,} trajectories were left out; raise "
            "tools.trajectories.max_spans to keep them"
        )
        return artifact.with_status("truncated", reason, bytes=size)


class OpenLog:
    """The recorded spans and trajectories of a process, with bounded memory and no lock per span.

    A full log is thinned: half of the groups stay, with all their trajectories and spans. The same
    groups stay in each process, and they are from the whole time, as the first ones say nothing of
    a rollout's end. A trajectory without a group, and a span outside trajectories with those inside
    of it, is a group of its own. Groups that stay have whole trajectories, so what is counted as
    left out in the file are the others, and the spans that even the last group has no room for.

    Args:
        max_spans: Maximum number of kept spans, and also of trajectories. In
            ``trajectories/spans.py``, it also bounds the counts.

    Attributes:
        left_out: Number of spans, and of trajectories, that are not in the log.
    """

    def __init__(self, max_spans: int) -> None:
        self.max_spans = max_spans
        self.spans: list[Span] = []
        self.trajectories: list[Trajectory] = []
        self.counts: list[Counted] = []
        self.lag = LoopLag(self.span_of)
        self._begin_ns = clock.now_ns()
        self._end_ns = 0
        self._threads: dict[int | None, int | None] = {}
        self.left_out: Counter[type[Span]] = Counter()
        self._partly = 0  # spans left out of trajectories that are in the log, or of none
        self._limit = _EVERY_KEY
        self._thinning = threading.Lock()
        self._blockers: dict[int, Span] = {}

    def add(self, span: Span) -> None:
        """Add a span or trajectory at its begin, or if it was open at the begin of recording."""
        facts = span.facts
        if facts:
            _shorten(facts)
        kept: list[Any] = self.trajectories if type(span) is Trajectory else self.spans
        if len(kept) >= self.max_spans:
            with self._thinning:
                if len(kept) >= self.max_spans:
                    self._thin()
        if self._limit < _EVERY_KEY and _key(_unit(span)) >= self._limit:
            self._leave_out(span)
        elif len(kept) < self.max_spans:
            kept.append(span)
        else:
            self.left_out[type(span)] += 1
            self._partly += type(span) is Span

    def _thin(self) -> None:
        """Remove half of the groups, unless there is only one."""
        parts: tuple[list[Any], ...] = (self.trajectories, self.spans)
        known = [part[:] for part in parts]  # other threads may add some meanwhile
        units = {id(unit): unit for unit in map(_unit, chain(*known))}
        key_of = {number: _key(unit) for number, unit in units.items()}
        keys = sorted({*key_of.values()})
        if len(keys) < 2:
            return
        self._limit = keys[len(keys) // 2]
        for part, spans in zip(parts, known, strict=True):
            kept = []
            for span in spans:
                if key_of[id(_unit(span))] < self._limit:
                    kept.append(span)
                else:
                    self._leave_out(span)
            part[: len(spans)] = kept

    def _leave_out(self, span: Span) -> None:
        self.left_out[type(span)] += 1
        self._partly += span.trajectory is None

    def span_of(self, task: object) -> int:
        """Return a number of a task's innermost open span, or -1; :meth:`close` replaces it by the
        number in the records.

        The thread that samples event loops calls this.
        """
        spans = self.spans
        for span in reversed(spans[-_LOOKED_THROUGH:]):
            if span.task is task and not span.end_ns:
                self._blockers[id(span)] = span  # kept, as ids of what is gone are used again
                return id(span)
        return NO_SPAN

    def end(self) -> None:
        """End the recording; spans that are open now are marked as open in the records."""
        self._end_ns = clock.now_ns()
        self.lag.end()
        self._threads = {thread.ident: thread.native_id for thread in threading.enumerate()}

    def close(self, lane: str) -> TrajectoryLog:
        """Return the records of an ended log, and free its memory; may be called once, from any
        thread.

        Args:
            lane: Lane of the process.
        """
        spans, self.spans = self.spans, []
        trajectories, self.trajectories = self.trajectories, []
        numbers: dict[int, int] = {}
        for part in (trajectories, spans):
            for number, span in enumerate(part):
                numbers[id(span)] = number
        return TrajectoryLog(
            lane=lane,
            begin_ns=self._begin_ns,
            end_ns=self._end_ns,
            loops=self.lag.loops(),
            trajectories=[self._trajectory(span, numbers) for span in trajectories],
            spans=[self._span(span, numbers) for span in spans],
            blocks=[replace(one, span=numbers.get(one.span, NO_SPAN)) for one in self.lag.blocks],
            statuses=statuses_between(self._begin_ns, self._end_ns),
            counts=self.counts,
            spans_left_out=self._partly,
            trajectories_left_out=self.left_out[Trajectory],
        )

    def _trajectory(self, trajectory: Trajectory, numbers: Mapping[int, int]) -> TrajectoryRecord:
        ended = 0 < trajectory.end_ns <= self._end_ns
        return TrajectoryRecord(
            numbers[id(trajectory)],
            _text(trajectory.group),
            _sample(trajectory.sample),
            trajectory.begin_ns,
            trajectory.end_ns if ended else self._end_ns,
            (_text(trajectory.status) or "done") if ended else "running",
            self.lag.number(trajectory.running_loop),
            _text(trajectory.error),
            _facts(trajectory.facts),
        )

    def _span(self, span: Span, numbers: Mapping[int, int]) -> SpanRecord:
        owner, around = span.trajectory, span.parent
        limit_ns = self._end_ns
        if owner is not None and owner.end_ns:
            limit_ns = min(limit_ns, owner.end_ns)
        ended = 0 < span.end_ns <= limit_ns
        while around is not None and around is not owner and id(around) not in numbers:
            around = around.parent
        if around is owner:
            around = None
        return SpanRecord(
            numbers[id(span)],
            numbers.get(id(owner), NO_SPAN),
            numbers.get(id(around), NO_SPAN),
            _text(span.name),
            span.begin_ns,
            span.end_ns if ended else max(limit_ns, span.begin_ns),
            self._threads.get(span.thread) or span.thread,
            NO_SPAN if span.loop is None else span.loop.record.id,
            ended and span.status == FAILED,
            _text(span.request),
            _facts(span.facts),
            not ended,
            span.status if ended and span.status in LEFT else "",
        )


def statuses_between(begin_ns: int, end_ns: int) -> list[StatusChange]:
    """Return the statuses that this process set on ended trajectories in a period."""
    return [
        StatusChange(_text(new.group), _sample(new.sample), _text(new.status), new.at_ns)
        for new in [*later_statuses]
        if begin_ns <= new.at_ns <= end_ns
    ]


def _unit(span: Span) -> Span:
    """Return what stays or goes as a whole: the innermost trajectory, else the outermost span."""
    while type(span) is not Trajectory and span.parent is not None:
        span = span.parent
    return span


def _key(unit: Span) -> int:
    """Return a number from 0 to 2**32 - 1 that is drawn by the group, else by the begin."""
    group = _text(unit.group) if isinstance(unit, Trajectory) else ""
    return zlib.crc32((group or str(unit.begin_ns)).encode())


def _shorten(facts: dict[str, Any]) -> None:
    """Cut long texts among facts, e.g. a prompt, to save memory."""
    for name, value in list(facts.items()):  # another thread may add some
        if type(value) is str and len(value) > _LONGEST_TEXT:
            facts[name] = value[:_LONGEST_TEXT]


def _facts(facts: Mapping[str, Any]) -> dict[str, Fact]:
    return {_text(name): _fact(value) for name, value in list(facts.items())[:_MOST_FACTS]}


def _sample(value: Any) -> int | str | None:
    """Return the index or id of a sample of any type as a number or a text."""
    fact = _fact(value)
    return fact if isinstance(fact, int | None) else _text(fact)


def _fact(value: Any) -> Fact:
    """Return a value of a type that JSON has, also of NumPy and torch; other types as text."""
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, numbers.Integral):
            number = int(value)
            return number if abs(number) < 1 << 63 else _text(number)
        if isinstance(value, numbers.Real):
            return float(value)
        return _text(value)
    except Exception:  # such as a fraction that is too large
        return _text(value)


def _text(value: object) -> str:
    """Return a short text that can be written as UTF-8."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:
        text = type(value).__name__
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
