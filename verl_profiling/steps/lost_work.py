"""Finds device work that a trace got wrong or lost: graph launches without kernels, impossible
durations.

All kernels of a graph carry the number of the host call that launched the graph. Some collectors
lose a part of these kernels (ROCm 7.2: 13 to 100%), or all of them (CUPTI, if only whole graphs are
recorded).
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.intervals import Ints, Spans

GRAPH_LAUNCH = re.compile(r"GraphLaunch")
"""Part of the names of calls that launch a graph, of CUDA, HIP, and their driver APIs."""

THINNEST_NS = 1_000
"""Shortest kernel that bounds others: events of no duration lie inside
of them (pytorch/kineto issue 136).
"""

_LEAST_LAUNCHES = 4  # fewer may all be of different graphs
_OVERLAP_NS = 100_000  # overlaps of intact traces: at most 43 us (torch on CUDA, ROCm, MTIA)


def lost_kernels(launched: Ints, launches: Ints, names: NDArray[np.int32]) -> str:
    """Return a sentence on graph launches without their kernels; empty if all have them.

    All launches of one graph run the same kernels, in an order that differs if the graph has
    branches. A graph that is launched once mostly has a kernel of its own, e.g. for its batch size.
    So if most launches run only kernels that others run too, but not the same ones, some are lost.

    Args:
        launched: Numbers of the graph launches.
        launches: Number of the launch of each kernel.
        names: Name of each kernel, as a number.
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


def bounded_ends(spans: Spans, streams: NDArray[np.int32], graphs: Ints) -> Ints:
    """Return the ends of kernels, where one that runs beyond the end of the next one ends at its
    begin.

    A stream is serial, so such a duration is impossible. Kernels of one graph may run at the same
    time.

    Args:
        spans: Begin and end of kernels (ns), at least one.
        streams: Number of each kernel's stream.
        graphs: Number of the graph launch of each kernel, else 0.
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
    for place in overlapping[
        ::-1
    ].tolist():  # the last one first, as the next one may be impossible too
        if end[following[place]] <= end[place]:
            end[place] = next_begin[place]
    ends: Ints = np.empty_like(end)
    ends[order] = end
    return ends
