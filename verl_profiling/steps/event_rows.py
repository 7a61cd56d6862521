"""Events of a lane as rows, each with the number of a key.

A key is a name, a thread and a process group. Its kind is found once, although a trace may have
millions of events with the same key.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.intervals import EMPTY, Ints, Spans
from verl_profiling.steps.kinds import NOTHING, UNKNOWN, Group, blocks_from_ns
from verl_profiling.steps.trace import Event

_GRAPH_LAUNCH = re.compile(r"GraphLaunch")  # in names of calls of CUDA, HIP, and their driver APIs

Keys: TypeAlias = NDArray[np.int32]


class Key(NamedTuple):
    """The values that many events have in common.

    Attributes:
        name: Name of the events.
        pid: Id of their process in the trace.
        tid: Id of their thread or stream in the trace.
        group: Process group of a collective; ``None`` for other events, or if unknown.
        bytes: Bytes of a collective; 0 for other events, or if unknown.
    """

    name: str
    pid: object
    tid: object
    group: Group | None = None
    bytes: int = 0


class Rows(NamedTuple):
    """Events of a lane as columns.

    Attributes:
        spans: Begin and end of each event (unix ns).
        keys: Number of each event's key in the :class:`KeyTable`.
        launches: Number that a host call shares with the device events that it launched; 0 for
            other events.
    """

    spans: Spans
    keys: Keys
    launches: Ints

    def of(self, wanted: NDArray[Any]) -> Rows:
        """Return the selected rows."""
        return Rows(self.spans[wanted], self.keys[wanted], self.launches[wanted])


class KeyTable:
    """The keys of a lane by number, from 1 on, with the properties of all events of a key."""

    def __init__(self) -> None:
        self.keys = [Key("", None, None)]
        self._numbers: dict[tuple[object, ...], int] = {}
        self._kinds, self._blocks_from_ns = array("b", [NOTHING]), array("q", [0])
        # An event correlates if it has the number of a launch: as the host call, or as its kernel.
        self._correlates, self._launches_graph = array("b", [False]), array("b", [False])

    def number(self, kind: int, key: Key, *task: object, calls_device: bool = False) -> int:
        """Return the number of a key, which is a new number for a new key.

        Args:
            kind: Kind of the key's events.
            key: The key.
            task: Further values that separate keys, e.g. the task type of an NPU's events.
            calls_device: Whether the events are calls of a device's runtime or driver.
        """
        number = self._numbers.setdefault((kind, key, *task), len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
            self._kinds.append(kind)
            self._blocks_from_ns.append(blocks_from_ns(kind, key.name))
            self._correlates.append(kind < UNKNOWN or calls_device)
            self._launches_graph.append(calls_device and bool(_GRAPH_LAUNCH.search(key.name)))
        return number

    def change(self, number: int, kind: int, key: Key) -> None:
        """Change a key and its kind, which are known at the end of a trace only."""
        self.keys[number], self._kinds[number] = key, kind
        self._blocks_from_ns[number] = blocks_from_ns(kind, key.name)

    def kinds(self, keys: Keys) -> NDArray[np.int8]:
        """Return the kind of each event."""
        kinds: NDArray[np.int8] = np.frombuffer(self._kinds, np.int8)[keys]
        return kinds

    def blocks_from_ns(self, keys: Keys) -> Ints:
        """Return the least duration (ns) with which each event counts as blocking the host."""
        durations: Ints = np.frombuffer(self._blocks_from_ns, np.int64)[keys]
        return durations

    def correlates(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each event may have the number of a launch, see :class:`Rows`."""
        return np.frombuffer(self._correlates, np.bool_)[keys]

    def launches_graph(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each event launches a graph."""
        return np.frombuffer(self._launches_graph, np.bool_)[keys]

    def threads(self, keys: Keys) -> Keys:
        """Return the number of the thread, or of the stream, of each event."""
        return _numbered((key.pid, key.tid) for key in self.keys)[keys]

    def names(self, keys: Keys) -> Keys:
        """Return the number of each event's name; equal names have equal numbers."""
        return _numbered(key.name for key in self.keys)[keys]


def _numbered(values: Iterable[object]) -> Keys:
    """Return a number for each value; equal values have equal numbers."""
    numbers = defaultdict[object, int](count().__next__)
    return np.array([numbers[value] for value in values], np.int32)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, one part after the other; there may be no parts."""
    none = Rows(EMPTY, np.empty(0, np.int32), np.empty(0, np.int64))
    return Rows(*map(np.concatenate, zip(none, *parts, strict=True)))


def to_spans(events: Sequence[Event], base_ns: int) -> Spans:
    """Return begin and end of events (unix ns), exact to 1 ns."""
    begin_us = np.array([event.ts for event in events], dtype=np.float64)
    took_us = np.array([event.dur or 0.0 for event in events], dtype=np.float64)
    whole_us = np.floor(begin_us)
    rest_ns = np.rint((begin_us - whole_us) * 1000).astype(np.int64)
    begin = whole_us.astype(np.int64) * 1000 + rest_ns + base_ns
    return np.stack((begin, begin + np.rint(took_us * 1000).astype(np.int64)), axis=1)
