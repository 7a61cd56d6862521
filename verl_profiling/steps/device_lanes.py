"""Reduces the events of one lane to one :class:`Lane` per device.

Some device work is wrong or lost in traces. All kernels of a graph carry the number of the host
call that launched the graph. Some collectors lose a part of these kernels (ROCm 7.2: 13 to 100%),
or all of them (CUPTI, if only whole graphs are recorded). Durations may be impossible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from verl_profiling.errors import TraceFormatError
from verl_profiling.slices.intervals import Ints, Spans, length, nested_times, union
from verl_profiling.slices.observed import observed_by
from verl_profiling.steps.event_rows import Rows, joined
from verl_profiling.steps.kinds import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    HOST_COMMUNICATION,
    MEMORY,
    UNKNOWN,
    Group,
)
from verl_profiling.steps.lane_events import LONGEST_NAME, LaneEvents, LaneJob, LaneTraces
from verl_profiling.steps.lanes import Lane
from verl_profiling.steps.messages import npu_links, with_entered
from verl_profiling.steps.step import GRAPH_CAPTURE
from verl_profiling.units import duration

_MOST_CATEGORIES = 12  # in one sentence
# Categories of a trace in which no operator ran
_MARKS = frozenset(("no category", "Trace", "user_annotation", "python_function", "overhead"))
_COVERS = ("compute", "communication", "memory", "unrecognised")  # attributes of a Lane
_ON_DEVICE, _ON_HOST = (COMPUTE, COMMUNICATION, MEMORY, UNKNOWN), (HOST, HOST_COMMUNICATION)

# A kernel has to end before the next kernel of its stream that is at least this long. Shorter
# events may lie inside a kernel (pytorch/kineto issue 136).
_THINNEST_NS = 1_000
_LEAST_LAUNCHES = 4  # fewer launches may all be of different graphs
# Kernels of one stream that overlap by more than this have impossible durations. In intact traces,
# they overlap by 43 us at most (torch on CUDA, ROCm, MTIA).
_OVERLAP_NS = 100_000


def read_lane(job: LaneJob) -> LaneTraces:
    """Read the traces of one lane. The result has no lanes if no trace is readable, or if no event
    is work.
    """
    events = LaneEvents(job)
    if events.traces.paths:
        events.traces.lanes = _lanes(events)
        _add_links(events.traces)
    return events.traces


def _add_links(traces: LaneTraces) -> None:
    """Add what torch_npu wrote of the links beside a trace; a wrong file costs these alone."""
    for path in traces.paths:
        try:
            links = npu_links(path)
        except Exception as error:
            traces.note(f"the bandwidth between NPUs is unknown: {type(error).__name__}: {error}")
        else:
            for lane in traces.lanes:
                lane.links += links


class _Launches(NamedTuple):
    """Host calls that launch device work, e.g. ``cudaLaunchKernel``, as columns sorted by number.

    Attributes:
        numbers: Number that each call shares with the device events that it launched.
        begins: Begin of each call (unix ns).
        of_graphs: Whether each call launched a graph.
    """

    numbers: Ints
    begins: Ints
    of_graphs: Ints

    def begins_of(self, rows: Rows) -> Ints:
        """Return the begin of the host call that launched each event (unix ns); without a recorded
        call, the begin of the event.
        """
        place = np.searchsorted(self.numbers, rows.launches)
        is_recorded = np.append(self.numbers, -1)[place] == rows.launches
        return np.where(is_recorded, np.append(self.begins, 0)[place], rows.spans[:, 0])


def _lanes(events: LaneEvents) -> list[Lane]:
    """Return one lane per device, or the host's lane if there is no device."""
    traces, job = events.traces, events.job
    if events.strange and job.sources[0].replica is not None:
        names = ", ".join(list(events.strange)[:_MOST_CATEGORIES])
        traces.note(f"not understood, so not counted as iterations of the engine: {names}")
    rows = joined(events.rows)
    events.rows.clear()
    calls = np.concatenate(events.calls, axis=1)
    launches = _Launches(*calls[:, np.argsort(calls[0])])
    if events.has_device:
        rows = _bounded(events, rows, launches.numbers[launches.of_graphs > 0])
    devices = _devices(events, rows)
    lane = Lane(
        source=job.sources[0],
        paths=traces.paths,
        host=union(*events.host),
        blocked=union(*events.blocked),
        iterations=_outermost(np.array(events.iterations, np.int64).reshape(-1, 7)),
        model="".join(events.models) if len(events.models) == 1 else "",
        on_device=True,
        is_one_of_several=len(devices) > 1,
    )
    if job.sources[0].role == GRAPH_CAPTURE:
        traces.note(
            "recorded while graphs were captured, when launches run nothing: no busy or idle time"
        )
        lane.is_unknown = True
        return [lane]
    if not devices:
        return _of_host(events, lane, rows, launches)
    lane.is_unknown = _has_lost_kernels(events, rows, launches)
    lanes = []
    for name, numbers in devices.items():
        is_of_device = np.isin(rows.keys, numbers)
        of_device = rows if is_of_device.all() else rows.of(is_of_device)
        named = replace(lane, accelerator=name)
        lanes.append(_reduced(events, of_device, launches, _ON_DEVICE, named))
    return lanes


def _of_host(events: LaneEvents, lane: Lane, rows: Rows, launches: _Launches) -> list[Lane]:
    """Return the lane of a process without device events; none if it did no work."""
    traces, unrecorded = events.traces, events.job.unrecorded
    lost = f"has no event of {unrecorded}, although the device was in use" if unrecorded else ""
    if events.cut_off and (events.says_device or events.launches):
        lost = "ends before the first event of its device"
    if lost:
        files = ", ".join(events.cut_off or [path.name for path in traces.paths])
        traces.problems.append(f"{files} {lost}, so the work of the device is unknown")
        lane.is_unknown = True
        return [lane]
    if not events.works:
        _note_no_work(events)
        return []
    if events.launches:
        traces.note("kernels were launched, but none was recorded")
    on_host = rows.of(events.table.kinds(rows.keys) > UNKNOWN)
    lane.on_device = False
    return [_reduced(events, on_host, launches, _ON_HOST, lane)]


def _note_no_work(events: LaneEvents) -> None:
    """Add a note that the process ran no operator, as the front end of an engine. If the traces are
    damaged or have no event, add a problem instead.
    """
    traces = events.traces
    categories = {category[:LONGEST_NAME] or "no category" for category in events.categories}
    if "Trace" in categories and categories <= _MARKS:
        text = "the process ran no operator during the recording"
    else:
        named = ", ".join(sorted(categories)[:_MOST_CATEGORIES])
        text = f"no event is work of a device or an operator, only {named}"
    if categories and not traces.problems:
        traces.note(text)
        return
    error = TraceFormatError(traces.paths[0], text if categories else "holds no events")
    traces.problems.append(str(error))
    traces.paths.clear()


def _devices(events: LaneEvents, rows: Rows) -> dict[str, list[int]]:
    """Return, by device name, the numbers of the keys (see :class:`Key`) of the device's events;
    add a note on events of unknown category.
    """
    numbers = np.flatnonzero(np.bincount(rows.keys))
    kinds = events.table.kinds(numbers.astype(np.int32))
    # By process id in the trace: numbers of keys of known work, and of keys of unknown categories.
    recognised, unknown = defaultdict[object, list[int]](list), defaultdict[object, list[int]](list)
    for number, kind in zip(numbers.tolist(), kinds.tolist(), strict=True):
        pid = events.table.keys[number].pid
        if kind < UNKNOWN:
            recognised[pid].append(number)
        elif kind == UNKNOWN:
            unknown[pid].append(number)
    names = {pid: events.names.get(pid, "") for pid in (*recognised, *unknown)}
    by_name = sorted(names.items(), key=lambda item: (len(item[1]), item[1]))  # GPU 9, GPU 10
    devices = defaultdict[str, list[int]](list)
    for pid, name in by_name:
        if pid not in recognised and not events.is_of_device(pid):
            continue
        devices[name] += recognised.get(pid) or unknown[pid]
        if pid in unknown:
            unknown_ns = length(union(rows.spans[np.isin(rows.keys, unknown[pid])]))
            how = "counted as unrecognised"
            if pid in recognised:
                how = "not counted beside known work"
            categories = ", ".join(list(events.unknown)[:_MOST_CATEGORIES])
            events.traces.note(
                f"{name} has {duration(unknown_ns / 1e9)} of events "
                f"of unknown categories ({categories}): {how}"
            )
    return devices


def _bounded(events: LaneEvents, rows: Rows, graphs: Ints) -> Rows:
    """Return the rows; a kernel that runs over the next kernel of its stream ends where that
    begins. A note has the number of such kernels.
    """
    # Only computation: copies of NPUs overlap, and so may collectives of several groups.
    is_long = np.diff(rows.spans)[:, 0] >= _THINNEST_NS
    computing = (events.table.kinds(rows.keys) == COMPUTE) & is_long
    if not computing.any():
        return rows
    kernels = rows.of(computing)
    of_graphs = kernels.launches * np.isin(kernels.launches, graphs)
    streams = events.table.threads(kernels.keys)
    cut_ns = kernels.spans[:, 1] - _bounded_ends(kernels.spans, streams, of_graphs)
    if not cut_ns.any():
        return rows
    events.traces.note(
        f"{np.count_nonzero(cut_ns):,} kernels run over the next kernel of their stream, by "
        f"{duration(int(cut_ns.sum()) / 1e9)} in all: each is taken to end where the next begins"
    )
    spans = rows.spans.copy()
    spans[computing, 1] -= cut_ns
    return rows._replace(spans=spans)


def _has_lost_kernels(events: LaneEvents, rows: Rows, launches: _Launches) -> bool:
    """Return whether the traces lack kernels of graph launches, so that the device's work is
    unknown.
    """
    recorded = joined([rows, *events.behind])
    recorded = recorded.of(events.table.kinds(recorded.keys) <= UNKNOWN)
    # Work that was launched after the last recorded event may be still in flight at the end of the
    # recording.
    wanted = launches.begins <= launches.begins_of(recorded).max()
    wanted &= launches.of_graphs > 0
    if events.job.between is not None:
        begin_ns, end_ns = events.job.between
        wanted &= (launches.begins >= begin_ns) & (launches.begins < end_ns)
    names = events.table.names(recorded.keys)
    lost = _lost_kernels(np.unique(launches.numbers[wanted]), recorded.launches, names)
    if lost:
        name = events.traces.paths[0].name
        events.traces.problems.append(f"{name}: {lost}, so the work of the device is unknown")
    return bool(lost)


def _reduced(
    events: LaneEvents, rows: Rows, launches: _Launches, kinds: Sequence[int], lane: Lane
) -> Lane:
    """Return a lane with its events reduced to the time of each kind, the collectives and the
    operators.

    Args:
        events: What was read of all traces of the process.
        rows: Events of this lane's device, or of the host.
        launches: Host calls that launched the events.
        kinds: Numbers of the kinds (see :mod:`~verl_profiling.steps.kinds`) that are computation,
            communication, copies and unrecognised work. For the host, the first two.
        lane: The lane without these columns.
    """
    kind_of_row = events.table.kinds(rows.keys)
    of_kinds = zip(_COVERS, kinds, strict=False)
    covers: Any = {name: union(rows.spans[kind_of_row == kind]) for name, kind in of_kinds}
    reduced = replace(
        lane,
        **covers,
        collectives=_collectives(events, rows.of(kind_of_row == kinds[1])),
        ops=_ops(events, rows, launches),
    )
    reduced.observed = observed_by(
        events.recordings,
        reduced.busy,
        on_device=lane.on_device,
        is_plain=not events.job.is_captured,
    )
    return reduced


def _collectives(events: LaneEvents, rows: Rows) -> dict[tuple[str, Group], Ints]:
    """Return the runs of each collective by name and process group, sorted by begin.

    Of each run: begin, end (ns), and bytes (0 if unknown).
    """
    runs = rows.of(np.argsort(rows.spans[:, 0], kind="stable"))
    only = next(iter(events.groups)) if len(events.groups) == 1 else None
    keys = events.table.keys
    sizes = np.array([key.bytes for key in keys], np.int64)[runs.keys]
    sized = np.column_stack((runs.spans, sizes))
    numbers = defaultdict[tuple[str, Group], list[int]](list)
    for number in np.unique(runs.keys).tolist():
        numbers[keys[number].name, keys[number].group or only or Group()].append(number)
    collectives = {call: sized[np.isin(runs.keys, keys)] for call, keys in numbers.items()}
    return with_entered(collectives, events.entered)


def _ops(
    events: LaneEvents, rows: Rows, launches: _Launches
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return number of calls and self time (ns) of kernels or operators, by stage and name.

    The stage is that in which the host launched a call; without a launch, that in which it begins.
    """
    stages, keys = events.job.stages, events.table.keys
    self_times = nested_times(rows.spans, events.table.threads(rows.keys))
    edges = np.array([(stage.begin_ns, stage.end_ns) for stage in stages], np.int64).reshape(-1, 2)
    begins = launches.begins_of(rows)
    at = np.searchsorted(edges[:, 0], begins, side="right") - 1
    inside = (at >= 0) & (begins < np.append(edges[:, 1], 0)[at])
    stage_of_row = np.where(inside, at, len(edges))
    places, inverse = np.unique(stage_of_row * len(keys) + rows.keys, return_inverse=True)
    calls, totals = np.bincount(inverse), np.bincount(inverse, self_times)
    ops: dict[tuple[str, str], tuple[int, int]] = {}
    names = [*(stage.name for stage in stages), ""]
    for place, many, self_ns in zip(places.tolist(), calls.tolist(), totals, strict=True):
        stage, number = divmod(place, len(keys))
        name = (names[stage], keys[number].name)
        before = ops.get(name, (0, 0))  # a stage may run twice
        ops[name] = (before[0] + many, before[1] + int(self_ns))
    return ops


def _outermost(iterations: Ints) -> Ints:
    """Return an engine's iterations without those inside another iteration, because SGLang may
    annotate an iteration twice.
    """
    iterations = iterations[np.lexsort((-iterations[:, 1], iterations[:, 0]))]
    latest = np.maximum.accumulate(iterations[:, 1])
    keep = np.ones(len(iterations), np.bool_)
    keep[1:] = iterations[1:, 1] > latest[:-1]
    outermost: Ints = iterations[keep]
    return outermost


def _lost_kernels(launched: Ints, launches: Ints, names: NDArray[np.int32]) -> str:
    """Return a sentence on graph launches without their kernels; empty if all have them.

    All launches of one graph run the same kernels, in an order that differs if the graph has
    branches. A graph that is launched once mostly has a kernel of its own, e.g. for its batch size.
    A launch is partial if other launches run each of its kernels, but none runs the same set.
    If most launches are partial, kernels are lost.

    Args:
        launched: Numbers of the host calls that launched graphs.
        launches: Number of the host call that launched each kernel.
        names: Number of each kernel's name.
    """
    empty = int((~np.isin(launched, launches)).sum())
    if empty:
        return f"{empty:,} of {len(launched):,} graph launches have no kernels"
    order = np.lexsort((names, launches))
    order = order[np.isin(launches[order], launched)]
    launches, names = launches[order], names[order]
    edges = np.flatnonzero(np.diff(launches)) + 1
    replays = np.split(names, edges)
    if len(replays) < _LEAST_LAUNCHES:
        return ""
    is_first = np.append(True, (np.diff(launches) != 0) | (np.diff(names) != 0))
    launches_of = np.bincount(names[is_first])
    times = Counter(replay.tobytes() for replay in replays)
    partial = sum(
        times[replay.tobytes()] == 1 and launches_of[replay].min() > 1 for replay in replays
    )
    if 2 * partial <= len(replays):
        return ""
    return f"{partial:,} of {len(replays):,} graph launches have a part of their kernels only"


def _bounded_ends(spans: Spans, streams: NDArray[np.int32], graphs: Ints) -> Ints:
    """Return the end of each kernel; for a kernel that outlasts the next kernel of its stream, the
    begin of the next.

    A stream is serial, so such a duration is impossible. But kernels of one graph may run at the
    same time.

    Args:
        spans: Begin and end of kernels (ns), at least one.
        streams: Number of each kernel's stream.
        graphs: Number of the graph launch of each kernel; 0 for a kernel outside graphs.
    """
    order = np.lexsort((spans[:, 0], streams))
    begin, end = spans[order].T.copy()
    stream, graph = streams[order], graphs[order]
    is_apart = (stream[1:] != stream[:-1]) | (graph[1:] != graph[:-1]) | (graph[1:] == 0)
    firsts = np.append(np.append(0, np.flatnonzero(is_apart) + 1), 0)
    following = firsts[np.cumsum(np.append(0, is_apart)) + 1]
    next_begin = begin[following]
    is_followed = (stream[following] == stream) & (next_begin > begin)
    overlapping = np.flatnonzero(is_followed & (end - next_begin > _OVERLAP_NS))
    # The last one first, as the next one may be impossible too.
    for place in reversed(overlapping.tolist()):
        if end[following[place]] <= end[place]:
            end[place] = next_begin[place]
    ends: Ints = np.empty_like(end)
    ends[order] = end
    return ends
