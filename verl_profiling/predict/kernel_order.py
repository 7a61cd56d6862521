"""The calls and the kernels of a trace, and which of them waits for which other one.

A trace is a graph of its own. A node is an instant of a thread of the host, or work of a device: a
kernel or a copy.

==================================== ====================================================== ========
a node                               follows                                                recorded
==================================== ====================================================== ========
instant of a thread                  the one before it in the thread                        yes
work                                 the one before it on its stream, and its launch        yes
end of a call that waits             the work that it waits for                             if named
first work after a stream's wait     the work that the stream waits for                     if named
launch into a full queue             the work that leaves the queue                         assumed
call of a thread that was idle       the last call of another thread                        assumed
==================================== ====================================================== ========

A replay keeps the recorded time between a node and the nodes that it follows. So host code,
latencies and gaps keep their time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from verl_profiling.slices.intervals import Spans, union
from verl_profiling.steps import kinds
from verl_profiling.steps.event_rows import to_spans
from verl_profiling.steps.step import Source
from verl_profiling.steps.trace import Trace
from verl_profiling.steps.trace_content import Limits

_Row = tuple[Any, Any]

WORKS = (kinds.COMPUTE, kinds.COMMUNICATION, kinds.MEMORY)
NEVER = -(1 << 62)  # ns, before all events
_CHUNK_BYTES = 2 << 20
_QUEUE = 1_022  # launches that a stream of CUDA holds, as seen in traces
_CORRELATION = re.compile(rb'"correlation"\s*:\s*"?(\d+)')
_WAITS_FOR_ALL = re.compile("(?:Device|Ctx|Context)Synchronize")

_UNLAUNCHED = "kernels without a recorded launch follow the one before them on their stream"
_HOST_WAITS = "a call that waits follows the work of a device that ended last in it"
_STREAM_WAITS = "a stream that waits follows the work of another stream that ended last before it"
_FULL = "a launch into a full queue waits for the work that leaves the queue"
_TURNS = "a thread that was idle follows the last call of another thread"


class Event(NamedTuple):
    """A call in a thread, or work on a stream.

    The row is the process and thread, or the device and stream. A call and the work that it
    launches have the same correlation; -1 is none.
    """

    row: _Row
    begin_ns: int
    end_ns: int
    correlation: int
    name: str
    kind: int


class TraceContent(NamedTuple):
    """Content of a trace.

    Attributes:
        works: Kernels and copies, by stream and begin.
        calls: Calls of the device's runtime and driver, by begin.
        active: Times in which each thread of the host is in an event.
        waits: Arguments of each ``cuda_sync`` event, by the correlation of its call.
        categories: Categories of the trace's events.
    """

    works: list[Event]
    calls: list[Event]
    active: dict[_Row, list[Spans]]
    waits: dict[int, dict[str, Any]]
    categories: set[str]


def read_content(source: Source, limits: Limits, communication: tuple[str, ...]) -> TraceContent:
    """Read the calls of a trace, and its work of devices."""
    kind_of = cache(partial(kinds.kind_of, communicates=kinds.communicates(communication)))
    content = TraceContent([], [], defaultdict(list), {}, set())
    trace = Trace(source.file, limits, source.pids)
    for events in trace.chunks(_CHUNK_BYTES):
        timed = [event for event in events if event.ph == "X" and event.ts is not None]
        spans = to_spans(timed, trace.base_ns - source.offset_ns)
        on_host: defaultdict[_Row, list[int]] = defaultdict(list)
        for place, (event, (begin_ns, end_ns)) in enumerate(
            zip(timed, spans.tolist(), strict=True)
        ):
            kind, row = kind_of(event.cat, event.name), (event.pid, event.tid)
            content.categories.add(event.cat)
            if kind in (kinds.HOST, kinds.HOST_COMMUNICATION):
                on_host[row].append(place)
            said = _CORRELATION.search(event.args)
            number = int(said[1]) if said else -1
            if kind in WORKS or event.cat.lower().endswith(("runtime", "driver")):
                of_kind = content.works if kind in WORKS else content.calls
                of_kind.append(Event(row, begin_ns, end_ns, number, event.name, kind))
            elif event.cat == "cuda_sync" and event.args:
                content.waits[number] = {"pid": event.pid, **msgspec.json.decode(event.args)}
        for row, places in on_host.items():
            content.active[row].append(union(spans[places]))
    content.calls.sort(key=lambda one: one.begin_ns)
    works = sorted(set(content.works), key=lambda one: (str(one.row), one.begin_ns, one.end_ns))
    return content._replace(works=works)


class TraceOrder:
    """The order of the calls and kernels of a trace; empty for a trace without launches.

    Args:
        content: The trace.
        assumed: Number of edges by the assumption that they rest on; this trace adds its own.

    Attributes:
        after: Nodes that each node follows, with the least time between both (ns).
    """

    def __init__(self, content: TraceContent, assumed: Counter[str]) -> None:
        self.after = defaultdict[Event, list[tuple[Event, int]]](list)
        self._content = content
        self._works = content.works
        self._assumed = assumed
        self._call_of = {
            one.correlation: one for one in reversed(content.calls) if one.correlation >= 0
        }
        self._started = defaultdict[int, list[int]](
            list
        )  # indexes of the works that a call launches, by its correlation
        self._streams: dict[_Row, tuple[int, list[int], list[int]]] = {}
        launches = dict[int, Event]()
        for at, work in enumerate(self._works):
            call = self._call_of.get(work.correlation)
            if call and call.begin_ns <= work.begin_ns:
                launches[at] = call
                self._started[call.correlation].append(at)
        if launches:
            assumed[_UNLAUNCHED] += len(self._works) - len(launches)
            self._follow_streams(launches)
            self._follow_launches(launches)
            self._follow_works()
            self._follow_threads()

    def _instant(self, row: _Row, ns: int) -> Event:
        """Return the node of an instant of a thread."""
        node = Event(row, ns, ns, -1, "", kinds.HOST)
        self.after[node] += []
        return node

    def _follow_streams(self, launches: Mapping[int, Event]) -> None:
        """Let each work follow the one before it on its stream.

        Of each stream, keep the first work, and the latest launch and end so far at each work.
        """
        works = self._works
        for row, numbers in groupby(range(len(works)), lambda at: works[at].row):
            mine = list(numbers)
            begins = (launches[at].begin_ns if at in launches else 0 for at in mine)
            ends = (works[at].end_ns for at in mine)
            self._streams[row] = mine[0], list(accumulate(begins, max)), list(accumulate(ends, max))
            self.after[works[mine[0]]] += []
            for before, at in pairwise(mine):
                self.after[works[at]].append(
                    (works[before], min(works[at].begin_ns - works[before].end_ns, 0))
                )

    def _follow_launches(self, launches: Mapping[int, Event]) -> None:
        """Let each kernel and copy follow the call that launched it.

        The delay is the shortest time in the trace from such a call to what it launched.
        """
        least_ns = min(self._works[at].begin_ns - call.begin_ns for at, call in launches.items())
        for at, call in launches.items():
            self.after[self._works[at]].append((self._instant(call.row, call.begin_ns), least_ns))

    def _follow_works(self) -> None:
        """Let calls that wait, and streams after ``StreamWaitEvent``, follow what they wait for."""
        pending = defaultdict[_Row, list[Event]](list)  # stream waits, until the thread launches
        for call in self._content.calls:
            started = self._started.get(call.correlation, [])
            waited = self._waited(call, started)
            if waited:
                self._instant(call.row, call.begin_ns)
                self.after[self._instant(call.row, call.end_ns)] += [(work, 0) for work in waited]
            if "StreamWaitEvent" in call.name:
                pending[call.row].append(call)
            elif started:
                work = self._works[started[0]]
                for wait in pending.pop(call.row, []):
                    said = self._content.waits.get(wait.correlation, {})
                    if said.get("stream", work.row[1]) == work.row[1]:
                        before = self._last(wait, work.begin_ns, work.row)
                        self.after[work] += [(one, 0) for one in before]
                    else:
                        pending[call.row].append(wait)

    def _waited(self, call: Event, started: Sequence[int]) -> list[Event]:
        """Return the works that a call waits for; ``started`` are the works that it launches."""
        waited = list[Event]()
        for at in started:
            work = self._works[at]
            if work.kind == kinds.MEMORY and work.end_ns < call.end_ns:
                waited.append(work)
            left = at - _QUEUE  # the work that leaves the queue
            if (
                left >= self._streams[work.row][0]
                and call.begin_ns < self._works[left].end_ns < call.end_ns
            ):
                waited.append(self._works[left])
                self._assumed[_FULL] += 1
        return waited + self._last(call, call.end_ns) if "Synchronize" in call.name else waited

    def _last(self, call: Event, until_ns: int, own: _Row | None = None) -> list[Event]:
        """Return the works before ``until_ns`` that a call waits for;
        ``own`` is the stream that waits.
        """
        said = self._content.waits.get(call.correlation, {})
        named = (said.get("pid"), said.get("wait_on_stream", said.get("stream")))
        record = self._call_of.get(said.get("wait_on_cuda_event_record_corr_id", -1), call)
        is_named = named in self._streams
        last = list[Event]()
        for row in [named] if is_named else self._streams.keys() - {own}:
            first, launch_ns, end_ns = self._streams[row]
            count = min(bisect_left(launch_ns, record.begin_ns), bisect_right(end_ns, until_ns))
            if count and self._works[first + count - 1].begin_ns < until_ns:
                last.append(self._works[first + count - 1])
        if is_named or _WAITS_FOR_ALL.search(call.name):
            return last
        self._assumed[_STREAM_WAITS if own else _HOST_WAITS] += bool(last)
        return sorted(last, key=lambda work: work.end_ns)[-1:]

    def _follow_threads(self) -> None:
        """Let instants follow each other in their thread.

        The first call of a thread that was idle follows the last call of another thread.
        """
        rows = {node.row for node in self.after if node.kind not in WORKS}
        for end, begin in _turns({row: union(*self._content.active[row]) for row in rows}):
            self.after[self._instant(*begin)].append((self._instant(*end), 0))
            self._assumed[_TURNS] += 1
        instants = [node for node in self.after if node.kind not in WORKS]
        for earlier, node in pairwise(
            sorted(instants, key=lambda node: (str(node.row), node.begin_ns))
        ):
            if earlier.row == node.row:
                self.after[node].append((earlier, 0))


def _turns(active: Mapping[_Row, Spans]) -> Iterator[tuple[tuple[_Row, int], tuple[_Row, int]]]:
    """Yield hand-overs between threads: the end of a call,
    and the begin of one in a thread that was idle.
    """
    for row, spans in active.items():
        idle_ns = NEVER
        for begin_ns, end_ns in spans.tolist():
            last = row, idle_ns
            for other, calls in active.items():
                at = int(np.searchsorted(calls[:, 1], begin_ns)) - 1
                if other != row and at >= 0 and calls[at, 0] > idle_ns and calls[at, 1] > last[1]:
                    last = other, int(calls[at, 1])
            if last[0] != row:
                yield last, (row, begin_ns)
            idle_ns = end_ns
