"""Predictions of a step whose kernels take another time: the calls and the kernels of each trace,
replayed.

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

The recorded time between a node and what it follows stays. So host code, latencies and gaps keep
their time.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.predict.graph import WORK, Graph, Segment
from verl_profiling.slices.intervals import Spans, union
from verl_profiling.steps import kinds
from verl_profiling.steps.cluster import results
from verl_profiling.steps.content import Limits
from verl_profiling.steps.records import FROM_THE_ENGINE, LOOP_LAG, TO_THE_ENGINE
from verl_profiling.steps.rows import to_spans
from verl_profiling.steps.step import Source, StepInputs
from verl_profiling.steps.trace import Trace

_Row = tuple[Any, Any]
_Times = list[tuple[int, int]]

KERNEL = "kernel:"
"""Prefix of a pattern of kernel names, where ``--scale`` could also have a stage."""

_WORKS = (kinds.COMPUTE, kinds.COMMUNICATION, kinds.MEMORY)
_CHUNK_BYTES = 2 << 20
_QUEUE = 1_022  # launches that a stream of CUDA holds, as seen in traces
_CLOSE = 0.4  # least likeness of names that are listed as close
_MOST_NAMES = 3
_NEVER = -(1 << 62)
_CORRELATION = re.compile(rb'"correlation"\s*:\s*"?(\d+)')
_WAITS_FOR_ALL = re.compile("(?:Device|Ctx|Context)Synchronize")

_WITHOUT_LAUNCHES = "kernels of a trace without launches keep their time"
_KEPT = "collectives keep their time, with the waits for other ranks in it"
_UNLAUNCHED = "kernels without a recorded launch follow the one before them on their stream"
_HOST_WAITS = "a call that waits follows the work of a device that ended last in it"
_STREAM_WAITS = "a stream that waits follows the work of another stream that ended last before it"
_FULL = "a launch into a full queue waits for the work that leaves the queue"
_TURNS = "a thread that was idle follows the last call of another thread"


class _Found(NamedTuple):
    """A trace after the change: durations (ns), time of each kernel, other names,
    and assumptions.
    """

    took_ns: list[int]
    kernels: Counter[str]
    collectives: set[str]
    categories: set[str]
    has_launches: bool
    assumed: Counter[str]


class _Event(NamedTuple):
    """A call in a thread, or work on a stream; the row is the process or device,
    and its thread or stream.
    """

    row: _Row
    begin_ns: int
    end_ns: int
    correlation: int
    name: str
    kind: int


class _Content(NamedTuple):
    """Content of a trace; ``waits`` has what is recorded of a wait,
    by the correlation of its call.
    """

    works: list[_Event]
    calls: list[_Event]
    active: dict[_Row, list[Spans]]
    waits: dict[int, dict[str, Any]]
    categories: set[str]


def with_kernels(
    inputs: StepInputs, graph: Graph, factors: Mapping[str, float]
) -> tuple[dict[int, int], list[str]]:
    """Return the duration (ns) of segments with faster or slower kernels, by number, and what is
    assumed.

    Args:
        inputs: The step; each call reads its traces.
        graph: The graph of the step.
        factors: Factor of the time of kernels, by a pattern of their names.

    Raises:
        ConfigError: The traces have no launches of kernels, or a pattern matches no kernel.
    """
    if not factors:
        return {}, []
    segments, calls, owned = graph.segments, [], []
    for source in inputs.sources:
        owned.append([at for at, one in enumerate(segments) if _runs_in(one, source)])
        times = [(segments[at].begin_ns, segments[at].end_ns) for at in owned[-1]]
        how = (source, inputs.limits, inputs.communication, dict(factors), times)
        calls.append((partial(_replayed, *how), [source]))
    longer_ns: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by lane
    read = list[_Found]()
    for found, mine, source in zip(results(calls, inputs.ray), owned, inputs.sources, strict=True):
        if isinstance(found, TraceFormatError):  # already a sentence on missing data
            continue
        read.append(found)
        for at, took_ns in zip(mine, found.took_ns, strict=True):
            longer_ns[at][source.lane] += took_ns - segments[at].recorded_ns
    _check(factors, read)
    assumed = sum((found.assumed for found in read), Counter[str]())
    assumed[_WITHOUT_LAUNCHES] = sum(
        bool(found.kernels) and not found.has_launches for found in read
    )
    timed_ns = {
        at: max(segments[at].recorded_ns + max(of.values()), 0) for at, of in longer_ns.items()
    }
    return timed_ns, [f"{rule} ({many:,})" for rule, many in assumed.items() if many]


def _runs_in(one: Segment, source: Source) -> bool:
    """Return whether a segment is work of the process of a trace, or a request in its engine."""
    if one.request is not None:
        outside = one.kind.startswith((LOOP_LAG, TO_THE_ENGINE, FROM_THE_ENGINE))
        return source.replica == one.request.replica and not outside
    owners = (f"{source.worker} ", f"{source.lane} ")  # a lane's device may follow its name
    return one.kind == WORK and f"{one.who} ".startswith(owners)


def _check(factors: Mapping[str, float], read: Sequence[_Found]) -> None:
    replayed = [found for found in read if found.has_launches]
    if not replayed:
        there = ", ".join(
            sorted(set().union(*(found.categories for found in read)) - {"", "Trace"})
        )
        needed = "the step has no kernels with their launches: capture with the tool torch on a GPU"
        raise ConfigError("--scale", f"{needed} (the traces have {there or 'nothing'})")
    kernels = sum((found.kernels for found in replayed), Counter[str]())
    collectives = set[str]().union(*(found.collectives for found in replayed))
    for pattern in factors:
        if any(_matches(name, pattern) for name in kernels):
            continue
        if any(_matches(name, pattern) for name in collectives):
            raise ConfigError(
                "--scale", f"{pattern!r} matches collectives: their waits cannot be scaled"
            )
        names = [kinds.own_name(name) for name, _ in kernels.most_common()]
        close = get_close_matches(pattern.strip("*?"), names, _MOST_NAMES, _CLOSE)
        hint = (
            f"{'close names' if close else 'the longest'}: "
            f"{', '.join(close or names[:_MOST_NAMES])}"
        )
        raise ConfigError("--scale", f"no kernel of the step matches {pattern!r}; {hint}")


def _matches(name: str, pattern: str) -> bool:
    names = (name, kinds.own_name(name))
    return any(one == pattern or fnmatchcase(one, pattern) for one in names)


def _read(source: Source, limits: Limits, communication: tuple[str, ...]) -> _Content:
    kind_of = cache(partial(kinds.kind_of, communicates=kinds.communicates(communication)))
    found = _Content([], [], defaultdict(list), {}, set())
    trace = Trace(source.file, limits, source.pids)
    for events in trace.chunks(_CHUNK_BYTES):
        timed = [event for event in events if event.ph == "X" and event.ts is not None]
        spans = to_spans(timed, trace.base_ns - source.offset_ns)
        on_host: defaultdict[_Row, list[int]] = defaultdict(list)
        for place, (event, (begin_ns, end_ns)) in enumerate(
            zip(timed, spans.tolist(), strict=True)
        ):
            kind, row = kind_of(event.cat, event.name), (event.pid, event.tid)
            found.categories.add(event.cat)
            if kind in (kinds.HOST, kinds.HOST_COMMUNICATION):
                on_host[row].append(place)
            said = _CORRELATION.search(event.args)
            number = int(said[1]) if said else -1
            if kind in _WORKS or event.cat.lower().endswith(("runtime", "driver")):
                of_kind = found.works if kind in _WORKS else found.calls
                of_kind.append(_Event(row, begin_ns, end_ns, number, event.name, kind))
            elif event.cat == "cuda_sync" and event.args:
                found.waits[number] = {"pid": event.pid, **msgspec.json.decode(event.args)}
        for row, places in on_host.items():
            found.active[row].append(union(spans[places]))
    found.calls.sort(key=lambda one: one.begin_ns)
    works = sorted(set(found.works), key=lambda one: (str(one.row), one.begin_ns, one.end_ns))
    return found._replace(works=works)


def _replayed(
    source: Source,
    limits: Limits,
    communication: tuple[str, ...],
    factors: dict[str, float],
    times: _Times,
) -> _Found:
    """Return a trace after the change.

    Args:
        source: The trace.
        limits: How much of it is read.
        communication: Regular expressions of further communication kernels.
        factors: Factor of the time of kernels, by a pattern of their names.
        times: Begin and end (ns) of segments. If work of the device begins or ends at one of these
            times, the time moves with it. All others move with the host.
    """
    content = _read(source, limits, communication)
    works, kernels, collectives = content.works, Counter[str](), Counter[str]()
    for one in works:
        of_kind = collectives if one.kind == kinds.COMMUNICATION else kernels
        of_kind[one.name] += one.end_ns - one.begin_ns
    by_name = {
        name: math.prod(factor for pattern, factor in factors.items() if _matches(name, pattern))
        for name in kernels
    }
    assumed = Counter({_KEPT: sum(one.kind == kinds.COMMUNICATION for one in works)})
    after = _Order(content, assumed).after
    ends: dict[_Event, int] = {}
    begun, instants, moved_ns = dict[int, int](), [_NEVER], [0]
    for node in sorted(after, key=lambda node: (node.begin_ns, node.kind in _WORKS)):
        late_ns = node.begin_ns - max((one.end_ns + least for one, least in after[node]), default=0)
        new_ns = late_ns + max((ends[one] + least for one, least in after[node]), default=0)
        ends[node] = new_ns + round((node.end_ns - node.begin_ns) * by_name.get(node.name, 1.0))
        if node.kind in _WORKS:
            begun[node.begin_ns] = new_ns
        else:
            instants.append(node.begin_ns)
            moved_ns.append(new_ns - node.begin_ns)
    by_end = sorted((one.end_ns, ns) for one, ns in ends.items() if one.kind in _WORKS)
    ended = dict(
        zip((ns for ns, _ in by_end), accumulate((ns for _, ns in by_end), max), strict=True)
    )

    def new(at_ns: int, first: dict[int, int], second: dict[int, int]) -> int:
        with_host = at_ns + moved_ns[bisect_right(instants, at_ns) - 1]
        return first.get(at_ns, second.get(at_ns, with_host))

    took_ns = [
        new(end_ns, begun, ended) - new(begin_ns, ended, begun) for begin_ns, end_ns in times
    ]
    return _Found(took_ns, kernels, set(collectives), content.categories, bool(after), assumed)


class _Order:
    """The order of the calls and kernels of a trace; empty for a trace without launches.

    Args:
        content: The trace.
        assumed: Number of edges by the assumption that they rest on; those of the trace are added.

    Attributes:
        after: Nodes that each node follows, with the least time between both (ns).
    """

    def __init__(self, content: _Content, assumed: Counter[str]) -> None:
        self.after = defaultdict[_Event, list[tuple[_Event, int]]](list)
        self._content = content
        self._works = content.works
        self._assumed = assumed
        self._call_of = {
            one.correlation: one for one in reversed(content.calls) if one.correlation >= 0
        }
        self._started = defaultdict[int, list[int]](
            list
        )  # numbers of works by the correlation of the call
        self._streams: dict[_Row, tuple[int, list[int], list[int]]] = {}
        launches = dict[int, _Event]()
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

    def _instant(self, row: _Row, ns: int) -> _Event:
        """Return the node of an instant of a thread."""
        node = _Event(row, ns, ns, -1, "", kinds.HOST)
        self.after[node] += []
        return node

    def _follow_streams(self, launches: Mapping[int, _Event]) -> None:
        """Let works follow each other; keep the first,
        all launches and all ends so far of each stream.
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

    def _follow_launches(self, launches: Mapping[int, _Event]) -> None:
        """Let works follow their launches, with the shortest time that one of them took."""
        least_ns = min(self._works[at].begin_ns - call.begin_ns for at, call in launches.items())
        for at, call in launches.items():
            self.after[self._works[at]].append((self._instant(call.row, call.begin_ns), least_ns))

    def _follow_works(self) -> None:
        """Let calls and streams wait for works."""
        pending = defaultdict[_Row, list[_Event]](list)  # waits of streams before the next launch
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

    def _waited(self, call: _Event, started: Sequence[int]) -> list[_Event]:
        """Return the works that a call waits for; ``started`` are those that it launches."""
        waited = list[_Event]()
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

    def _last(self, call: _Event, until_ns: int, own: _Row | None = None) -> list[_Event]:
        """Return the works before ``until_ns`` that a call waits for;
        ``own`` is the stream that waits.
        """
        said = self._content.waits.get(call.correlation, {})
        named = (said.get("pid"), said.get("wait_on_stream", said.get("stream")))
        record = self._call_of.get(said.get("wait_on_cuda_event_record_corr_id", -1), call)
        is_named = named in self._streams
        last = list[_Event]()
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
        """Let instants follow each other in their thread, and where a thread takes its turn."""
        rows = {node.row for node in self.after if node.kind not in _WORKS}
        for end, begin in _turns({row: union(*self._content.active[row]) for row in rows}):
            self.after[self._instant(*begin)].append((self._instant(*end), 0))
            self._assumed[_TURNS] += 1
        instants = [node for node in self.after if node.kind not in _WORKS]
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
        idle_ns = _NEVER
        for begin_ns, end_ns in spans.tolist():
            last = row, idle_ns
            for other, calls in active.items():
                at = int(np.searchsorted(calls[:, 1], begin_ns)) - 1
                if other != row and at >= 0 and calls[at, 0] > idle_ns and calls[at, 1] > last[1]:
                    last = other, int(calls[at, 1])
            if last[0] != row:
                yield last, (row, begin_ns)
            idle_ns = end_ns
