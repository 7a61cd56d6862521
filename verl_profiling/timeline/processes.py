"""Ids and names of processes, threads and rows of the timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from verl_profiling.steps.kinds import is_host, is_on_device
from verl_profiling.steps.trace import NO_ARGS, Event
from verl_profiling.units import NAME_LENGTH, shortened

LANE_PIDS = 10_000
"""Number of process ids reserved for a lane."""

REQUESTS_PID = LANE_PIDS - 1
"""Offset of the process of an engine's requests among a lane's process ids."""

TRAJECTORIES_PID = LANE_PIDS - 2
"""Offset of the process of a worker's trajectories among a lane's process ids."""

STAGES_TID = 1 << 23
"""Thread id of stages in a worker's process, above the thread ids of Linux (2^22)."""

TOOL_TID = STAGES_TID + 2
"""Thread id of the starts and stops of a worker's tool."""

PAUSES_TID = STAGES_TID + 3
"""Thread id of the pauses of a process."""

PATH_PID = 1
"""Process id of the critical path."""

_PROFILER_TID = STAGES_TID + 1
_PROFILER_LANES = {"Spans", "Traces", ""}  # process ids of kineto's own events
_OVERHEAD = "overhead"  # category of kineto's own overhead, which has a process id of its own
_FIRST_DEVICE = 1
_FIRST_OTHER = 2_000
_LAST_OTHER = TRAJECTORIES_PID - 1
_OTHERS_PER_TRACE = 50
_WORDS = {"process_name": "name", "process_labels": "labels"}
_PROCESS_METADATA = {*_WORDS, "process_sort_index"}
_ENCODER = msgspec.json.Encoder()


def name_process(pid: int, name: str) -> list[Event]:
    """Return the metadata that names a process (at most 120 characters) and sorts it by its id."""
    return [
        metadata("process_name", pid, 0, {"name": shortened(name)}),
        metadata("process_sort_index", pid, 0, {"sort_index": pid}),
    ]


def name_row(pid: int, row: int, name: str) -> list[Event]:
    """Return the metadata that names and sorts a row; trajectories and requests have rows,
    not threads.
    """
    return [
        metadata("thread_name", pid, row + 1, {"name": shortened(name)}),
        metadata("thread_sort_index", pid, row + 1, {"sort_index": row}),
    ]


def metadata(kind: str, pid: int | str | None, tid: int, about: Mapping[str, object]) -> Event:
    """Return metadata of a process or thread: its name, or its place among the others."""
    return Event("M", name=kind, pid=pid, tid=tid, args=msgspec.Raw(_ENCODER.encode(about)))


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
    """Return a slice; a begin before the timeline is moved to the begin of the timeline.

    Args:
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        pid: Process id in the timeline.
        tid: Thread id; for a row, its number from 1.
        category: Category of the slice, e.g. ``stage``.
        name: Title of the slice; long names are shortened.
        begin_ns: Begin (unix ns).
        end_ns: End (unix ns).
        about: Arguments that Perfetto shows for the slice.
    """
    since = begin_ns - base_ns if begin_ns > base_ns else 0
    args = NO_ARGS if about is None else msgspec.Raw(_ENCODER.encode(about))
    took = max(end_ns - base_ns - since, 0)
    return Event("X", category, shortened(name), pid, tid, since / 1000, took / 1000, args=args)


class Processes:
    """Assigns the timeline's ids to the processes of one trace.

    The host process gets the first id of the lane, like the worker's stages and the host processes
    of its other traces. Device ids follow, in order of the device numbers. Categories of events
    tell hosts from devices; a device's name includes its process label.

    Repeated metadata is kept once.

    Processes beyond the ids of a lane share the last id of the lane.

    Attributes:
        new_pids: Process ids of the timeline by the ids of the trace.
    """

    def __init__(self, pid: int, title: str, lane_index: int) -> None:
        """Start without processes.

        Args:
            pid: First process id of the lane.
            title: Title of the lane.
            lane_index: Index of the trace among the traces of the lane.
        """
        self.new_pids: dict[int | str | None, int] = {}
        self._pid = pid
        self._title = title
        self._host: int | str | None = None
        first = _FIRST_OTHER + _OTHERS_PER_TRACE * lane_index
        self._next_other = pid + min(first, _LAST_OTHER - _OTHERS_PER_TRACE)
        self._titles: dict[int, str] = {}
        self._marked = False
        self._metadata: dict[tuple[str, int | str | None, int | str | None, bytes], Event] = {}

    def find_host(self, events: list[Event]) -> None:
        """Choose the host process: the process
        with most host events among the first events of a trace.
        """
        counts = Counter(event.pid for event in events if event.ph == "X" and is_host(event))
        self._host = max(counts, key=counts.__getitem__, default=None)

    def assign(self, event: Event) -> int:
        """Return the new id for the process of an event, at the process's first event.

        Instant events of Kineto itself would span all processes of the timeline, so they get a
        thread of the host process.
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
        else:
            new = min(self._next_other, self._pid + _LAST_OTHER)
            self._next_other += 1
            name = f"{title} {event.cat if event.cat == _OVERHEAD else old}"
            if new == self._pid + _LAST_OTHER:
                name = f"{title} … more processes"
        self.new_pids[old] = new
        self._titles[new] = name
        return new

    def note(self, event: Event) -> None:
        """Keep a metadata event, unless it is repeated."""
        arguments = bytes(event.args)  # a copy: a view would keep the whole block in memory
        key = (event.name, event.pid, event.tid, arguments)
        if key not in self._metadata:
            event.ts, event.args = None, msgspec.Raw(arguments)
            self._metadata[key] = event

    def names(self) -> list[Event]:
        """Return the metadata that names all processes with events, and their threads.

        A device's name includes its label. The names of other processes, except the host's, include
        their own names.
        """
        events: list[Event] = []
        said: dict[int, dict[str, str]] = {}
        for event in self._metadata.values():
            if (new := self.new_pids.get(event.pid)) is None:
                continue
            word = _WORDS.get(event.name, "")
            if event.name not in _PROCESS_METADATA:
                event.pid = new
                events.append(event)
            elif (word and new >= self._pid + _FIRST_OTHER) or (
                word == "labels" and new > self._pid
            ):
                said.setdefault(new, {}).setdefault(word, event.said(word)[:NAME_LENGTH])
        if self._marked:
            self._titles.setdefault(self._pid, self._title)
            events.append(metadata("thread_name", self._pid, _PROFILER_TID, {"name": "profiler"}))
        for new, words in said.items():
            if named := " ".join(dict.fromkeys(filter(None, words.values()))):
                self._titles[new] = f"{self._title} {named}"
        for pid, title in self._titles.items():
            events += name_process(pid, title)
        return events
