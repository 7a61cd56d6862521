"""Predictions of a step whose kernels take another time: each trace is replayed.

The recorded gaps between kernels, calls and what they follow stay, so host code and latencies keep
their time. :mod:`verl_profiling.predict.kernel_order` has what follows what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.predict.kernel_order import NEVER, WORKS, Event, TraceOrder, read_content
from verl_profiling.predict.segments import WORK, Segment
from verl_profiling.predict.step_graph import Graph
from verl_profiling.steps import kinds
from verl_profiling.steps.parallel_reads import results
from verl_profiling.steps.step import Source, StepInputs
from verl_profiling.steps.trace_content import Limits
from verl_profiling.steps.trajectory_columns import FROM_THE_ENGINE, LOOP_LAG, TO_THE_ENGINE

_Times = list[tuple[int, int]]

KERNEL = "kernel:"
"""Prefix of a pattern of kernel names in ``--scale kernel:*gemm*=0.5``; other names are stages."""

_CLOSE = 0.4  # minimum similarity of the kernel names that an error suggests, by difflib
_MOST_NAMES = 3
_WITHOUT_LAUNCHES = "kernels of a trace without launches keep their time"
_KEPT = "collectives keep their time, with the waits for other ranks in it"


class _Found(NamedTuple):
    """A trace after the change.

    Attributes:
        took_ns: Changed duration of each segment.
        kernels: Recorded time of its kernels and copies, by name (ns).
        collectives: Names of its collectives.
        categories: Categories of its events.
        has_launches: Whether it has kernels with the calls that launched them.
        assumed: Number of edges by the assumption that they rest on.
    """

    took_ns: list[int]
    kernels: Counter[str]
    collectives: set[str]
    categories: set[str]
    has_launches: bool
    assumed: Counter[str]


def with_kernels(
    inputs: StepInputs, graph: Graph, factors: Mapping[str, float]
) -> tuple[dict[int, int], list[str]]:
    """Return the duration (ns) of segments with faster or slower kernels, by index, and sentences
    on what is assumed.

    Args:
        inputs: The step; each call reads its traces.
        graph: The graph of the step.
        factors: Factor of the time of kernels, by a pattern of their names.

    Raises:
        ConfigError: The traces have no launches of kernels, or a pattern matches no kernel.
    """
    if not factors:
        return {}, []
    segments, calls, owned = graph.segments, [], []
    for source in inputs.sources:
        requested, others = segments.requested(), segments.of_others()
        of_trace = {at for at, one in chain(requested, others) if _runs_in(one, source)}
        owned.append(sorted(of_trace))
        times = [(segments[at].begin_ns, segments[at].end_ns) for at in owned[-1]]
        how = (source, inputs.limits, inputs.communication, dict(factors), times)
        calls.append((partial(_replayed, *how), [source]))
    longer_ns: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by segment and lane
    read = list[_Found]()
    for replayed, mine, source in zip(
        results(calls, inputs.ray), owned, inputs.sources, strict=True
    ):
        if isinstance(replayed, TraceFormatError):  # already a sentence on missing data
            continue
        read.append(replayed)
        for at, took_ns in zip(mine, replayed.took_ns, strict=True):
            longer_ns[at][source.lane] += took_ns - segments[at].recorded_ns
    _check(factors, read)
    assumed, without_launches = Counter[str](), 0
    for found in read:
        assumed += found.assumed
        without_launches += bool(found.kernels) and not found.has_launches
    assumed[_WITHOUT_LAUNCHES] = without_launches
    timed_ns = {
        at: max(segments[at].recorded_ns + max(of.values()), 0) for at, of in longer_ns.items()
    }
    return timed_ns, [f"{rule} ({many:,})" for rule, many in assumed.items() if many]


def _runs_in(segment: Segment, source: Source) -> bool:
    """Return whether the time of a segment is in a trace.

    It is work of the process that wrote the trace, or part of a request inside the replica that
    wrote it.
    """
    if segment.request is not None:
        outside = segment.kind.startswith((LOOP_LAG, TO_THE_ENGINE, FROM_THE_ENGINE))
        return source.replica == segment.request.replica and not outside
    owners = (f"{source.worker} ", f"{source.lane} ")  # a lane's device may follow its name
    return segment.kind == WORK and f"{segment.who} ".startswith(owners)


def _check(factors: Mapping[str, float], read: Sequence[_Found]) -> None:
    kernels, collectives, categories = Counter[str](), set[str](), set[str]()
    for found in read:
        categories |= found.categories
        if found.has_launches:
            kernels += found.kernels
            collectives |= found.collectives
    if not any(found.has_launches for found in read):
        there = ", ".join(sorted(categories - {"", "Trace"}))
        needed = "the step has no kernels with their launches: capture with the tool torch on a GPU"
        raise ConfigError("--scale", f"{needed} (the traces have {there or 'nothing'})")
    for pattern in factors:
        if any(_matches(name, pattern) for name in kernels):
            continue
        if any(_matches(name, pattern) for name in collectives):
            raise ConfigError(
                "--scale", f"{pattern!r} matches collectives: their waits cannot be scaled"
            )
        names = [kinds.own_name(name) for name, _ in kernels.most_common()]
        close = get_close_matches(pattern.strip("*?"), names, _MOST_NAMES, _CLOSE)
        hint, listed = ("close names", close) if close else ("the longest", names[:_MOST_NAMES])
        raise ConfigError(
            "--scale", f"no kernel of the step matches {pattern!r}; {hint}: {', '.join(listed)}"
        )


def _matches(name: str, pattern: str) -> bool:
    names = (name, kinds.own_name(name))
    return any(spelling == pattern or fnmatchcase(spelling, pattern) for spelling in names)


def _replayed(
    source: Source,
    limits: Limits,
    communication: tuple[str, ...],
    factors: dict[str, float],
    times: _Times,
) -> _Found:
    """Return a trace in which kernels take their changed times.

    Args:
        source: The trace.
        limits: How much of it is read.
        communication: Regular expressions of further communication kernels.
        factors: Factor of the time of kernels, by a pattern of their names.
        times: Begin and end (ns) of segments. If work of the device begins or ends at one of these
            times, the time moves with it. All others move with the host.
    """
    content = read_content(source, limits, communication)
    kernels, collectives = Counter[str](), set[str]()
    assumed = Counter[str]()
    for work in content.works:
        if work.kind == kinds.COMMUNICATION:
            collectives.add(work.name)
            assumed[_KEPT] += 1
        else:
            kernels[work.name] += work.end_ns - work.begin_ns
    by_name = dict.fromkeys(kernels, 1.0)
    for pattern, factor in factors.items():
        for name in kernels:
            if _matches(name, pattern):
                by_name[name] *= factor
    after = TraceOrder(content, assumed).after
    ends: dict[Event, int] = {}
    begun, instants, moved_ns = dict[int, int](), [NEVER], [0]
    for node in sorted(after, key=lambda node: (node.begin_ns, node.kind in WORKS)):
        edges = [(one.end_ns + least_ns, ends[one] + least_ns) for one, least_ns in after[node]]
        ready_ns, new_ready_ns = map(max, zip(*edges or [(0, 0)], strict=True))
        new_ns = node.begin_ns - ready_ns + new_ready_ns
        ends[node] = new_ns + round((node.end_ns - node.begin_ns) * by_name.get(node.name, 1.0))
        if node.kind in WORKS:
            begun[node.begin_ns] = new_ns
        else:
            instants.append(node.begin_ns)
            moved_ns.append(new_ns - node.begin_ns)
    by_end = sorted(
        (node_before.end_ns, ns) for node_before, ns in ends.items() if node_before.kind in WORKS
    )
    ended = dict(
        zip((ns for ns, _ in by_end), accumulate((ns for _, ns in by_end), max), strict=True)
    )

    def new(at_ns: int, first: dict[int, int], second: dict[int, int]) -> int:
        with_host = at_ns + moved_ns[bisect_right(instants, at_ns) - 1]
        return first.get(at_ns, second.get(at_ns, with_host))

    took_ns = [
        new(end_ns, begun, ended) - new(begin_ns, ended, begun) for begin_ns, end_ns in times
    ]
    return _Found(took_ns, kernels, collectives, content.categories, bool(after), assumed)
