"""Finds device work that a trace got wrong or lost: graph launches without kernels, impossible durations.

All kernels of a graph carry the number of the host call that launched the graph. Some collectors lose a part
of these kernels (ROCm 7.2: 13 to 100%), or all of them (CUPTI, if only whole graphs are recorded).
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.intervals import Ints, Spans

GRAPH_LAUNCH = re.compile(r"GraphLaunch")
"""Part of the names of calls that launch a graph, of CUDA, HIP, and their driver APIs."""

THINNEST_NS = 1_000
"""Shortest kernel that bounds others: events of no duration lie inside of them (pytorch/kineto issue 136)."""

_LEAST_LAUNCHES = 4  # fewer may all be of different graphs
_OVERLAP_NS = 100_000  # overlaps of intact traces: at most 43 us (torch on CUDA, ROCm, MTIA)


def lost_kernels(launched: Ints, launches: Ints, keys: NDArray[np.int32]) -> str:
    """Return a sentence on graph launches without their kernels; empty if all have them.

    Launches of one graph run the same kernels in the same order, and a recording has few graphs. So if most
    launches have kernels that no other launch repeats, some are lost.

    Args:
        launched: Numbers of the graph launches.
        launches: Number of the launch of each kernel, in order of begin.
        keys: Name of each kernel, as a number.
    """
    empty = int((~np.isin(launched, launches)).sum())
    if empty:
        return f"{empty:,} of {len(launched):,} graph launches have no kernels"
    of_graphs = np.isin(launches, launched)
    launches, keys = launches[of_graphs], keys[of_graphs]
    order = np.argsort(launches, kind="stable")
    edges = np.flatnonzero(np.diff(launches[order])) + 1
    replays = [replay.tobytes() for replay in np.split(keys[order], edges)]
    times = Counter(replays)
    single = sum(count == 1 for count in times.values())
    if len(replays) < _LEAST_LAUNCHES or 2 * single <= len(replays):
        return ""
    return f"{single:,} of {len(replays):,} graph launches have a part of their kernels only"


def bounded_ends(spans: Spans, streams: NDArray[np.int32], graphs: Ints) -> Ints:
    """Return the ends of kernels, where one that runs beyond the end of the next one ends at its begin.

    A stream is serial, so such a duration is impossible. Kernels of one graph may run at the same time.

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
    is_over = np.ones(len(order), np.bool_)
    while is_over.any():  # again, as the next one may have been impossible too
        is_over = is_followed & (end[following] <= end) & (end - next_begin > _OVERLAP_NS)
        end[is_over] = next_begin[is_over]
    ends: Ints = np.empty_like(end)
    ends[order] = end
    return ends
