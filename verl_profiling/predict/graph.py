"""The graph of a step: segments of time, each with the segments that have to end before it.

A run is a stage, a trajectory or a request. A run that waits for others is divided into segments at
the begin and the end of each wait, so a wait is no segment: it lasts until the runs that are waited
for have ended. The time from the last of these ends to a segment's begin is the segment's delay.

==================================== ================================================ ========
edge                                 evidence                                         recorded
==================================== ================================================ ========
next segment of the same thread      order of time                                    yes
span of a trajectory to its request  request id                                       yes
collective, after its last rank      calls matched by group and order                 yes
stage of a rank of an SPMD program   last rank enters it; no collectives are recorded assumed
request, after another one           the engine served one at a time                  yes
end of a wait, and release of a slot acquires followed releases of a limit of slots   assumed
call of a service, after another one a worker's stage of that name in each, one by one yes
stage of the loop, and of a worker   same name; else the time inside a stage that has assumed
                                     no worker stage of its name
rollout, and trajectory or request   it ends in the stage                             assumed
stage of the loop, and its next poll stages in which it sleeps between polls          yes
stage ``wait:X``, and stage ``X``    names; stage ``X`` ends in it                    assumed
``wait:rollout``, and a trajectory   it ends in the stage, and no rollout does        assumed
rollout from the last step           the loop's next one goes on after this step      assumed
==================================== ================================================ ========
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import WAIT
from verl_profiling.numbers import lane_rows
from verl_profiling.numbers.given_work import loads_of
from verl_profiling.numbers.stage_rows import capture_time
from verl_profiling.predict.graph_builder import GraphBuilder
from verl_profiling.predict.limits import engines_of, limits_of, services_of
from verl_profiling.predict.loop_runs import Early, LoopRuns, Run, polled
from verl_profiling.predict.rollout_runs import rollout_runs
from verl_profiling.predict.segments import OWN, WORK, Segment, SegmentTable
from verl_profiling.predict.step_graph import Carried, Graph, Limit, Poll
from verl_profiling.slices.intervals import intersection, length, subtract, within
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.read import Content

NEXT_POLL = "until the next poll"
"""The kind of a segment at whose end the loop polls again for the data that it waits for."""


def graph_of(content: Content) -> Graph:
    """Return a step as segments of time, each with the segments that have to end before it begins.

    Args:
        content: The step with its lanes, stages, trajectories, requests and collectives.
    """
    step = content.step
    graph = Graph(step.begin_ns, step.end_ns, capture=capture_time(step))
    graph.loads = partial(loads_of, step=step, calls=content.calls)
    loop = LoopRuns(step, graph)
    of_workers = loop.runs_of_workers(step)
    _add_lanes(graph, step, len(of_workers) + len(loop.loose))
    runs = list(chain.from_iterable(of_workers.values()))
    served, services = services_of(runs, content.records)
    loop.call(run for run in runs if run not in served)
    limits = limits_of(content.records, content.pieces)
    graph.limits = [*limits, *services]
    serial = [*services, *engines_of(content.records, content.served)]
    rollouts, chains = rollout_runs(content, [*limits, *serial], loop.root.who)
    graph.segments = SegmentTable(chains)
    loop.roll_out(of_workers, rollouts)
    later = list(_later(content, runs))
    carried = loop.carried(later)
    polls = list(polled(loop.stages))
    builder = GraphBuilder(graph, content.calls, _process_of(step), loop.ranks)
    builder.build(loop.root, loop.loose)
    _add_polls(graph, polls)
    _add_carried(builder, loop.root, carried)
    graph.cut = {run.exit for run in rollouts if run.is_cut}
    last_ns = max((run.end_ns for run in rollouts), default=0)
    goes_on = last_ns >= step.end_ns or min(later, default=step.end_ns) < step.end_ns
    graph.whole = not (goes_on or graph.carried or graph.unknown)
    _add_waits(graph, limits)
    graph.close()
    _mark_capture(graph, loop.root.who)
    return graph


def _later(content: Content, runs: Iterable[Run]) -> Iterator[int]:
    """Yield the begin (ns) of each rollout, trajectory and request that goes on after the step."""
    for run in runs:
        if run.name == ROLLOUT and run.end_ns >= content.step.end_ns:
            yield run.begin_ns
    for trajectory in content.records.trajectories:
        if trajectory.cut_end:
            yield trajectory.begin_ns
    for worker in content.step.workers:
        yield from worker.pending_since_ns


def _process_of(step: Step) -> Callable[[Lane], str]:
    """Return the function that returns the process of a lane."""
    return (lambda lane: lane.name) if step.manifest is None else (lambda lane: lane.source.worker)


def _add_lanes(graph: Graph, step: Step, workers: int) -> None:
    """Add the number of lanes, the idle time of each process, and the processes that are engines,
    or whose waits are recorded.
    """
    replicas = [worker for worker in step.workers if worker.identity.replica is not None]
    graph.engines = {worker.name for worker in replicas}
    logged = {worker.name for worker in replicas if worker.requests_logged}
    recorded = logged.union(lane.source.worker for lane in step.lanes)
    graph.misses_engines = bool(replicas) and not graph.engines & recorded
    devices = lane_rows.shared_devices(step)
    on_device = [lanes for lanes in devices if lanes[0].on_device]
    graph.lanes, graph.on_device = len(on_device or devices) or workers, bool(on_device)
    process_of = _process_of(step)
    for lane in step.lanes:
        process, idle = process_of(lane), subtract(lane.observed, lane.busy)
        graph.idle[process] = intersection(graph.idle.get(process, idle), idle)
        if len(lane.collectives) or not len(lane.communication):
            graph.synced.add(process)


def _add_polls(graph: Graph, polls: Iterable[tuple[Run, int, int]]) -> None:
    """Let each wait for the next poll end with a poll, also when a replay moves its begin."""
    for run, begin_ns, period_ns in polls:
        ends = (
            (segment.end_ns, at)
            for at, segment in graph.segments.of_others()
            if segment.who == run.who
        )
        last_ns, last = max(end for end in ends if end[0] <= begin_ns)
        graph.polls[run.entry] = Poll(last, begin_ns - last_ns, period_ns)
        graph.segments[run.entry].kind = NEXT_POLL


def _add_carried(builder: GraphBuilder, root: Run, carried: Iterable[Early]) -> None:
    """Add the segments of carried work before the step.

    If the similar work begins 2 s before this step ends, this one began 2 s before the step.
    """
    segments = builder.graph.segments
    for works, mark, stage in carried:
        since_ns = root.begin_ns - (root.end_ns - mark.begin_ns)
        for work in works:
            first = len(segments)
            entry = segments[work.entry]
            segments.others += _before_step(entry, work.before, since_ns, root.begin_ns)
            before = list(range(first, len(segments)))
            builder.graph.carried.append(Carried(work.entry, mark.exit, before))
            builder.link(work.exit, stage.entry)  # an edge only if the work ended before the stage
        # The next work begins after the stage that waited for this one.
        segments[mark.entry].after.append(stage.exit)


def _before_step(
    entry: Segment, parts: Sequence[Segment], since_ns: int, until_ns: int
) -> Iterator[Segment]:
    """Yield the segments of carried work before the step.

    Args:
        entry: First segment of the work in this step.
        parts: Its recorded segments before the step, if any; they are stretched to fill that time.
        since_ns: Begin of the work in the step before, if all steps are alike.
        until_ns: Begin of this step.
    """
    parts = parts or [Segment(entry.kind, since_ns, until_ns, request=entry.request)]
    first_ns = parts[0].begin_ns
    factor = (until_ns - since_ns) / (parts[-1].end_ns - first_ns)
    for part in parts:
        part.begin_ns = since_ns + round((part.begin_ns - first_ns) * factor)
        part.end_ns = since_ns + round((part.end_ns - first_ns) * factor)
        part.who, part.within, part.trajectory = entry.who, entry.within, entry.trajectory
        yield part


def _add_waits(graph: Graph, limits: Iterable[Limit]) -> None:
    """Add the slots of the limits of concurrency, and sentences on what is assumed of waits."""
    for limit in limits:
        graph.slots[limit.queue] = limit.slots
        place = "in" if limit.name.startswith(WAIT) else "before"
        rule = f"waits {place} {limit.name} are for a limit of {limit.slots:,} at once"
        graph.assumed[rule] += len(limit.holds)
    unknown = Counter(one.kind for one in graph.segments.others if one.waits)
    chains = graph.segments.chains
    if chains is not None:
        for kind in np.unique(chains.kind[chains.of_kinds(WAIT)]):
            unknown[chains.kinds[kind]] += int((chains.kind == kind).sum())
    for kind, many in unknown.items():
        graph.assumed[f"what {kind} waits for is not known, so it takes as long as before"] += many


def _mark_capture(graph: Graph, who: str) -> None:
    """Set ``capture_ns`` of the loop's segments: their time in :attr:`Graph.capture`."""
    if not len(graph.capture):
        return
    for segment in graph.segments.others:
        if segment.who == who and segment.kind in (OWN, WORK) and not segment.trajectory:
            segment.capture_ns = length(within(graph.capture, segment.begin_ns, segment.end_ns))
