"""Assigns the processes of one trace to its lane of the timeline, and names them and their threads."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from verl_profiling.timeline.categories import is_host, is_on_device
from verl_profiling.timeline.trace import NO_ARGS, Event

LANE_PIDS = 10_000
"""Number of process ids reserved for a lane."""

REQUESTS_PID = LANE_PIDS - 1
"""Of these, that of an engine's requests."""

TRAJECTORIES_PID = LANE_PIDS - 2
"""Of these, that of a worker's trajectories."""

STAGES_TID = 1 << 23
"""Thread id of the stages' lane in a worker's process; Linux assigns none above 2^22."""

TOOL_TID = STAGES_TID + 2
"""Thread id of the lane that shows when a worker's tool was started and stopped."""

_PROFILER_TID = STAGES_TID + 1
_PROFILER_LANES = {"Spans", "Traces", ""}  # processes in which kineto puts its own events
_OVERHEAD = "overhead"  # the profiler's own, as a process of its own in kineto
_FIRST_DEVICE = 1
_FIRST_OTHER = 2_000
_LAST_OTHER = TRAJECTORIES_PID - 1
_OTHERS_PER_TRACE = 50
_NAME_LENGTH = 120  # characters
_WORDS = {"process_name": "name", "process_labels": "labels"}
_PROCESS_METADATA = {*_WORDS, "process_sort_index"}
_ENCODER = msgspec.json.Encoder()


def name_process(pid: int, name: str) -> list[Event]:
    """Return the metadata that names a process, in bounded length, and sorts it by its id."""
    named = msgspec.Raw(_ENCODER.encode({"name": shortened(name)}))
    return [
        Event("M", name="process_name", pid=pid, tid=0, args=named),
        Event("M", name="process_sort_index", pid=pid, tid=0, args=msgspec.Raw(b'{"sort_index":%d}' % pid)),
    ]


def shortened(name: str) -> str:
    """Return a name in bounded length."""
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"


def name_row(pid: int, row: int, name: str) -> list[Event]:
    """Return the metadata that names a row of a process that has rows instead of threads, and sorts it."""
    order = msgspec.Raw(b'{"sort_index":%d}' % row)
    return [
        name_thread(pid, row + 1, shortened(name)),
        Event("M", name="thread_sort_index", pid=pid, tid=row + 1, args=order),
    ]


def name_thread(pid: int, tid: int, name: str) -> Event:
    """Return the metadata that names a thread."""
    return Event("M", name="thread_name", pid=pid, tid=tid, args=msgspec.Raw(_ENCODER.encode({"name": name})))


def draw(
    base_ns: int,
    pid: int,
    tid: int,
    category: str,
    name: str,
    begin_ns: int,
    end_ns: int,
    about: Mapping[str, object] | None = None,
) -> Event:
    """Return a slice; what begins before the timeline does begins with it.

    Args:
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        pid: Process.
        tid: Thread, or row.
        category: Category.
        name: Name; a long one is shortened.
        begin_ns: Begin (unix ns).
        end_ns: End (unix ns).
        about: Its arguments.
    """
    since = begin_ns - base_ns if begin_ns > base_ns else 0
    args = NO_ARGS if about is None else msgspec.Raw(_ENCODER.encode(about))
    took = max(end_ns - base_ns - since, 0)
    return Event("X", category, shortened(name), pid, tid, since / 1000, took / 1000, args=args)


def packed_rows(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a row for each span (begin, end): as many as overlap at once, and of those free the first."""
    rows = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # until when, row
    free: list[int] = []
    for place in sorted(range(len(spans)), key=lambda place: spans[place][0]):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[place]))
    return rows


class Processes:
    """Assigns the timeline's ids to the processes of one trace.

    The host process gets the id of the lane, which it shares with the lane of its stages and with
    other traces of the same worker. The ids of devices follow it, in order of their numbers. Which
    process is which follows from the categories of their events, and a device's name from its label.

    Metadata is kept once, however often a trace repeats it.

    Attributes:
        known: New id by the trace's own id.
        crowded: Number of events whose processes share the last id, because the lane has no more.
    """

    def __init__(self, pid: int, title: str, lane_index: int) -> None:
        """Begin with no process.

        Args:
            pid: First process id of the lane.
            title: Name of the lane, to be shown.
            lane_index: Place of the trace among those of the same lane.
        """
        self.known: dict[int | str | None, int] = {}
        self.crowded = 0
        self._pid = pid
        self._title = title
        self._host: int | str | None = None
        first = _FIRST_OTHER + _OTHERS_PER_TRACE * lane_index
        self._next_other = pid + min(first, _LAST_OTHER - _OTHERS_PER_TRACE)
        self._titles: dict[int, str] = {}
        self._marked = False
        self._metadata: dict[tuple[str, int | str | None, int | str | None, bytes], Event] = {}

    def find_host(self, events: list[Event]) -> None:
        """Take the process with most events of the host, among the first of a trace, for the lane's own."""
        counts = Counter(event.pid for event in events if event.ph == "X" and is_host(event))
        self._host = max(counts, key=counts.__getitem__, default=None)

    def assign(self, event: Event) -> int:
        """Return the new id for the process of an event, which is seen for the first time.

        The profiler's own marks concern this process only, so they go to a thread of it instead of
        spanning all processes.
        """
        old, title = event.pid, self._title
        if old in _PROFILER_LANES:
            event.tid, event.s = _PROFILER_TID, event.s and "t"
            self._marked = True
            return self._pid
        is_device = old != self._host and is_on_device(event)
        if is_device and isinstance(old, int) and 0 <= old < _FIRST_OTHER - _FIRST_DEVICE:
            new, name = self._pid + _FIRST_DEVICE + old, f"{title} GPU {old}"
        elif self._pid not in self._titles and self._host in (None, old) and not is_device:
            new, name = self._pid, title
        elif self._next_other >= self._pid + _LAST_OTHER:
            self.crowded += 1
            new = self._pid + _LAST_OTHER
            self._titles[new] = f"{title} more processes"
            return new
        else:
            new, self._next_other = self._next_other, self._next_other + 1
            name = f"{title} {event.cat if event.cat == _OVERHEAD else old}"
        self.known[old] = new
        self._titles[new] = name
        return new

    def note(self, event: Event) -> None:
        """Take an event of metadata."""
        arguments = bytes(event.args)  # a copy: a view would keep the whole block in memory
        key = (event.name, event.pid, event.tid, arguments)
        if key not in self._metadata:
            event.ts, event.args = None, msgspec.Raw(arguments)
            self._metadata[key] = event

    def names(self) -> list[Event]:
        """Return the names of all processes that have events, and of their threads.

        A device is named by its label; a process that is neither host nor device, by its own name, too.
        """
        events: list[Event] = []
        said: dict[int, dict[str, str]] = {}
        for event in self._metadata.values():
            if (new := self.known.get(event.pid)) is None:
                continue
            word = _WORDS.get(event.name, "")
            if event.name not in _PROCESS_METADATA:
                event.pid = new
                events.append(event)
            elif (word and new >= self._pid + _FIRST_OTHER) or (word == "labels" and new > self._pid):
                said.setdefault(new, {}).setdefault(word, event.said(word)[:_NAME_LENGTH])
        if self._marked:
            self._titles.setdefault(self._pid, self._title)
            events.append(name_thread(self._pid, _PROFILER_TID, "profiler"))
        for new, words in said.items():
            if named := " ".join(dict.fromkeys(filter(None, words.values()))):
                self._titles[new] = f"{self._title} {named}"
        for pid, title in self._titles.items():
            events += name_process(pid, title)
        return events
