"""Reads the traces of one lane into columns, and reduces them to one :class:`Lane` per device.

A row is an event of work: its begin and end (ns), its key and its thread. A key is a kind, a name and a
process group, and is classified once, however many events have it. Rows of devices are kept, 24 bytes each.
Host rows are reduced to intervals chunk by chunk, and dropped when a device event is found.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress, count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import EMPTY, Spans, length, nested_times, union
from verl_profiling.report.kinds import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    HOST_COMMUNICATION,
    ITERATION,
    MEMORY,
    NO_WORK,
    NOTHING,
    UNKNOWN,
    Group,
    blocks_from_ns,
    communicates,
    group_of,
    is_launch,
    kind_of,
    npu_kind,
    only_group,
    parse_iteration,
)
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.timeline.trace import NO_ARGS, Event, Limits, Trace
from verl_profiling.units import duration

_CHUNK_BYTES = 2 << 20  # JSON per chunk: long arrays, but events stay in a CPU cache
_LONGEST_NAME = 40  # characters, of a device or a category
_MOST_CATEGORIES = 12  # that a sentence lists
_BETWEEN_DEVICES = ("nccl", "hccl", "xccl", "rccl")  # backends of torch.distributed
_MARKS = frozenset(("no category", "Trace", "user_annotation", "python_function", "overhead"))
_NEW = -1  # number of a new key
_NEVER = 1 << 62  # a duration (ns) longer than any other
_OF_A_STREAM = re.compile(rb'"(?:device|stream)"\s*:\s*"?\d')
_TASK_TYPE = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
_CALL_NUMBER = re.compile(r"_*_(\d+)_\d+_\d+$")  # the first number is the group of an NPU's collective
_COVERS = ("compute", "communication", "memory", "unrecognised")
_ON_DEVICE, _ON_HOST = (COMPUTE, COMMUNICATION, MEMORY, UNKNOWN), (HOST, HOST_COMMUNICATION)


class Key(NamedTuple):
    """Kind, name and process group of events; events of at least ``blocks_from`` ns block the host."""

    kind: int
    name: str = ""
    group: Group | None = None
    blocks_from: int = _NEVER


class Rows(NamedTuple):
    """Events of a lane as columns: spans, numbers of the keys, numbers of the threads."""

    spans: Spans
    keys: NDArray[np.int32]
    threads: NDArray[np.int32]

    def of(self, wanted: NDArray[Any]) -> Rows:
        """Return the selected rows."""
        return Rows(*(column[wanted] for column in self))


_NO_ROWS = Rows(EMPTY, np.empty(0, np.int32), np.empty(0, np.int32))


class LaneJob(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a process that reads the traces of one lane.

    Attributes:
        sources: The traces.
        limits: Limits on reading each trace.
        communication: Regular expressions of further communication kernels.
        is_captured: Whether the step has a manifest.
        stages: The outermost stages of the lane, in order.
        marks: Names of the worker's stages, which are operators in traces of torch_npu.
        between: Begin and end of the step (unix ns), if the traces hold several steps.
        unrecorded: Kind of the lane's device, if the artifacts show that the device was in use but not
            recorded.
    """

    sources: list[Source]
    limits: Limits
    communication: tuple[str, ...]
    is_captured: bool
    stages: list[StageSpan]
    marks: set[str]
    between: tuple[int, int] | None
    unrecorded: str


def lane_job(sources: list[Source], step: Step, inputs: StepInputs) -> LaneJob:
    """Return the inputs for the traces of one lane of a step."""
    workers = [worker for worker in step.workers if worker.name == sources[0].worker]
    return LaneJob(
        sources=sources,
        limits=inputs.limits,
        communication=inputs.communication,
        is_captured=step.manifest is not None,
        stages=step.stages_of(sources[0]),
        marks={span.name for worker in workers for span in worker.stages},
        between=(step.begin_ns, step.end_ns) if inputs.capture else None,
        unrecorded=step.unrecorded_device(sources[0]),
    )


class LaneTraces(msgspec.Struct, kw_only=True):
    """The content of the traces of one lane.

    Attributes:
        lanes: One lane per device, or the host's lane if there is no device.
        paths: The readable traces.
        events: Number of events read.
        problems: Sentences on unreadable parts.
        notes: Sentences on limits of the report's numbers.
    """

    lanes: list[Lane] = []
    paths: list[Path] = []
    events: int = 0
    problems: list[str] = []
    notes: list[str] = []


def read_lane(job: LaneJob) -> LaneTraces:
    """Read the traces of one lane. Without a readable trace, or an event of known work, it has no lanes."""
    reader = _LaneReader(job)
    reader.found.lanes = reader.lanes()
    return reader.found


class _LaneReader:
    """Reads the traces of one lane, and collects their rows."""

    def __init__(self, job: LaneJob) -> None:
        self.found = LaneTraces()
        self._job, self._stages = job, job.stages
        check = communicates(job.communication)
        self._kind = cache(
            lambda category, name: NOTHING if name in job.marks else kind_of(category, name, check)
        )
        self._keys: list[Key] = []
        self._numbers: dict[Any, int] = {}
        self._ignored = self._new(Key(NOTHING))
        self._threads: dict[tuple[object, object], int] = defaultdict(count().__next__)
        self._rows: list[Rows] = []  # device rows; until a device event is found, host rows
        self._host: list[Spans] = []
        self._blocked: list[Spans] = []
        self._iterations: list[tuple[int, ...]] = []
        self._names: dict[object, str] = {}  # device names by process
        self._labels: dict[object, str] = {}
        self._said: dict[tuple[str, object, object], str] = {}  # of one trace, like the next two
        self._tasks: dict[int, tuple[object, object, str]] = {}  # by number of the key
        self._waiting: list[Rows] = []
        self._on_streams: set[object] = set()  # processes with a device or a stream in arguments
        self._categories: set[str] = set()
        self._unknown: dict[str, None] = {}  # categories
        self._has_device = self._says_device = self._launches = self._works = False
        self._groups: set[Group | None] = set()
        self._cut_off: list[str] = []

    def lanes(self) -> list[Lane]:
        """Read the traces; return one lane per device, or the host's lane if there is no device."""
        for source in self._job.sources:
            try:
                self._read(source)
            except TraceFormatError as error:
                self.found.problems.append(str(error))
        if not self.found.paths:
            return []
        rows = _joined(self._rows)
        self._rows.clear()
        kinds = self._kinds_of(rows.keys)
        devices = list(self._devices(rows, kinds))
        lane = Lane(
            source=self._job.sources[0],
            paths=self.found.paths,
            host=union(*self._host),
            blocked=union(*self._blocked),
            iterations=np.array(self._iterations, np.int64).reshape(-1, 4),
            on_device=True,
            is_one_of_several=len(devices) > 1,
        )
        if devices:
            found = ((rows if mine.all() else rows.of(mine), name) for name, mine in devices)
            return [self._reduced(mine, _ON_DEVICE, replace(lane, accelerator=name)) for mine, name in found]
        unrecorded = self._job.unrecorded
        lost = f"has no event of {unrecorded}, although the device was in use" if unrecorded else ""
        if self._cut_off and (self._says_device or self._launches):
            lost = "ends before the first event of its device"
        if lost:
            files = ", ".join(self._cut_off or [path.name for path in self.found.paths])
            self.found.problems.append(f"{files} {lost}, so the work of the device is unknown")
            return [replace(lane, is_unknown=True)]
        if not self._works:
            self._without_work()
            return []
        if self._launches:
            self._note("kernels were launched, but none was recorded")
        return [self._reduced(rows.of(kinds > UNKNOWN), _ON_HOST, replace(lane, on_device=False))]

    def _read(self, source: Source) -> None:
        """Read one trace."""
        trace = Trace(source.file, self._job.limits)
        self.found.paths.append(source.path)
        self._groups.add(only_group(trace.metadata.get("distributedInfo")))
        self._said.clear()
        self._tasks.clear()
        self._waiting.clear()
        try:
            for events in trace.chunks(_CHUNK_BYTES):
                self._add_names(events)
                self._add_chunk(events, trace.base_ns - source.offset_ns)
        finally:
            self._add_tasks()
            self.found.events += trace.events
            self.found.problems += [f"{source.path.name}: {warning}" for warning in trace.warnings]
        labels = {pid: label for (what, pid, _), label in self._said.items() if what == "process_labels"}
        self._labels = labels | self._labels
        for pid, _ in self._threads:
            self._names.setdefault(pid, _device_name(pid, labels.get(pid, "")))
        self._says_device |= _says_device(trace) or any(map(_is_device, labels.values()))
        if trace.truncated:
            self._cut_off.append(source.path.name)

    def _add_names(self, events: Iterable[Event]) -> None:
        """Add names of processes and threads; of a repeated name, the first is kept."""
        for event in events:
            if event.ph == "M" and event.name in ("process_name", "process_labels", "thread_name"):
                key = (event.name, event.pid, event.tid if event.name == "thread_name" else None)
                if key not in self._said:
                    said = event.said("labels" if event.name == "process_labels" else "name")
                    self._said[key] = said[:_LONGEST_NAME]

    def _add_chunk(self, events: list[Event], base_ns: int) -> None:
        """Add events; events without a category are kept until the names of their processes are known."""
        timed = [e for e in events if e.ph == "X" and e.cat not in NO_WORK and e.ts is not None]
        if not (self._works or self._has_device):
            self._categories |= {e.cat for e in events if e.ph != "M"}
        keys = np.array([self._numbers.get((e.cat, e.name), _NEW) for e in timed], np.int32)
        for place in np.flatnonzero(keys == _NEW).tolist():
            event = timed[place]
            known = self._numbers.get((event.cat, event.name))
            keys[place] = known or (self._number(event) if event.cat else self._task(event))
        if (counted := keys != self._ignored).sum() < len(keys):
            keys, timed = keys[counted], list(compress(timed, counted.tolist()))
        kinds = self._kinds_of(keys)
        self._has_device |= bool((kinds < UNKNOWN).any())
        threads = np.zeros(len(keys), np.int32)
        wanted = (kinds <= UNKNOWN) | (kinds == NOTHING) | (not self._has_device)
        threads[wanted] = [self._threads[e.pid, e.tid] for e in compress(timed, wanted.tolist())]
        rows = Rows(to_spans(timed, base_ns), keys, threads)
        task = kinds == NOTHING
        if task.any():
            self._waiting.append(rows.of(task))
            rows, kinds = rows.of(~task), kinds[~task]
        self._add(rows, kinds)

    def _number(self, event: Event) -> int:
        """Return the number of an event's key; collectives have their process group in each event."""
        kind = self._kind(event.cat, event.name)
        if kind == COMMUNICATION or (kind == HOST_COMMUNICATION and not self._has_device):
            return self._new(Key(kind, event.name, group_of(event.name, event.args)))
        number = self._ignored if kind == NOTHING else self._new(_key(kind, event.name))
        if kind == UNKNOWN:
            self._unknown[event.cat[:_LONGEST_NAME]] = None
            if _OF_A_STREAM.search(event.args):
                self._on_streams.add(event.pid)
        self._launches |= is_launch(event.cat, event.name)
        self._numbers[event.cat, event.name] = number
        return number

    def _new(self, key: Key) -> int:
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number

    def _task(self, event: Event) -> int:
        """Return the key number of an event without category; the end of the trace tells its kind."""
        found = _TASK_TYPE.search(event.args)
        call = _CALL_NUMBER.search(event.name)
        name = event.name[: call.start()] if call else event.name
        group = call[1] if call and name.startswith("hcom_") else ""
        place = (len(self.found.paths), event.pid, event.tid, name, found[1] if found else b"", group)
        number = self._numbers.setdefault(place, len(self._keys))
        if number == len(self._keys):
            known = group_of(name, NO_ARGS) or (Group("", group, 0) if group else None)
            self._keys.append(Key(NOTHING, name, known))
            self._tasks[number] = (event.pid, event.tid, place[4].decode("utf-8", "replace"))
        return number

    def _add_tasks(self) -> None:
        """Add the kept events without a category, with the names of their processes."""
        for number, (pid, tid, task_type) in self._tasks.items():
            process = self._said.get(("process_name", pid, None), "")
            thread = self._said.get(("thread_name", pid, tid), "")
            key = self._keys[number]
            kind = npu_kind(process, pid, thread, key.name, task_type)
            self._keys[number] = _key(kind, key.name, key.group)
            self._names[pid] = self._said.get(("process_labels", pid, None)) or "device"
        rows = _joined(self._waiting)
        kinds = self._kinds_of(rows.keys)
        self._has_device |= bool((kinds < UNKNOWN).any())
        self._add(rows.of(kinds != NOTHING), kinds[kinds != NOTHING])

    def _add(self, rows: Rows, kinds: NDArray[np.int8]) -> None:
        """Keep device rows; reduce host rows to the times of work and of blocking calls."""
        on_host = (kinds > UNKNOWN) & (kinds < ITERATION)
        self._works |= bool(on_host.any())
        if self._job.between is not None:
            begin_ns, end_ns = self._job.between
            iteration = kinds == ITERATION  # belongs to the step in which it begins
            inside = (rows.spans[:, 0] < end_ns) & (rows.spans[:, 1] > begin_ns)
            inside &= (rows.spans[:, 0] >= begin_ns) | ~iteration
            clipped = np.where(iteration[:, None], rows.spans, np.clip(rows.spans, begin_ns, end_ns))
            rows = rows._replace(spans=clipped).of(inside)
            kinds, on_host = kinds[inside], on_host[inside]
        for place in np.flatnonzero(kinds == ITERATION).tolist():
            if tokens := parse_iteration(self._keys[rows.keys[place]].name):
                self._iterations.append((*rows.spans[place].tolist(), *tokens))
        spans = rows.spans[on_host]
        self._host.append(union(spans))
        least = np.array([key.blocks_from for key in self._keys])[rows.keys[on_host]]
        self._blocked.append(union(spans[spans[:, 1] - spans[:, 0] >= least]))
        self._rows.append(rows.of(kinds <= UNKNOWN if self._has_device else kinds < ITERATION))

    def _devices(self, rows: Rows, kinds: NDArray[Any]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Yield each device's name and a mask of its rows; add a note on events of unknown category."""
        pids = [pid for pid, _ in self._threads]
        numbers = {pid: number for number, pid in enumerate(dict.fromkeys(pids))}
        pid_of = np.array([numbers[pid] for pid in pids], np.int32)[rows.threads]
        known, unknown = (
            set(np.unique(pid_of[those]).tolist()) for those in (kinds < UNKNOWN, kinds == UNKNOWN)
        )
        counted = (kinds < UNKNOWN) | ((kinds == UNKNOWN) & ~np.isin(pid_of, list(known)))
        owners: dict[str, list[int]] = defaultdict(list)
        named = {pid: self._names.get(pid, "") for pid in numbers}
        for pid, name in sorted(named.items(), key=lambda item: (len(item[1]), item[1])):  # GPU 9, GPU 10
            number, label = numbers[pid], self._labels.get(pid, "")
            if number in unknown:
                if not (number in known or _is_device(label) or (not label and pid in self._on_streams)):
                    continue
                unknown_ns = length(union(rows.spans[(pid_of == number) & (kinds == UNKNOWN)]))
                how = "not counted, beside kernels" if number in known else "counted as unrecognised"
                categories = ", ".join(list(self._unknown)[:_MOST_CATEGORIES])
                self._note(
                    f"{name} has {duration(unknown_ns / 1e9)} of events "
                    f"of unknown categories ({categories}): {how}"
                )
            elif number not in known:
                continue
            owners[name].append(number)
        for name, mine in owners.items():
            yield name, counted & np.isin(pid_of, mine)

    def _reduced(self, rows: Rows, kinds: Sequence[int], lane: Lane) -> Lane:
        """Return a lane with its rows reduced to the time of each kind, the collectives and the operators.

        Args:
            rows: The rows.
            kinds: The kinds of computation, communication, copies and unrecognised work.
            lane: The lane.
        """
        only = next(iter(self._groups)) if len(self._groups) == 1 else None
        kind_of_row = self._kinds_of(rows.keys)
        covers: dict[str, Any] = {}
        for name, kind in zip(_COVERS, kinds, strict=False):
            covers[name] = union(rows.spans[kind_of_row == kind])
        called: dict[tuple[str, Group], list[int]] = defaultdict(list)  # numbers of keys
        runs = rows.of(kind_of_row == kinds[1])
        runs = runs.of(np.argsort(runs.spans[:, 0], kind="stable"))
        for number in np.unique(runs.keys).tolist():
            key = self._keys[number]
            called[key.name, key.group or only or Group()].append(number)
        return replace(
            lane,
            **covers,
            collectives={call: runs.spans[np.isin(runs.keys, mine)] for call, mine in called.items()},
            ops=self._ops(rows),
        )

    def _ops(self, rows: Rows) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and self time (ns) by name and by the stage in which a call begins."""
        own = nested_times(rows.spans, rows.threads)
        edges = np.array([(stage.begin_ns, stage.end_ns) for stage in self._stages], np.int64).reshape(-1, 2)
        at = np.searchsorted(edges[:, 0], rows.spans[:, 0], side="right") - 1
        inside = (at >= 0) & (rows.spans[:, 0] < np.append(edges[:, 1], 0)[at])
        stages = np.where(inside, at, len(edges))
        places, inverse = np.unique(stages * len(self._keys) + rows.keys, return_inverse=True)
        totals = zip(places.tolist(), np.bincount(inverse).tolist(), np.bincount(inverse, own), strict=True)
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for place, calls, self_ns in totals:
            stage, number = divmod(place, len(self._keys))
            name = (self._stages[stage].name if stage < len(edges) else "", self._keys[number].name)
            before = found.get(name, (0, 0))  # a stage may run twice
            found[name] = (before[0] + calls, before[1] + int(self_ns))
        return found

    def _kinds_of(self, keys: NDArray[np.int32]) -> NDArray[np.int8]:
        return np.array([key.kind for key in self._keys], np.int8)[keys]

    def _note(self, sentence: str) -> None:
        self.found.notes.append(f"{self.found.paths[0].name}: {sentence}")

    def _without_work(self) -> None:
        """Note that traces hold no work; for a complete torch trace, note that nothing ran."""
        path = self.found.paths[0]
        found = {category[:_LONGEST_NAME] or "no category" for category in self._categories}
        if "Trace" in found and found <= _MARKS and not self.found.problems:
            said = f"{path.name}: the process ran no operator during the recording"
            (self.found.notes if self._job.is_captured else self.found.problems).append(said)
            return
        named = ", ".join(sorted(found)[:_MOST_CATEGORIES])
        text = f"no event is work of a device or an operator, only {named}"
        self.found.problems.append(str(TraceFormatError(path, text if found else "holds no events")))
        self.found.paths.clear()


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate(column) for column in zip(_NO_ROWS, *parts, strict=True)))


def _key(kind: int, name: str, group: Group | None = None) -> Key:
    waits = blocks_from_ns(name) if kind == HOST else None
    return Key(kind, name, group, _NEVER if waits is None else waits)


def to_spans(events: Sequence[Event], base_ns: int) -> Spans:
    """Return begin and end of events (unix ns), exact to 1 ns."""
    begin_us = np.array([event.ts for event in events], dtype=np.float64)
    took_us = np.array([event.dur or 0.0 for event in events], dtype=np.float64)
    whole_us = np.floor(begin_us)
    begin = whole_us.astype(np.int64) * 1000 + np.rint((begin_us - whole_us) * 1000).astype(np.int64)
    begin += base_ns
    return np.stack((begin, begin + np.rint(took_us * 1000).astype(np.int64)), axis=1)


def _is_device(label: str) -> bool:
    """Return whether the label of a process entry is a device's."""
    return bool(label) and not label.upper().startswith("CPU")


def _device_name(pid: object, label: str) -> str:
    """Return the name of the device of a process entry: the label, or the number."""
    name = label if _is_device(label) else f"GPU {pid}" if isinstance(pid, int) else str(pid or "device")
    return name[:_LONGEST_NAME]


def _says_device(trace: Trace) -> bool:
    """Return whether the header of a trace lists a device, or a device backend such as NCCL."""
    backend = str(trace.metadata.get("distributedInfo")).lower()
    return bool(trace.metadata.get("deviceProperties")) or any(name in backend for name in _BETWEEN_DEVICES)
