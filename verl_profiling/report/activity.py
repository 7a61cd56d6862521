"""Reads the traces of one lane and reduces them to what its devices did, in bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from verl_profiling.errors import TraceFormatError
from verl_profiling.report.communication_kernels import Group, communicates, only_group
from verl_profiling.report.engine import Iteration
from verl_profiling.report.intervals import EMPTY, Spans, length, union
from verl_profiling.report.kinds import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    HOST_COMMUNICATION,
    MEMORY,
    UNKNOWN,
)
from verl_profiling.report.npu import NpuEvents
from verl_profiling.report.optimes import Window
from verl_profiling.report.process_names import ProcessNames, is_device
from verl_profiling.report.reduction import MOST_DEVICES, Part, Reduction
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.reader import Trace
from verl_profiling.units import duration

__all__ = ["Activity", "NoOperatorsError", "read_activities"]

_BETWEEN_DEVICES = ("nccl", "hccl", "xccl", "rccl")  # backends of torch.distributed
_CHUNK_BYTES = 4 << 20  # of JSON, taken at a time: arithmetic on arrays is cheap where they are long
_MOST_CATEGORIES = 12  # that are named where nothing is recognised
_LONGEST = 60  # characters of their names
_UNNAMED = "no category"
_OF_TORCH = "Trace"  # what a recording of torch's profiler has of itself
_MARKS = frozenset((_UNNAMED, _OF_TORCH, "user_annotation", "python_function", "overhead"))


class Activity:
    """What one device of a lane, or its host where it has none, did at which times on the controller's clock.

    Attributes:
        device: Name of the device; ``""`` for a CPU trace.
        on_device: Whether it is that of a device (see :mod:`~verl_profiling.report.kinds`).
        is_one_of_several: Whether the lane has other devices.
        is_unknown: Whether nothing is known of its device: the trace ends before its first event, or none was
            recorded although the device was in use.
        compute: Spans of computation.
        communication: Spans of communication.
        memory: Spans in which memory was copied or set.
        unrecognised: Spans of work of a device that is of no known kind, with nothing else beside it.
        host: Spans in which operators or runtime calls ran on the host.
        blocked: Spans in which the host was in a call that copies, allocates or waits for the device.
        graphs: Whether the host launched graphs of kernels.
        collectives: All runs of each collective by name and process group, in order of their begin.
        iterations: The iterations of a rollout engine.
        ops: Calls and self time (ns) of kernels, or of operators in a CPU trace, by stage and name.
        first_ns: Begin of the first event that counts.
        last_ns: End of the last event that counts.
        events: Number of events read; of several devices, the first has them all.
        traces: Number of traces that could be read, likewise.
        limited: Number of these that were not read whole because of a limit.
        paths: The traces.
        problems: What could not be read.
        notes: What to know of the figures.
    """

    def __init__(self) -> None:
        self.device = ""
        self.on_device = False
        self.is_one_of_several = False
        self.is_unknown = False
        self.compute: Spans = EMPTY
        self.communication: Spans = EMPTY
        self.memory: Spans = EMPTY
        self.unrecognised: Spans = EMPTY
        self.host: Spans = EMPTY
        self.blocked: Spans = EMPTY
        self.graphs = False
        self.collectives: dict[tuple[str, Group], Spans] = {}
        self.iterations: list[Iteration] = []
        self.ops: dict[tuple[str, str], tuple[int, int]] = {}
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.events = 0
        self.traces = 0
        self.limited = 0
        self.paths: list[Path] = []
        self.problems: list[str] = []
        self.notes: list[str] = []

    @property
    def busy(self) -> Spans:
        """Spans in which it was busy with anything."""
        return union(self.compute, self.communication, self.memory, self.unrecognised)


def read_activities(
    traces: Iterable[tuple[Path, int]],
    marks: Collection[str] = (),
    windows: Sequence[Window] = (),
    limits: Limits | None = None,
    patterns: tuple[str, ...] = (),
    between: tuple[int, int] | None = None,
    unrecorded: str = "",
) -> list[Activity]:
    """Read the traces of one lane; return what each of its devices did, or what its host did if it has none.

    Args:
        traces: Path of each, and the clock offset in ns that is subtracted from its times.
        marks: Names of the worker's stages, which torch_npu records as operators.
        windows: The stages to tell apart in ``ops``.
        limits: How much of each trace is read.
        patterns: Regular expressions of kernels that communicate, besides those that are known.
        between: Begin and end (unix ns, on the controller's clock) of what is taken; ``None`` for all.
        unrecorded: Kind of the device that the lane used, if its artifacts say that none of it was recorded.

    Raises:
        NoOperatorsError: They are whole, and hold no operator.
        TraceFormatError: None of them can be read, or nothing in them is known to be work.
        ConfigError: A pattern is no regular expression.
    """
    lane = _Lane(marks, limits or Limits(), patterns, between)
    failure: TraceFormatError | None = None
    for path, offset_ns in traces:
        try:
            lane.read(path, offset_ns)
        except TraceFormatError as error:
            failure = error
            lane.about.problems.append(str(error))
    if failure and not lane.about.traces:
        raise failure
    return lane.activities(windows, unrecorded)


class NoOperatorsError(TraceFormatError):
    """The traces of a lane are whole, and its process ran no operator while they were recorded."""


class _Lane:
    """The traces of one lane while they are read.

    Attributes:
        about: Number of traces and events, problems and notes.
    """

    def __init__(
        self,
        marks: Collection[str],
        limits: Limits,
        patterns: tuple[str, ...],
        between: tuple[int, int] | None,
    ) -> None:
        self.about = Activity()
        self._limits = limits
        self._reduction = Reduction(marks, limits.names, communicates(patterns), between)
        self._names: dict[object, str] = {}  # of devices, by their process
        self._labels: dict[object, str] = {}  # of processes with events of unknown categories
        self._paths: list[Path] = []
        self._has_device = False
        self._only_groups: set[Group | None] = set()
        self._cut_off: list[str] = []

    def read(self, path: Path, offset_ns: int) -> None:
        """Read one trace."""
        about, reduction = self.about, self._reduction
        trace = Trace(path, self._limits)
        about.traces += 1
        self._only_groups.add(only_group(trace.metadata.get("distributedInfo")))
        self._paths.append(path)
        processes = ProcessNames(self._limits.names)
        npu = NpuEvents(self._limits.names, processes)
        try:
            for events in trace.chunks(_CHUNK_BYTES):
                reduction.add(events, trace.base_ns - offset_ns, npu, processes)
        finally:
            reduction.add_npu(npu)
            about.events += trace.events
            about.problems += [f"{path.name}: {warning}" for warning in trace.warnings]
        about.notes += [f"{path.name}: {difference}" for difference in npu.differences()]
        full = npu.full or processes.full or reduction.full
        if full:
            most = f"more than {self._limits.names:,} names of operators or threads (--max-names raises it)"
            about.problems.append(f"{path.name}: there are {most}; the others are counted together")
        if reduction.crowded:
            about.problems.append(
                f"{path.name}: there are more than {MOST_DEVICES} devices; the others are one row"
            )
        about.limited += trace.limited or full or reduction.crowded
        for pid in (*reduction.devices, *reduction.unknown):
            self._names.setdefault(pid, processes.device(pid))
            self._labels.setdefault(pid, processes.label(pid))
        self._has_device |= _says_device(trace) or processes.has_device()
        if trace.truncated or trace.limited:
            self._cut_off.append(path.name)

    def activities(self, windows: Sequence[Window], unrecorded: str) -> list[Activity]:
        """Return what each device did, or what the host did if there is none.

        Args:
            windows: The stages to tell apart in ``ops``.
            unrecorded: Kind of the device that was in use, if nothing of it was recorded.

        Raises:
            NoOperatorsError: They are whole, and hold no operator.
            TraceFormatError: Nothing in the traces is known to be work.
        """
        by_name: defaultdict[str, list[object]] = defaultdict(list)
        for pid in sorted(self._devices(), key=_order):
            by_name[self._names[pid]].append(pid)
        found = [self._of_device(name, pids, windows) for name, pids in by_name.items()]
        if not found and self._cut_off and (self._has_device or self._reduction.launches):
            found = [self._of_lost_device("ends before the first event of its device")]
        if not found and unrecorded:
            found = [self._of_lost_device(f"has no event of {unrecorded}, which was in use")]
        if not found:
            found = [self._of_host(windows)]
        covers = self._reduction.host.covers
        host = union(*(covers[kind].spans() for kind in _ON_HOST))
        for activity in found:
            activity.host, activity.iterations = host, self._reduction.iterations
            activity.blocked, activity.graphs = self._reduction.blocked.spans(), self._reduction.graphs
            activity.is_one_of_several = len(found) > 1
            activity.paths = self._paths
        first, about = found[0], self.about
        first.traces, first.events, first.limited = about.traces, about.events, about.limited
        first.problems, first.notes = about.problems, about.notes
        return found

    def _devices(self) -> set[object]:
        """Return the processes that are devices; say which have events of unknown categories."""
        reduction = self._reduction
        devices = set(reduction.devices)
        for pid, part in reduction.unknown.items():
            label = self._labels[pid]
            if pid in devices or is_device(label) or (not label and pid in reduction.on_streams):
                categories = ", ".join(reduction.unknown_categories)
                how = "not counted, beside its kernels" if pid in devices else "counted, of no known kind"
                unknown_ns = length(part.covers[UNKNOWN].spans())
                self._note(
                    f"{self._names[pid]} has {duration(unknown_ns / 1e9)} of events "
                    f"of unknown categories ({categories}): {how}"
                )
                devices.add(pid)
        return devices

    def _note(self, sentence: str) -> None:
        self.about.notes.append(f"{self._paths[0].name}: {sentence}")

    def _of_device(self, name: str, pids: Iterable[object], windows: Sequence[Window]) -> Activity:
        known, unknown = self._reduction.devices, self._reduction.unknown
        parts = [known.get(pid) or unknown[pid] for pid in pids]
        activity = _reduced(parts, _ON_DEVICE, windows, self._only_groups)
        activity.on_device, activity.device = True, name
        return activity

    def _of_lost_device(self, why: str) -> Activity:
        """Return what is known of a device without an event in the traces: nothing."""
        files = ", ".join(self._cut_off or [path.name for path in self._paths])
        self.about.problems.append(f"{files}: {why}: nothing is known of it")
        activity = Activity()
        activity.on_device = activity.is_unknown = True
        return activity

    def _without_work(self) -> TraceFormatError:
        """Return what to say of traces without work; a whole one of torch's profiler had none to record."""
        counts = _categories(self._paths, self._limits)
        whole = _OF_TORCH in counts and counts.keys() <= _MARKS and not self.about.problems
        if whole:
            return NoOperatorsError(self._paths[0], "its process ran no operator while it was recorded")
        return TraceFormatError(self._paths[0], _what_there_is(counts))

    def _of_host(self, windows: Sequence[Window]) -> Activity:
        activity = _reduced([self._reduction.host], _ON_HOST, windows, self._only_groups)
        if not self._reduction.host_works:
            raise self._without_work()
        if self._reduction.launches:
            self._note("kernels were launched, and none was recorded")
        return activity


_ON_DEVICE = (COMPUTE, COMMUNICATION, MEMORY, UNKNOWN)
_ON_HOST = (HOST, HOST_COMMUNICATION)


def _reduced(
    parts: Sequence[Part], kinds: Sequence[int], windows: Sequence[Window], only: Collection[Group | None]
) -> Activity:
    """Return what parts did, of which these kinds are computation, communication, copies and the rest.

    Collectives that name no group are of the ``only`` one, if it is one.
    """
    activity = Activity()
    covered = [union(*(part.covers[kind].spans() for part in parts)) for kind in kinds]
    covered += [EMPTY] * (len(_ON_DEVICE) - len(kinds))
    activity.compute, activity.communication, activity.memory, activity.unrecognised = covered
    runs: defaultdict[tuple[str, Group], list[Spans]] = defaultdict(list)
    unnamed = next(iter(only)) if len(only) == 1 else None
    for part in parts:
        for (kind, name, group), of_it in part.collectives.items():
            if kind == kinds[1]:
                runs[name, group or unnamed or Group()] += of_it
        for place, (calls, self_ns) in part.ops.by_stage(windows).items():
            before = activity.ops.get(place, (0, 0))
            activity.ops[place] = (before[0] + calls, before[1] + self_ns)
    for call, of_it in runs.items():
        together = np.concatenate(of_it)
        activity.collectives[call] = together[np.argsort(together[:, 0], kind="stable")]
    activity.first_ns = min((part.first_ns for part in parts if part.first_ns is not None), default=None)
    activity.last_ns = max((part.last_ns for part in parts if part.last_ns is not None), default=None)
    return activity


def _says_device(trace: Trace) -> bool:
    """Return whether the header of a trace names a device, or a library that communicates between devices."""
    backend = str(trace.metadata.get("distributedInfo")).lower()
    return bool(trace.metadata.get("deviceProperties")) or any(name in backend for name in _BETWEEN_DEVICES)


def _order(pid: object) -> tuple[bool, int, str]:
    """Return what devices are sorted by: their numbers, then their names."""
    return isinstance(pid, str), pid if isinstance(pid, int) else 0, str(pid)


def _categories(paths: Iterable[Path], limits: Limits) -> Counter[str]:
    """Return how many events of each category some traces hold."""
    counts: Counter[str] = Counter()
    for path in paths:
        for events in Trace(path, limits).chunks():
            counts.update(event.cat[:_LONGEST] or _UNNAMED for event in events if event.ph != "M")
    return counts


def _what_there_is(counts: Counter[str]) -> str:
    """Return a sentence on the categories of the events in traces without work."""
    if not counts:
        return "holds no events"
    named = ", ".join(f"{count:,} of {category}" for category, count in counts.most_common(_MOST_CATEGORIES))
    rest = len(counts) - _MOST_CATEGORIES
    more = f" and {rest:,} more categories" if rest > 0 else ""
    return f"nothing in it is known to be work of a device or an operator: {named}{more}"
