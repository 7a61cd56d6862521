"""Tells plain traces apart by the time at which they were recorded.

What is days apart is not one step, whatever the names say. Traces belong together while no more than a
minute without any recording lies between them, or an hour where their names agree on a step: a
discrete capture does not record what lies between its stages. A file that continues the series of
another (``rank0.1790857.json`` after ``rank0.1790832.json``) begins the next recording.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import TypeAlias

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.lanes import Source
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.log_reader import LogReader
from verl_profiling.timeline.reader import Trace
from verl_profiling.trajectory_log import LOG_SUFFIX, LogFooter, SpanRecord

__all__ = ["DURATIONS", "PlainTrace", "Process", "Recording", "recordings"]

Process: TypeAlias = "tuple[str, str, int | str | None]"
"""Host, name and id of a process, as far as a trace tells."""

DURATIONS = ("X", "B", "E")
"""Phases of the events that say when a trace was recorded."""

_APART_NS = 60 * 10**9
_APART_IN_A_STEP_NS = 3600 * 10**9
_DIGITS = re.compile(r"\d+")


class PlainTrace(msgspec.Struct, frozen=True):
    """A trace without a manifest.

    Attributes:
        source: The trace.
        process: Who recorded it.
        name: Its path below the folder that was named.
        begin_ns: Time of one of its first events (unix ns); ``None`` if it has none.
    """

    source: Source
    process: Process
    name: str
    begin_ns: int | None

    @property
    def series(self) -> tuple[str, str]:
        """What the files of consecutive recordings have in common."""
        return self.source.lane, _DIGITS.sub("#", self.name)


class Recording(msgspec.Struct, frozen=True):
    """Traces that were recorded at the same time.

    Attributes:
        traces: The traces.
        begin_ns: When it began (unix ns).
    """

    traces: list[PlainTrace]
    begin_ns: int

    @property
    def title(self) -> str:
        """``recording of 2024-05-01 12:00:00.123 UTC``."""
        return f"recording of {self._began:%Y-%m-%d %H:%M:%S}.{self._began.microsecond // 1000:03} UTC"

    @property
    def label(self) -> str:
        """The same in the name of a file: ``20240501T120000.123Z``."""
        return f"{self._began:%Y%m%dT%H%M%S}.{self._began.microsecond // 1000:03}Z"

    @property
    def _began(self) -> datetime:
        return datetime.fromtimestamp(self.begin_ns / 1e9, tz=timezone.utc)


def recordings(traces: Sequence[PlainTrace], *, of_a_step: bool) -> list[Recording]:
    """Return the traces by recording, in order of time.

    The traces are read to their ends only where their first events leave a doubt.

    Args:
        traces: The traces.
        of_a_step: Whether their names agree on a step.
    """
    begins = sorted(trace.begin_ns for trace in traces if trace.begin_ns is not None)
    apart_ns = _APART_IN_A_STEP_NS if of_a_step else _APART_NS
    close = all(after - before <= apart_ns for before, after in pairwise(begins))
    if not begins or (close and not _repeats(traces)):
        return [Recording(list(traces), min(begins, default=0))]
    spans = [(_span(trace), trace) for trace in traces]
    timed = sorted(((span, trace) for span, trace in spans if span), key=lambda item: item[0])
    found: list[Recording] = []
    end_ns = 0
    last: dict[tuple[str, str], tuple[int, Process]] = {}
    for (begin, end), trace in timed:
        ended, process = last.get(trace.series, (begin + 1, trace.process))
        again = begin >= ended and not (of_a_step and trace.process == process)
        if not found or begin - end_ns > apart_ns or again:
            found.append(Recording([], begin))
            end_ns, last = end, {}
        found[-1].traces.append(trace)
        end_ns = max(end_ns, end)
        last[trace.series] = (end, trace.process)
    found[0].traces.extend(trace for span, trace in spans if not span)
    return found


def _repeats(traces: Sequence[PlainTrace]) -> bool:
    return len({trace.series for trace in traces}) < len(traces)


def _span(trace: PlainTrace) -> tuple[int, int] | None:
    """Return the begin of the first and the end of the last duration of a trace (unix ns)."""
    if trace.source.path.name.endswith(LOG_SUFFIX):
        return _span_of_log(trace)
    begin, end = float("inf"), float("-inf")
    reader = Trace(trace.source.path)
    try:
        for events in reader.chunks():
            for event in events:
                if event.ts is not None and event.ph in DURATIONS:
                    begin = min(begin, event.ts)
                    end = max(end, event.ts + (event.dur or 0.0))
    except TraceFormatError:
        pass  # it is said when the trace is read for its content
    if begin > end:
        return None
    return reader.base_ns + round(begin * 1000), reader.base_ns + round(end * 1000)


def _span_of_log(trace: PlainTrace) -> tuple[int, int]:
    """Return when a log began and ended (unix ns); one that was cut ends with its last span."""
    reader = LogReader(trace.source.path, Limits())
    end_ns = reader.header.begin_ns
    for line in reader:
        if isinstance(line, SpanRecord | LogFooter):
            end_ns = max(end_ns, line.end_ns)
    return reader.header.begin_ns, end_ns
