"""Reads the traces of one lane into columns, and reduces them to one :class:`Lane` per device.

A row is an event of work: its begin and end (ns), and its key. A key is a name, a thread and a
process group, and is classified once, however many events have it. Rows of devices are kept, 28
bytes each. Host rows are reduced to intervals chunk by chunk; after the first device event, no more
host rows are kept.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress, count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import StageSpan
from verl_profiling.slices.intervals import EMPTY, Ints, Spans, length, nested_times, union
from verl_profiling.slices.observed import Recording, extended, observed_by
from verl_profiling.steps.content import Limits
from verl_profiling.steps.kinds import (
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
    is_strange_iteration,
    kind_of,
    npu_kind,
    only_group,
    parse_iteration,
)
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.lost_work import GRAPH_LAUNCH, THINNEST_NS, bounded_ends, lost_kernels
from verl_profiling.steps.step import GRAPH_CAPTURE, Source, StepInputs
from verl_profiling.steps.trace import NO_ARGS, Event, Trace
from verl_profiling.units import duration

_CHUNK_BYTES = 2 << 20  # JSON per chunk: long arrays, but events stay in a CPU cache
_LONGEST_NAME = 40  # characters, of a device or a category
_MOST_CATEGORIES = 12  # that a sentence lists
_BETWEEN_DEVICES = ("nccl", "hccl", "xccl", "rccl")  # backends of torch.distributed
_MARKS = frozenset(("no category", "Trace", "user_annotation", "python_function", "overhead"))
_CALLS = ("runtime", "driver")  # how categories of calls that enqueue work on a device end
_CORRELATION = re.compile(rb'"correlation"\s*:\s*"?([1-9]\d{0,9})\b')  # of 32 bits; 0 is none
_IGNORED = -1  # number of the key of an event that is no work
_OF_A_STREAM = re.compile(rb'"(?:device|stream)"\s*:\s*"?\d')
_TASK_TYPE = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
_CALL_NUMBER = re.compile(
    r"_*_(\d+)_\d+_\d+$"
)  # the first number is the group of an NPU's collective
_COVERS = ("compute", "communication", "memory", "unrecognised")
_ON_DEVICE, _ON_HOST = (COMPUTE, COMMUNICATION, MEMORY, UNKNOWN), (HOST, HOST_COMMUNICATION)


Keys: TypeAlias = NDArray[np.int32]


class Key(NamedTuple):
    """Name, process, thread and process group of events."""

    name: str
    pid: object
    tid: object
    group: Group | None = None


class Rows(NamedTuple):
    """Events of a lane as columns: spans, numbers of the keys,
    numbers of the launches (0: none).
    """

    spans: Spans
    keys: Keys
    launches: Ints

    def of(self, wanted: NDArray[Any]) -> Rows:
        """Return the selected rows."""
        return Rows(self.spans[wanted], self.keys[wanted], self.launches[wanted])


class LaneJob(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a process that reads the traces of one lane.

    Attributes:
        sources: The traces.
        limits: Limits on reading each trace.
        communication: Regular expressions of further communication kernels.
        is_captured: Whether the step has a manifest.
        stages: The outermost stages of the lane, in order.
        marks: Names of the worker's stages: operators in traces of torch_npu, but no work.
        between: Begin and end of the step (unix ns), if the traces hold several steps.
        unrecorded: Kind of the lane's device, if the artifacts show that the device was in use but
            not recorded.
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
        has_stacks: Whether Python frames were recorded.
    """

    lanes: list[Lane] = []
    paths: list[Path] = []
    events: int = 0
    problems: list[str] = []
    notes: list[str] = []
    has_stacks: bool = False


def read_lane(job: LaneJob) -> LaneTraces:
    """Read the traces of one lane. Without a readable trace, or an event of known work,
    it has no lanes.
    """
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
        self._keys = [Key("", None, None)]  # numbers begin at 1
        # By number of the key; an event that correlates names the call that launched it, or is that
        # call.
        self._kinds, self._blocks_from = array("b", [NOTHING]), array("q", [0])
        self._correlates = array("b", [False])
        self._launches_graph = array("b", [False])
        self._calls = [
            np.empty((3, 0), np.int64)
        ]  # launches, their begins, and whether they launch graphs
        self._behind: list[Rows] = []  # device rows behind the step: of launches in the step
        self._numbers: dict[tuple[object, ...], int] = {}
        self._rows: list[Rows] = []  # device rows; until a device event is found, host rows
        self._host: list[Spans] = []
        self._blocked: list[Spans] = []
        self._iterations: list[tuple[int, ...]] = []
        self._names: dict[object, str] = {}  # device names by process
        self._labels: dict[object, str] = {}
        self._said: dict[
            tuple[str, object, object], str
        ] = {}  # this and the next two are of one trace
        self._tasks: dict[int, bytes] = {}  # task type by number of the key
        self._waiting: list[Rows] = []
        self._on_streams: set[object] = set()  # processes whose events name a device or a stream
        self._categories: set[str] = set()
        self._unknown: dict[str, None] = {}  # categories
        self._strange: dict[str, None] = {}  # annotations of an engine
        self._has_device = self._says_device = self._launches = self._works = False
        self._groups: set[Group | None] = set()
        self._recordings: list[Recording] = []
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
        if self._strange and self._job.sources[0].replica is not None:
            names = ", ".join(list(self._strange)[:_MOST_CATEGORIES])
            self._note(f"not understood, so not counted as iterations of the engine: {names}")
        rows = _joined(self._rows)
        self._rows.clear()
        calls = np.concatenate(self._calls, axis=1)
        graphs = calls[:2, calls[2] > 0]
        if self._has_device:
            rows = self._bounded(rows, graphs[0])
        devices = self._devices(rows)
        lane = Lane(
            source=self._job.sources[0],
            paths=self.found.paths,
            host=union(*self._host),
            blocked=union(*self._blocked),
            iterations=_outermost(np.array(self._iterations, np.int64).reshape(-1, 5)),
            on_device=True,
            is_one_of_several=len(devices) > 1,
        )
        if self._job.sources[0].role == GRAPH_CAPTURE:
            self._note(
                "recorded while graphs were captured, when launches run nothing: no busy or "
                "idle time"
            )
            lane.is_unknown = True
            return [lane]
        if devices:
            masks = ((name, np.isin(rows.keys, mine)) for name, mine in devices.items())
            found = ((name, rows if mask.all() else rows.of(mask)) for name, mask in masks)
            lane.is_unknown = self._lost_kernels(rows, graphs)
            return [
                self._reduced(mine, _ON_DEVICE, replace(lane, accelerator=name))
                for name, mine in found
            ]
        return self._of_host(lane, rows)

    def _of_host(self, lane: Lane, rows: Rows) -> list[Lane]:
        """Return the lane of a process without device events; none if it did no work."""
        unrecorded = self._job.unrecorded
        lost = f"has no event of {unrecorded}, although the device was in use" if unrecorded else ""
        if self._cut_off and (self._says_device or self._launches):
            lost = "ends before the first event of its device"
        if lost:
            files = ", ".join(self._cut_off or [path.name for path in self.found.paths])
            self.found.problems.append(f"{files} {lost}, so the work of the device is unknown")
            lane.is_unknown = True
            return [lane]
        if not self._works:
            self._without_work()
            return []
        if self._launches:
            self._note("kernels were launched, but none was recorded")
        rows = rows.of(self._kinds_of(rows.keys) > UNKNOWN)
        lane.on_device = False
        return [self._reduced(rows, _ON_HOST, lane)]

    def _read(self, source: Source) -> None:
        """Read one trace."""
        trace = Trace(source.file, self._job.limits, source.pids)
        self.found.paths.append(source.path)
        self._groups.add(only_group(trace.metadata.get("distributedInfo")))
        recording = Recording(limits=source.recorded_ns)
        self._recordings.append(recording)
        self._said.clear()
        self._tasks.clear()
        self._waiting.clear()
        try:
            for events in trace.chunks(_CHUNK_BYTES):
                self._add_names(events)
                self._add_chunk(events, trace.base_ns - source.offset_ns)
        finally:
            self._add_tasks()
            base_ns = trace.base_ns - source.offset_ns
            recording.holes = [(base_ns + a, base_ns + b) for a, b in trace.holes_ns]
            recording.is_cut_off = trace.truncated
            self.found.events += trace.events
            self.found.problems += [f"{source.path.name}: {warning}" for warning in trace.warnings]
            self.found.notes += [f"{source.path.name}: {note}" for note in trace.notes()]
        labels = {
            pid: label for (what, pid, _), label in self._said.items() if what == "process_labels"
        }
        self._labels = labels | self._labels
        for pid in {key.pid for key in self._keys}:
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
        """Add events; events without a category are kept until the names
        of their processes are known.
        """
        timed = [e for e in events if e.ph == "X" and e.cat not in NO_WORK and e.ts is not None]
        self._add_torch_spans(events, base_ns)
        self.found.has_stacks |= any(e.cat == "python_function" for e in events)
        if not (self._works or self._has_device):
            self._categories |= {e.cat for e in events if e.ph != "M"}
        known = self._numbers.get
        keys = np.array(
            [known((e.cat, e.name, e.pid, e.tid)) or self._number(e) for e in timed], np.int32
        )
        counted = keys != _IGNORED
        keys, timed = keys[counted], list(compress(timed, counted.tolist()))
        rows = Rows(to_spans(timed, base_ns), keys, self._launches_of(timed, keys))
        kinds = self._kinds_of(keys)
        calls = rows.of((rows.launches > 0) & (kinds > UNKNOWN))
        of_graphs = np.frombuffer(self._launches_graph, np.bool_)[calls.keys]
        self._calls.append(np.stack((calls.launches, calls.spans[:, 0], of_graphs)))
        self._has_device |= bool((kinds < UNKNOWN).any())
        task = kinds == NOTHING
        if task.any():
            self._waiting.append(rows.of(task))
            rows, kinds = rows.of(~task), kinds[~task]
        self._add(rows, kinds)

    def _add_torch_spans(self, events: list[Event], base_ns: int) -> None:
        """Extend the recording by torch's own spans."""
        spans = [e for e in events if e.cat == "Trace" and e.ph == "X" and e.ts is not None]
        recording = self._recordings[-1]
        recording.of_torch = extended(recording.of_torch, to_spans(spans, base_ns))

    def _launches_of(self, events: Sequence[Event], keys: Keys) -> Ints:
        """Return the number that a device's event shares with the host call
        which launched it, else 0.
        """
        found = np.zeros(len(events), np.int64)
        for place in np.flatnonzero(np.frombuffer(self._correlates, np.bool_)[keys]).tolist():
            if said := _CORRELATION.search(events[place].args):
                found[place] = int(said[1]) | len(self.found.paths) << 40
        return found

    def _number(self, event: Event) -> int:
        """Return the number of an event's key, and remember it;
        collectives have a group in each event.
        """
        if not event.cat:
            return self._task(event)
        kind, key = self._kind(event.cat, event.name), Key(event.name, event.pid, event.tid)
        if kind == COMMUNICATION or (kind == HOST_COMMUNICATION and not self._has_device):
            return self._new(kind, key._replace(group=group_of(event.name, event.args)))
        if kind == UNKNOWN:
            self._unknown[event.cat[:_LONGEST_NAME]] = None
            if _OF_A_STREAM.search(event.args):
                self._on_streams.add(event.pid)
        self._launches |= is_launch(event.cat, event.name)
        calls_device = event.cat.endswith(_CALLS)
        if is_strange_iteration(event.cat, event.name):
            self._strange[event.name[:_LONGEST_NAME]] = None
        number = _IGNORED if kind == NOTHING else self._new(kind, key, calls_device=calls_device)
        self._numbers[event.cat, event.name, event.pid, event.tid] = number
        return number

    def _new(self, kind: int, key: Key, *task: object, calls_device: bool = False) -> int:
        number = self._numbers.setdefault((kind, key, *task), len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
            self._kinds.append(kind)
            self._correlates.append(kind < UNKNOWN or calls_device)
            self._launches_graph.append(calls_device and bool(GRAPH_LAUNCH.search(key.name)))
            self._blocks_from.append(blocks_from_ns(kind, key.name))
        return number

    def _task(self, event: Event) -> int:
        """Return the key number of an event without category,
        whose kind is known at the end of the trace.
        """
        found = _TASK_TYPE.search(event.args)
        call = _CALL_NUMBER.search(event.name)
        name = event.name[: call.start()] if call else event.name
        group = Group("", call[1], 0) if call and name.startswith("hcom_") else None
        task = (len(self.found.paths), found[1] if found else b"")
        number = self._new(NOTHING, Key(name, event.pid, event.tid, group), *task)
        self._tasks[number] = task[1]
        return number

    def _add_tasks(self) -> None:
        """Add the kept events without a category, with the names of their processes."""
        for number, task_type in self._tasks.items():
            name, pid, tid, group = self._keys[number]
            process = self._said.get(("process_name", pid, None), "")
            thread = self._said.get(("thread_name", pid, tid), "")
            kind = npu_kind(process, pid, thread, name, task_type.decode("utf-8", "replace"))
            self._keys[number] = Key(name, pid, tid, group_of(name, NO_ARGS) or group)
            self._kinds[number], self._blocks_from[number] = kind, blocks_from_ns(kind, name)
            self._names[pid] = self._said.get(("process_labels", pid, None)) or "device"
        rows = _joined(self._waiting)
        kinds = self._kinds_of(rows.keys)
        self._has_device |= bool((kinds < UNKNOWN).any())
        self._add(rows.of(kinds != NOTHING), kinds[kinds != NOTHING])

    def _add(self, rows: Rows, kinds: NDArray[np.int8]) -> None:
        """Keep device rows; reduce host rows to the times of work and of blocking calls."""
        on_host = (kinds > UNKNOWN) & (kinds < ITERATION)
        self._works |= bool(on_host.any())
        self._recordings[-1].add_work(rows.spans[on_host], on_device=False)
        self._recordings[-1].add_work(rows.spans[kinds <= UNKNOWN], on_device=True)
        if self._job.between is not None:
            begin_ns, end_ns = self._job.between
            iteration = kinds == ITERATION  # belongs to the step in which it begins
            inside = (rows.spans[:, 0] < end_ns) & (rows.spans[:, 1] > begin_ns)
            inside &= (rows.spans[:, 0] >= begin_ns) | ~iteration
            is_behind = (rows.spans[:, 0] >= end_ns) & (kinds <= UNKNOWN) & (rows.launches > 0)
            self._behind.append(rows.of(is_behind))
            clipped = np.where(
                iteration[:, None], rows.spans, np.clip(rows.spans, begin_ns, end_ns)
            )
            rows = rows._replace(spans=clipped).of(inside)
            kinds, on_host = kinds[inside], on_host[inside]
        for place in np.flatnonzero(kinds == ITERATION).tolist():
            if tokens := parse_iteration(self._keys[rows.keys[place]].name):
                self._iterations.append((*rows.spans[place].tolist(), *tokens))
        spans = rows.spans[on_host]
        self._host.append(union(spans))
        least = np.frombuffer(self._blocks_from, np.int64)[rows.keys[on_host]]
        self._blocked.append(union(spans[spans[:, 1] - spans[:, 0] >= least]))
        self._rows.append(rows.of(kinds <= UNKNOWN if self._has_device else kinds < ITERATION))

    def _devices(self, rows: Rows) -> dict[str, list[int]]:
        """Return the numbers of each device's keys by its name;
        add a note on events of unknown category.
        """
        known, unknown = defaultdict[object, list[int]](list), defaultdict[object, list[int]](list)
        for number in np.flatnonzero(np.bincount(rows.keys)).tolist():
            kind, pid = self._kinds[number], self._keys[number].pid
            if kind <= UNKNOWN:
                (unknown if kind == UNKNOWN else known)[pid].append(number)
        owners = defaultdict[str, list[int]](list)
        named = {pid: self._names.get(pid, "") for pid in (*known, *unknown)}
        for pid, name in sorted(
            named.items(), key=lambda item: (len(item[1]), item[1])
        ):  # GPU 9, GPU 10
            if pid in unknown:
                label = self._labels.get(pid, "")
                if not (
                    pid in known or _is_device(label) or (not label and pid in self._on_streams)
                ):
                    continue
                unknown_ns = length(union(rows.spans[np.isin(rows.keys, unknown[pid])]))
                how = "not counted beside known work" if pid in known else "counted as unrecognised"
                categories = ", ".join(list(self._unknown)[:_MOST_CATEGORIES])
                self._note(
                    f"{name} has {duration(unknown_ns / 1e9)} of events "
                    f"of unknown categories ({categories}): {how}"
                )
            owners[name] += known.get(pid) or unknown[pid]
        return owners

    def _bounded(self, rows: Rows, graphs: Ints) -> Rows:
        """Return the rows with impossible ends moved to the next begin on the stream,
        and note how many.
        """
        # Copies of NPUs overlap, and so may collectives of several groups.
        computing = (self._kinds_of(rows.keys) == COMPUTE) & (
            np.diff(rows.spans)[:, 0] >= THINNEST_NS
        )
        if not computing.any():
            return rows
        kernels = rows.of(computing)
        of_graphs = kernels.launches * np.isin(kernels.launches, graphs)
        cut_ns = kernels.spans[:, 1] - bounded_ends(
            kernels.spans, self._threads()[kernels.keys], of_graphs
        )
        if not cut_ns.any():
            return rows
        self._note(
            f"{np.count_nonzero(cut_ns):,} kernels run over the next kernel of their stream, by "
            f"{duration(int(cut_ns.sum()) / 1e9)} in all: each is taken to end where the "
            "next begins"
        )
        spans = rows.spans.copy()
        spans[computing, 1] -= cut_ns
        return rows._replace(spans=spans)

    def _lost_kernels(self, rows: Rows, graphs: Ints) -> bool:
        """Return whether graph launches lost kernels, so that the work of the device is unknown."""
        events = _joined([rows, *self._behind])
        events = events.of(self._kinds_of(events.keys) <= UNKNOWN)
        numbers, begins = graphs
        # Launches behind that of the last recorded event may be still in flight at the end of the
        # recording.
        wanted = begins <= self._launched(events).max()
        if self._job.between is not None:
            begin_ns, end_ns = self._job.between
            wanted &= (begins >= begin_ns) & (begins < end_ns)
        by_name = defaultdict[str, int](count().__next__)
        names = np.array([by_name[key.name] for key in self._keys], np.int32)[events.keys]
        lost = lost_kernels(np.unique(numbers[wanted]), events.launches, names)
        if lost:
            self.found.problems.append(
                f"{self.found.paths[0].name}: {lost}, so the work of the device is unknown"
            )
        return bool(lost)

    def _threads(self) -> Keys:
        """Return the number of the thread, or of the stream, of each key."""
        threads = defaultdict[tuple[object, object], int](count().__next__)
        return np.array([threads[key.pid, key.tid] for key in self._keys], np.int32)

    def _reduced(self, rows: Rows, kinds: Sequence[int], lane: Lane) -> Lane:
        """Return a lane with its rows reduced to the time of each kind, the collectives and the
        operators.

        Args:
            rows: The rows.
            kinds: The kinds of computation, communication, copies and unrecognised work.
            lane: The lane.
        """
        only = next(iter(self._groups)) if len(self._groups) == 1 else None
        kind_of_row = self._kinds_of(rows.keys)
        of_kinds = zip(_COVERS, kinds, strict=False)
        covers: Any = {name: union(rows.spans[kind_of_row == kind]) for name, kind in of_kinds}
        called: dict[tuple[str, Group], list[int]] = defaultdict(list)  # numbers of keys
        runs = rows.of(kind_of_row == kinds[1])
        runs = runs.of(np.argsort(runs.spans[:, 0], kind="stable"))
        for number in np.unique(runs.keys).tolist():
            key = self._keys[number]
            called[key.name, key.group or only or Group()].append(number)
        reduced = replace(
            lane,
            **covers,
            collectives={
                call: runs.spans[np.isin(runs.keys, mine)] for call, mine in called.items()
            },
            ops=self._ops(rows),
        )
        reduced.observed = observed_by(
            self._recordings,
            reduced.busy,
            on_device=lane.on_device,
            is_plain=not self._job.is_captured,
        )
        return reduced

    def _ops(self, rows: Rows) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and self time (ns) by name and by the stage in
        which a call is launched, or begins.
        """
        own = nested_times(rows.spans, self._threads()[rows.keys])
        edges = np.array(
            [(stage.begin_ns, stage.end_ns) for stage in self._stages], np.int64
        ).reshape(-1, 2)
        begins = self._launched(rows)
        at = np.searchsorted(edges[:, 0], begins, side="right") - 1
        inside = (at >= 0) & (begins < np.append(edges[:, 1], 0)[at])
        stages = np.where(inside, at, len(edges))
        places, inverse = np.unique(stages * len(self._keys) + rows.keys, return_inverse=True)
        totals = zip(
            places.tolist(), np.bincount(inverse).tolist(), np.bincount(inverse, own), strict=True
        )
        ops: dict[tuple[str, str], tuple[int, int]] = {}
        names = [*(stage.name for stage in self._stages), ""]
        for place, calls, self_ns in totals:
            stage, number = divmod(place, len(self._keys))
            name = (names[stage], self._keys[number].name)
            before = ops.get(name, (0, 0))  # a stage may run twice
            ops[name] = (before[0] + calls, before[1] + int(self_ns))
        return ops

    def _launched(self, rows: Rows) -> Ints:
        """Return when the host launched each event (unix ns);
        without a recorded launch, its begin.
        """
        calls = np.concatenate(self._calls, axis=1)
        calls = calls[:, np.argsort(calls[0])]
        place = np.searchsorted(calls[0], rows.launches)
        found = np.append(calls[0], -1)[place] == rows.launches
        return np.where(found, np.append(calls[1], 0)[place], rows.spans[:, 0])

    def _kinds_of(self, keys: Keys) -> NDArray[np.int8]:
        kinds: NDArray[np.int8] = np.frombuffer(self._kinds, np.int8)[keys]
        return kinds

    def _note(self, sentence: str) -> None:
        self.found.notes.append(f"{self.found.paths[0].name}: {sentence}")

    def _without_work(self) -> None:
        """Note that no operator ran if the traces are whole; for example, a front end runs none."""
        path = self.found.paths[0]
        found = {category[:_LONGEST_NAME] or "no category" for category in self._categories}
        if "Trace" in found and found <= _MARKS:
            text = "the process ran no operator during the recording"
        else:
            named = ", ".join(sorted(found)[:_MOST_CATEGORIES])
            text = f"no event is work of a device or an operator, only {named}"
        if found and not self.found.problems:
            self._note(text)
            return
        self.found.problems.append(
            str(TraceFormatError(path, text if found else "holds no events"))
        )
        self.found.paths.clear()


def _joined(parts: Sequence[Rows]) -> Rows:
    none = Rows(EMPTY, np.empty(0, np.int32), np.empty(0, np.int64))
    return Rows(*(np.concatenate(column) for column in zip(none, *parts, strict=True)))


def _outermost(iterations: Ints) -> Ints:
    """Return the iterations that are inside no other one:
    SGLang may annotate an iteration twice.
    """
    iterations = iterations[np.lexsort((-iterations[:, 1], iterations[:, 0]))]
    latest = np.maximum.accumulate(iterations[:, 1])
    keep = np.ones(len(iterations), np.bool_)
    keep[1:] = iterations[1:, 1] > latest[:-1]
    outermost: Ints = iterations[keep]
    return outermost


def to_spans(events: Sequence[Event], base_ns: int) -> Spans:
    """Return begin and end of events (unix ns), exact to 1 ns."""
    begin_us = np.array([event.ts for event in events], dtype=np.float64)
    took_us = np.array([event.dur or 0.0 for event in events], dtype=np.float64)
    whole_us = np.floor(begin_us)
    begin = whole_us.astype(np.int64) * 1000 + np.rint((begin_us - whole_us) * 1000).astype(
        np.int64
    )
    begin += base_ns
    return np.stack((begin, begin + np.rint(took_us * 1000).astype(np.int64)), axis=1)


def _is_device(label: str) -> bool:
    """Return whether the label of a process entry is a device's."""
    return bool(label) and not label.upper().startswith("CPU")


def _device_name(pid: object, label: str) -> str:
    """Return the name of the device of a process entry: the label, or the number."""
    name = (
        label
        if _is_device(label)
        else f"GPU {pid}"
        if isinstance(pid, int)
        else str(pid or "device")
    )
    return name[:_LONGEST_NAME]


def _says_device(trace: Trace) -> bool:
    """Return whether the header of a trace lists a device, or a device backend such as NCCL."""
    backend = str(trace.metadata.get("distributedInfo")).lower()
    return bool(trace.metadata.get("deviceProperties")) or any(
        name in backend for name in _BETWEEN_DEVICES
    )
