"""Services that trajectories share, such as tools, limits and engines: their running and their
waiting calls over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from verl_profiling.files.trajectory_log import NO_SPAN
from verl_profiling.manifest import WAIT
from verl_profiling.numbers.report_columns import ServiceRow
from verl_profiling.numbers.stage_rows import mean_running
from verl_profiling.predict.limits import slots_of
from verl_profiling.predict.step_graph import Limit
from verl_profiling.slices.intervals import EMPTY, Spans, grouped
from verl_profiling.steps.read import Content
from verl_profiling.steps.trajectory_columns import GENERATE, LOOP_LAG, Records
from verl_profiling.units import visible

MOST_ROWS = 8
"""Maximum number of rows, which leave room for the trajectories; names of spans may be many."""

EVENT_LOOPS = "blocked event loops"
_LEAST_SHARE = 0.001  # of the step, in calls of a row that is worth its place


class _Service(NamedTuple):
    """Calls of one service; ``waiting`` is ``None`` if unknown, and ``asked`` has the whole time of
    calls that other processes serve.
    """

    name: str
    running: Spans
    waiting: Spans | None = None
    slots: int | None = None
    asked: Spans = EMPTY

    @property
    def took_ns(self) -> int:
        parts = (self.running, EMPTY if self.waiting is None else self.waiting, self.asked)
        return sum(int((part[:, 1] - part[:, 0]).sum()) for part in parts)


def service_rows(content: Content, limits: Sequence[Limit]) -> list[ServiceRow]:
    """Return the services of a step, engines first, then the services with the longest calls.

    Args:
        content: What was read of the step.
        limits: The limits of concurrency that explain waits of its trajectories.
    """
    begin_ns, end_ns = content.step.begin_ns, content.step.end_ns
    others = [*_of_limits(limits), *_of_loops(content), *_of_spans(content.records, limits)]
    others = [one for one in others if one.took_ns > _LEAST_SHARE * content.step.span_ns]
    others.sort(key=lambda service: -service.took_ns)
    rows = []
    for service in (*_of_engines(content), *others[:MOST_ROWS]):
        running = mean_running(service.running, begin_ns, end_ns)
        waiting = np.empty(0)
        if len(service.asked):
            waiting = np.clip(mean_running(service.asked, begin_ns, end_ns) - running, 0, None)
        elif service.waiting is not None:
            waiting = mean_running(service.waiting, begin_ns, end_ns)
        curves = (running.round(1).tolist(), waiting.round(1).tolist())
        rows.append(ServiceRow(visible(service.name), *curves, slots=service.slots))
    return rows


def _of_engines(content: Content) -> Iterator[_Service]:
    """Yield the replicas; a request waits from the begin of the span that sent it.

    It runs once the engine has scheduled it. Without that time, it runs once it is sent.
    """
    sent = content.records.spans.begin
    since_ns = {request: int(sent[span]) for span, request in content.served.items()}
    for worker in content.step.of_capture:
        times = []
        for request in worker.requests:
            begin_ns = request.scheduled_ns or request.begin_ns
            asked_ns = min(since_ns.get(request, request.begin_ns), begin_ns)
            times.append((asked_ns, begin_ns, request.end_ns))
        if times:
            since, begin, end = np.array(sorted(times, key=itemgetter(1)), np.int64).T
            held, waits = np.stack((begin, end), axis=1), None
            if (since < begin).any():
                waits = np.stack((since, begin), axis=1)
            yield _Service(worker.name, held, waits, slots_of(since, begin, end))


def _of_limits(limits: Iterable[Limit]) -> Iterator[_Service]:
    """Yield the limits by name; each process may have a limit of the same name of its own."""
    for name, alike in grouped(limits, attrgetter("name")).items():
        holds = np.array([hold for limit in alike for hold in limit.holds], np.int64)
        slots = sum(limit.slots for limit in alike)
        yield _Service(name.removeprefix(WAIT), holds[:, 2:], holds[:, 1:3], slots)


def _of_loops(content: Content) -> Iterator[_Service]:
    """Yield the event loops while a task blocks them, and the trajectories that stand still."""
    blocks, pieces = content.records.blocks, content.pieces
    if len(blocks.begin):
        lag = pieces.cause == pieces.causes.index(LOOP_LAG)
        held = np.stack((blocks.begin, blocks.end), axis=1)
        yield _Service(EVENT_LOOPS, held, np.stack((pieces.begin, pieces.end), axis=1)[lag])


def _of_spans(records: Records, limits: Iterable[Limit]) -> Iterator[_Service]:
    """Yield a service for each name of spans, unless an engine or a limit has a row for the name.

    Spans of a trajectory that a process has under the same name run there, and else wait.
    """
    spans, known = records.spans, {GENERATE, *(limit.name for limit in limits)}
    time = np.stack((spans.begin, spans.end), axis=1)
    of_process = spans.trajectory == NO_SPAN
    for number in np.unique(spans.name).tolist():
        name, is_named = records.names[number], spans.name == number
        inside, outside = time[is_named & ~of_process], time[is_named & of_process]
        if name in known:
            continue
        if name.startswith(WAIT):
            yield _Service(name.removeprefix(WAIT), EMPTY, time[is_named])
        elif len(inside) and len(outside):
            yield _Service(name, outside, asked=inside)
        else:
            yield _Service(name, time[is_named])
