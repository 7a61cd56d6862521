"""Reads the traces of one lane into columns.

A row is an event of work: begin and end (ns), the number of its key, and the number of its launch.
A key is name, thread and process group (see :class:`~verl_profiling.steps.event_rows.Key`). All
rows of devices are kept, 28 bytes each. Host rows are reduced to intervals chunk by chunk; after
the first device event, no more host rows are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import compress
from pathlib import Path

import msgspec
import numpy as np

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.engine_iterations import attention_of, is_like_iteration, parse_iteration
from verl_profiling.manifest import StageSpan
from verl_profiling.slices.intervals import Ints, Spans, union
from verl_profiling.slices.observed import Recording, extended
from verl_profiling.steps.event_rows import Key, Keys, KeyTable, Rows, joined, to_spans
from verl_profiling.steps.kinds import (
    COMMUNICATION,
    HOST_COMMUNICATION,
    ITERATION,
    NO_WORK,
    NOTHING,
    UNKNOWN,
    Group,
    communicates,
    group_and_bytes,
    is_launch,
    kind_of,
    npu_kind,
    only_group,
)
from verl_profiling.steps.lanes import Lane
from verl_profiling.steps.messages import Entered, entered_in
from verl_profiling.steps.step import Source
from verl_profiling.steps.trace import NO_ARGS, Event, Trace
from verl_profiling.steps.trace_content import Limits

_CHUNK_BYTES = 1 << 20  # JSON per chunk: long arrays, but events stay in a CPU cache
LONGEST_NAME = 40
"""Largest number of characters in names of devices and categories; the rest is cut off."""
_BETWEEN_DEVICES = ("nccl", "hccl", "xccl", "rccl")  # torch.distributed's backends on accelerators
_CALLS = ("runtime", "driver")  # ends of the categories of calls that enqueue work on a device
_CORRELATION = re.compile(rb'"correlation"\s*:\s*"?([1-9]\d{0,9})\b')  # of 32 bits; 0 is none
_IGNORED = -1  # number of the key of an event that is no work
_OF_A_STREAM = re.compile(rb'"(?:device|stream)"\s*:\s*"?\d')
_TASK_TYPE = re.compile(rb'"Task Type"\s*:\s*"([^"]*)"')
# the first number is the group of an NPU's collective
_CALL_NUMBER = re.compile(r"_*_(\d+)_\d+_\d+$")


class LaneJob(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs for reading the traces of one lane, which may happen in another process.

    Attributes:
        sources: The traces.
        limits: Limits on reading each trace.
        communication: Regular expressions for names of further communication kernels.
        is_captured: Whether the step has a manifest.
        stages: The outermost stages of the lane, in order.
        marks: Names of the worker's stages. Traces of torch_npu have them as operators, but they
            are no work.
        between: Begin and end of the step (unix ns), if the traces hold several steps.
        unrecorded: Kind of a device, e.g. ``cuda``, that the process used but did not record; else
            empty.
    """

    sources: list[Source]
    limits: Limits
    communication: tuple[str, ...]
    is_captured: bool
    stages: list[StageSpan]
    marks: set[str]
    between: tuple[int, int] | None
    unrecorded: str


class LaneTraces(msgspec.Struct, kw_only=True):
    """The content of the traces of one lane.

    Attributes:
        lanes: One lane per device, or the host's lane if there is no device.
        paths: The readable traces.
        events: Number of events read.
        problems: Sentences on unreadable parts of the traces.
        notes: Sentences for the report on what its numbers leave out or assume.
        has_stacks: Whether Python frames were recorded.
    """

    lanes: list[Lane] = []
    paths: list[Path] = []
    events: int = 0
    problems: list[str] = []
    notes: list[str] = []
    has_stacks: bool = False

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, behind the name of the first trace."""
        self.notes.append(f"{self.paths[0].name}: {sentence}")


class LaneEvents:
    """The events of the traces of one lane.

    Attributes:
        job: The inputs.
        traces: Paths, problems and notes of the traces.
        table: The keys of the events.
        rows: Device rows; until a device event is read, host rows too.
        behind: Device rows that begin after the step, and may be launched in it.
        calls: Host calls that launch, as columns: number of the launch, begin (unix ns), and
            whether it launches a graph.
        host: Spans of work on the host.
        blocked: Spans in which the host is blocked, e.g. in ``cudaDeviceSynchronize``.
        iterations: Begin, end, tokens and attention of the iterations of an engine.
        names: Device names by process id in the trace.
        models: Model names of the devices in the headers, such as ``NVIDIA H200``.
        categories: Categories of the events before the first event of work.
        unknown: Unknown categories, in order.
        strange: Annotations that seem to be iterations of an engine, but are not understood.
        groups: The process group in each trace's header, if it is the only one; else ``None``.
        entered: Collectives of gloo that the process entered, from each trace's header.
        recordings: The time that each trace covers.
        cut_off: Names of the files whose end is missing.
        has_device: Whether there are events of a device.
        says_device: Whether a header or a label lists a device, even without its events.
        launches: Whether work was launched on a device.
        works: Whether there is work on the host.
    """

    def __init__(self, job: LaneJob) -> None:
        self.job, self.traces, self.table = job, LaneTraces(), KeyTable()
        self.rows: list[Rows] = []
        self.behind: list[Rows] = []
        self.calls = [np.empty((3, 0), np.int64)]
        self.host: list[Spans] = []
        self.blocked: list[Spans] = []
        self.iterations: list[tuple[int, ...]] = []
        self.names: dict[object, str] = {}
        self.models: set[str] = set()
        self.categories: set[str] = set()
        self.unknown: dict[str, None] = {}
        self.strange: dict[str, None] = {}
        self.groups: set[Group | None] = set()
        self.entered: list[Entered] = []
        self.recordings: list[Recording] = []
        self.cut_off: list[str] = []
        self.has_device = self.says_device = self.launches = self.works = False
        check = communicates(job.communication)
        self._kind = cache(
            lambda category, name: NOTHING if name in job.marks else kind_of(category, name, check)
        )
        self._labels: dict[object, str] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._on_streams: set[object] = set()  # processes whose events name a device or a stream
        # The next three are of the trace that is being read.
        self._said: dict[tuple[str, object, object], str] = {}
        self._task_types: dict[int, bytes] = {}  # by number of the key
        self._waiting: list[Rows] = []
        for source in job.sources:
            try:
                self._read(source)
            except TraceFormatError as error:
                self.traces.problems.append(str(error))

    def is_of_device(self, pid: object) -> bool:
        """Return whether a process is a device, by its label or by its events."""
        label = self._labels.get(pid, "")
        return _is_device(label) if label else pid in self._on_streams

    def _read(self, source: Source) -> None:
        """Read one trace."""
        trace = Trace(source.file, self.job.limits, source.pids)
        self.traces.paths.append(source.path)
        self.groups.add(only_group(trace.metadata.get("distributedInfo")))
        self.entered += entered_in(trace.metadata, source.offset_ns)
        self.recordings.append(Recording(limits=source.recorded_ns))
        self._said.clear()
        self._task_types.clear()
        self._waiting.clear()
        try:
            for events in trace.chunks(_CHUNK_BYTES):
                self._add_names(events)
                self._add_chunk(events, trace.base_ns - source.offset_ns)
        finally:
            self._add_tasks()
            self._add_extent(trace, source)
            self._add_devices(trace)

    def _add_extent(self, trace: Trace, source: Source) -> None:
        """Add the time that a trace covers after it was read, and sentences on the trace."""
        recording = self.recordings[-1]
        base_ns = trace.base_ns - source.offset_ns
        recording.holes = [(base_ns + begin, base_ns + end) for begin, end in trace.holes_ns]
        recording.is_cut_off = trace.truncated
        name = source.path.name
        if trace.truncated:
            self.cut_off.append(name)
        self.traces.events += trace.events
        self.traces.problems += [f"{name}: {warning}" for warning in trace.warnings]
        self.traces.notes += [f"{name}: {note}" for note in trace.notes()]

    def _add_devices(self, trace: Trace) -> None:
        """Add the devices that a trace names in its header and its ``process_labels`` events."""
        for (what, pid, _), label in self._said.items():
            if what == "process_labels":
                self._labels.setdefault(pid, label)
                self.says_device |= _is_device(label)
        for pid in {key.pid for key in self.table.keys}:
            self.names.setdefault(pid, _device_name(pid, self._labels.get(pid, "")))
        backend = str(trace.metadata.get("distributedInfo")).lower()
        properties = trace.metadata.get("deviceProperties")
        self.says_device |= bool(properties) or any(name in backend for name in _BETWEEN_DEVICES)
        if isinstance(properties, list):
            for device in properties:
                if isinstance(device, dict):
                    self.models.add(str(device.get("name") or "")[:LONGEST_NAME])

    def _add_names(self, events: list[Event]) -> None:
        """Add names of processes and threads; of a repeated name, the first is kept."""
        for event in events:
            if event.ph == "M" and event.name in ("process_name", "process_labels", "thread_name"):
                key = (event.name, event.pid, event.tid if event.name == "thread_name" else None)
                if key not in self._said:
                    said = event.said("labels" if event.name == "process_labels" else "name")
                    self._said[key] = said[:LONGEST_NAME]

    def _add_chunk(self, events: list[Event], base_ns: int) -> None:
        """Add events. Those without a category, of NPUs, are set aside until the names of their
        processes are known.
        """
        slices = [e for e in events if e.ph == "X" and e.ts is not None]
        self._add_marks(slices, {e.cat for e in events if e.ph != "M"}, base_ns)
        timed = [e for e in slices if e.cat not in NO_WORK]
        number_of = self._numbers.get
        keys = np.array(
            [number_of((e.cat, e.name, e.pid, e.tid)) or self._number(e) for e in timed], np.int32
        )
        counted = keys != _IGNORED
        keys, timed = keys[counted], list(compress(timed, counted.tolist()))
        rows = Rows(to_spans(timed, base_ns), keys, self._launches_of(timed, keys))
        kinds = self.table.kinds(keys)
        calls = rows.of((rows.launches > 0) & (kinds > UNKNOWN))
        of_graphs = self.table.launches_graph(calls.keys)
        self.calls.append(np.stack((calls.launches, calls.spans[:, 0], of_graphs)))
        self.has_device |= bool((kinds < UNKNOWN).any())
        is_task = kinds == NOTHING
        if is_task.any():
            self._waiting.append(rows.of(is_task))
            rows = rows.of(~is_task)
        self._add(rows)

    def _add_marks(self, slices: list[Event], categories: set[str], base_ns: int) -> None:
        """Add facts from events that are no work: torch's span of the recording, whether there are
        Python frames, and categories until the first event of work.
        """
        if "Trace" in categories:
            recording = self.recordings[-1]
            of_torch = to_spans([e for e in slices if e.cat == "Trace"], base_ns)
            recording.of_torch = extended(recording.of_torch, of_torch)
        self.traces.has_stacks |= "python_function" in categories
        if not (self.works or self.has_device):
            self.categories |= categories

    def _launches_of(self, events: Sequence[Event], keys: Keys) -> Ints:
        """Return the number that a host call shares with the device events that it launched; 0 for
        other events.

        The number is Kineto's ``correlation``, made unique over the traces of the lane.
        """
        launches = np.zeros(len(events), np.int64)
        for place in np.flatnonzero(self.table.correlates(keys)).tolist():
            if said := _CORRELATION.search(events[place].args):
                launches[place] = int(said[1]) | len(self.traces.paths) << 40
        return launches

    def _number(self, event: Event) -> int:
        """Return the number of an event's key, and remember it by name and thread.

        Numbers of collectives are not remembered, because each event may have another group.
        """
        if not event.cat:
            return self._task(event)
        kind, key = self._kind(event.cat, event.name), Key(event.name, event.pid, event.tid)
        if kind == COMMUNICATION or (kind == HOST_COMMUNICATION and not self.has_device):
            group, size = group_and_bytes(event.name, event.args)
            return self.table.number(kind, key._replace(group=group, bytes=size))
        if kind == UNKNOWN:
            self.unknown[event.cat[:LONGEST_NAME]] = None
            if _OF_A_STREAM.search(event.args):
                self._on_streams.add(event.pid)
        self.launches |= is_launch(event.cat, event.name)
        is_annotation = event.cat == "user_annotation" and kind != ITERATION
        if is_annotation and is_like_iteration(event.name):
            self.strange[event.name[:LONGEST_NAME]] = None
        number = _IGNORED
        if kind != NOTHING:
            number = self.table.number(kind, key, calls_device=event.cat.endswith(_CALLS))
        self._numbers[event.cat, event.name, event.pid, event.tid] = number
        return number

    def _task(self, event: Event) -> int:
        """Return the number of the key of an NPU's event, which has no category.

        Its kind is known only at the end of the trace, with the name of its process.
        """
        task_type = b""
        if said := _TASK_TYPE.search(event.args):
            task_type = said[1]
        name, group = event.name, None
        if call := _CALL_NUMBER.search(name):
            name = name[: call.start()]
            if name.startswith("hcom_"):
                group = Group("", call[1], 0)
        key = Key(name, event.pid, event.tid, group)
        number = self.table.number(NOTHING, key, len(self.traces.paths), task_type)
        self._task_types[number] = task_type
        return number

    def _add_tasks(self) -> None:
        """Add the events without a category that were set aside; the names of their processes are
        known now.
        """
        for number, task_type in self._task_types.items():
            name, pid, tid, group, _ = self.table.keys[number]
            process = self._said.get(("process_name", pid, None), "")
            thread = self._said.get(("thread_name", pid, tid), "")
            kind = npu_kind(process, pid, thread, name, task_type.decode("utf-8", "replace"))
            between_two, _ = group_and_bytes(name, NO_ARGS)
            self.table.change(number, kind, Key(name, pid, tid, between_two or group))
            self.names[pid] = self._said.get(("process_labels", pid, None)) or "device"
        rows = joined(self._waiting)
        kinds = self.table.kinds(rows.keys)
        self.has_device |= bool((kinds < UNKNOWN).any())
        self._add(rows.of(kinds != NOTHING))

    def _add(self, rows: Rows) -> None:
        """Keep device rows; reduce host rows to the times of work and of blocking calls."""
        kinds = self.table.kinds(rows.keys)
        on_host = (kinds > UNKNOWN) & (kinds < ITERATION)
        self.works |= bool(on_host.any())
        self.recordings[-1].add_work(rows.spans[on_host], on_device=False)
        self.recordings[-1].add_work(rows.spans[kinds <= UNKNOWN], on_device=True)
        if self.job.between is not None:
            rows = self._of_step(rows, *self.job.between)
            kinds = self.table.kinds(rows.keys)
            on_host = (kinds > UNKNOWN) & (kinds < ITERATION)
        for place in np.flatnonzero(kinds == ITERATION).tolist():
            name = self.table.keys[rows.keys[place]].name
            if tokens := parse_iteration(name):
                self.iterations.append((*rows.spans[place].tolist(), *tokens, *attention_of(name)))
        spans = rows.spans[on_host]
        self.host.append(union(spans))
        is_blocked = spans[:, 1] - spans[:, 0] >= self.table.blocks_from_ns(rows.keys[on_host])
        self.blocked.append(union(spans[is_blocked]))
        self.rows.append(rows.of(kinds <= UNKNOWN if self.has_device else kinds < ITERATION))

    def _of_step(self, rows: Rows, begin_ns: int, end_ns: int) -> Rows:
        """Return rows clipped to the step; an iteration belongs to the step in which it begins."""
        kinds, begins = self.table.kinds(rows.keys), rows.spans[:, 0]
        is_iteration = kinds == ITERATION
        is_later = (begins >= end_ns) & (rows.launches > 0)
        self.behind.append(rows.of(is_later & (kinds <= UNKNOWN)))
        inside = (begins < end_ns) & (rows.spans[:, 1] > begin_ns)
        inside &= (begins >= begin_ns) | ~is_iteration
        clipped = np.clip(rows.spans, begin_ns, end_ns)
        spans = np.where(is_iteration[:, None], rows.spans, clipped)
        return rows._replace(spans=spans).of(inside)


def _is_device(label: str) -> bool:
    """Return whether a ``process_labels`` event of a trace, e.g. ``GPU 0``, is that of a device."""
    return bool(label) and not label.upper().startswith("CPU")


def _device_name(pid: object, label: str) -> str:
    """Return the device's name for a process of a trace: its label, else a name with its id."""
    if _is_device(label):
        return label
    if isinstance(pid, int):
        return f"GPU {pid}"
    return str(pid or "device")[:LONGEST_NAME]
