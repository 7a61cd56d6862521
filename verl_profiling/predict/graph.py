"""The graph of a step: segments of time, each with the segments that have to end before it.

A run is a stage, a trajectory or a request. A run that waits for others is divided into segments at
the begin and the end of each wait, so a wait is no segment: it lasts until the runs that are waited
for have ended. Time between a segment's begin and the last end before it is the segment's delay.

==================================== ================================================ ========
edge                                 evidence                                         recorded
==================================== ================================================ ========
next segment of the same thread      order of time                                    yes
span of a trajectory to its request  request id                                       yes
collective, after its last rank      calls matched by group and order                 yes
request, after another one           the engine served one at a time                  yes
end of a wait, and release of a slot acquires followed releases of a limit of slots   assumed
stage of the loop, and of a worker   same name; else the time inside a stage that has assumed
                                     no worker stage of its name
rollout, and trajectory or request   it ends in the stage                             assumed
stage of the loop, and its next poll stages in which it sleeps between polls          yes
stage ``wait:X``, and stage ``X``    names; stage ``X`` ends in it                    assumed
``wait:rollout``, and a trajectory   it ends in the stage, and no rollout does        assumed
==================================== ================================================ ========
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import MOST_NESTED, POLLING, WAIT, Request, StageSpan
from verl_profiling.numbers import usage
from verl_profiling.numbers.anatomy import capture_time
from verl_profiling.numbers.lost import ROLLOUT
from verl_profiling.predict.limits import Hold, Limit, limits_of
from verl_profiling.slices.intervals import EMPTY, Ints, Spans, intersection, overlaps, subtract
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.nesting import stages_by_row
from verl_profiling.steps.read import Content
from verl_profiling.steps.records import (
    BEFORE,
    FROM_THE_ENGINE,
    GENERATE,
    LOOP_LAG,
    TO_THE_ENGINE,
    Records,
)
from verl_profiling.steps.requests import VALIDATE

LOOP = "controller"
OWN, WORK, DELAY = "own code", "work", "delay"
"""Kinds of segments: one of the loop, one of workers, and the time before a segment."""
LAG_BY = f"{LOOP_LAG} by "
"""Begin of the kind of loop lag whose cause is known."""
NEXT_POLL = "until the next poll"
"""The kind of a segment that ends when the loop looks again for what it waits for."""
_MOST_COLLECTIVES = 5_000  # calls with the longest waits
_LAUNCHES = "c10d::"  # names of host calls that launch a collective
# a collective of which more than this share is beside computation keeps nobody waiting
_HIDDEN = 0.5

_SAME_NAME = "a stage of the loop waits for the stages of workers with its name"
_INSIDE = "a stage of the loop waits for the stages of workers inside it"
_OUTSIDE = "outside stages, the loop waits for workers"
_STEADY = (
    "a rollout that began in the last step began as late in it as the next one does in this step"
)
_AWAITED = "a stage wait:NAME waits for the stage NAME that ends in it"
_ROLLOUT = "a rollout waits for the trajectories and requests that end in it"

_Calls = tuple[tuple[str, int], ...]


@dataclass(slots=True, eq=False)
class Segment:
    """A time in which a process, a trajectory or a request does one thing.

    Attributes:
        kind: ``own code`` of the loop, ``work`` of a worker, the collective, part of a request, or
            cause of a trajectory's time.
        begin_ns: Begin.
        end_ns: End.
        who: Lane, worker, or the loop.
        within: Names of the stages around the segment, the outermost first.
        around: Stages around the delay before the segment.
        after: Numbers of the segments that end before this segment begins.
        trajectory: Group and sample of the trajectory.
        calls: Name and duration (ns) of each call around the segment, the outermost first.
        part: Number in :attr:`Graph.parts`, or -1.
        capture_ns: Time of the capture itself in a segment of the loop.
        request: The request that the segment is a part of.
        queue: Engine that serves such segments one at a time, or limit with a slot for each, first
            come first served; empty for others.
        releases: Queues that get a free slot at the end of the segment.
    """

    kind: str
    begin_ns: int
    end_ns: int
    who: str = ""
    within: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    after: list[int] = field(default_factory=list)
    trajectory: str = ""
    calls: _Calls = ()
    part: int = -1
    capture_ns: int = 0
    request: Request | None = None
    queue: str = ""
    releases: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it is a wait for something unknown, and no work."""
        return self.kind.startswith(WAIT) and not self.queue

    @property
    def is_capture(self) -> bool:
        """Whether most of its time is that of the capture itself."""
        return 2 * self.capture_ns > self.recorded_ns

    @property
    def stage(self) -> str:
        """Outermost stage around the segment; empty outside stages."""
        return self.within[0] if self.within else ""

    @property
    def recorded_ns(self) -> int:
        """Recorded duration."""
        return self.end_ns - self.begin_ns


class Carried(NamedTuple):
    """Work that began in the last step, like other work that begins in this step and goes on in the
    next.

    Attributes:
        segment: Number of the segment with the rest of the work.
        mark: Number of the segment at whose end the next work begins.
        before: Numbers of the segments of the work in the last step, which are in no order.
    """

    segment: int
    mark: int
    before: list[int]


class Poll(NamedTuple):
    """Times at which the loop looks for what it waits for.

    Attributes:
        after: Number of the segment after which the loop begins to look.
        tick_ns: Time from the end of the segment ``after`` to one of the looks.
        period_ns: Time between two of them.
    """

    after: int
    tick_ns: int
    period_ns: int

    def left_ns(self, now_ns: int) -> int:
        """Return the time until the next one; ``now_ns`` is counted from the same segment."""
        return self.period_ns - (now_ns - self.tick_ns) % self.period_ns if self.period_ns else 0


@dataclass(slots=True, eq=False)
class _Run:
    """A stage, a trajectory or a request.

    Attributes:
        who: Lane, worker, or the loop.
        role: Role of the worker.
        name: The stage; empty for the step, a trajectory and a request.
        begin_ns: Begin.
        end_ns: End.
        row: Row of runs that follow each other.
        pieces: Parts of a trajectory or request.
        before: Parts of a trajectory before the step, if it is in a call when the step begins.
        trajectory: Group and sample of the trajectory.
        around: Stage that waits for the run, if the run begins earlier.
        inner: Runs that begin because of this run.
        waits: Runs that this run waits for.
        called: Whether a worker has a stage of the same name inside the run.
        is_cut: Whether it began before the step.
        entry: Number of the first segment.
        exit: Number of the last segment.
    """

    who: str
    role: str
    name: str
    begin_ns: int
    end_ns: int
    row: object = None
    pieces: list[Segment] = field(default_factory=list)
    before: list[Segment] = field(default_factory=list)
    trajectory: str = ""
    around: tuple[str, ...] = ()
    inner: list[_Run] = field(default_factory=list)
    waits: list[_Run] = field(default_factory=list)
    called: bool = False
    is_cut: bool = False
    entry: int = -1
    exit: int = -1

    def holds(self, other: _Run, error_ns: int) -> bool:
        """Return whether another run lies inside, up to the error of the clocks."""
        return self.begin_ns <= other.begin_ns + error_ns and other.end_ns <= self.end_ns + error_ns

    def ends_in(self, other: _Run) -> bool:
        """Return whether the run ends inside another run."""
        return other.begin_ns < self.end_ns <= other.end_ns

    def clip(self, begin_ns: int, end_ns: int) -> None:
        """Clip the run, and everything inside it, to a time."""
        if begin_ns <= self.begin_ns and self.end_ns <= end_ns:
            return
        parts: list[_Run | Segment] = [self, *self.pieces]
        for one in parts:
            one.begin_ns, one.end_ns = (
                min(max(ns, begin_ns), end_ns) for ns in (one.begin_ns, one.end_ns)
            )
        for run in self.inner:
            run.clip(begin_ns, end_ns)


@dataclass(eq=False)
class Graph:
    """The segments of a step, and their order.

    Attributes:
        begin_ns: Begin of the step.
        end_ns: End of the step.
        segments: The segments.
        last: Number of the segment with which the step ends.
        order: Numbers of the segments, each after those in its ``after``.
        delay_ns: Time between each segment's begin and the last end before it.
        slots: Number of slots of each queue; by default one.
        behind: Numbers of segments that were ready before another one entered their queue, each
            with the number of the other one.
        parts: Role, stage and number of the run in its process, of each ``part``: the same for all
            ranks.
        tails: Number of a segment, and those of a rollout's trajectories or requests that it waits
            for.
        idle: Time in which all lanes of a process were idle, by process.
        capture: Time in which the loop only waited for tools.
        carried: Work that began in the last step.
        polls: The polls with which a segment ends, by its number.
        assumed: Number of edges by assumption.
        unknown: Sentences on stages whose waits are not known.
        whole: Whether all rollouts begin and end in the step.
        lanes: Number of the step's devices, else of its workers.
        on_device: Whether the lanes are devices, and not processes on CPUs.
        engines: Names of the workers that are replicas of an engine.
        synced: Processes whose waits for other ranks are recorded.
        cut: Last segments of trajectories and requests that began before the step.
    """

    begin_ns: int
    end_ns: int
    segments: list[Segment] = field(default_factory=list)
    last: int = 0
    order: list[int] = field(default_factory=list)
    delay_ns: list[int] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    parts: list[tuple[str, str, int]] = field(default_factory=list)
    tails: dict[int, list[int]] = field(default_factory=dict)
    idle: dict[str, Spans] = field(default_factory=dict)
    capture: Spans = field(default_factory=lambda: EMPTY)
    carried: list[Carried] = field(default_factory=list)
    polls: dict[int, Poll] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)
    whole: bool = True
    lanes: int = 0
    on_device: bool = False
    engines: set[str] = field(default_factory=set)
    synced: set[str] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)

    def with_polls(self, factors: Sequence[float]) -> Graph:
        """Return the graph with each period of polling times the factor of its segment."""
        polls = self.polls.items()
        periods_ns = {at: round(poll.period_ns * factors[at]) for at, poll in polls}
        return replace(
            self, polls={at: poll._replace(period_ns=periods_ns[at]) for at, poll in polls}
        )

    def close(self) -> None:
        """Set order and delays, once all segments are there."""
        found = self.segments
        in_last_step = chain.from_iterable(one.before for one in self.carried)
        self.order = sorted(
            set(range(len(found))).difference(in_last_step),
            key=lambda at: (found[at].begin_ns, found[at].end_ns, at),
        )
        self.delay_ns, self.behind = [0] * len(found), {}
        last: dict[
            str, tuple[int, int]
        ] = {}  # of each queue: the segment that entered last, and when
        released = defaultdict[str, list[int]](list)
        entered: Counter[str] = Counter()
        end_ns = [one.end_ns for one in found].__getitem__
        for one in sorted(found, key=lambda one: one.end_ns):
            for queue in one.releases:
                released[queue].append(one.end_ns)
        for at in self.order:
            one = found[at]
            ready_ns = max(map(end_ns, one.after), default=self.begin_ns)
            if one.queue:
                before, entered_ns = last.get(one.queue, (at, ready_ns))
                if entered_ns > ready_ns:
                    self.behind[at] = before
                entered_ns = max(entered_ns, ready_ns)
                last[one.queue] = at, entered_ns
                slot = entered[one.queue] - self.slots.get(one.queue, 1)
                entered[one.queue] += 1
                ready_ns = max(entered_ns, released[one.queue][slot]) if slot >= 0 else entered_ns
            self.delay_ns[at] = one.begin_ns - ready_ns


def graph_of(content: Content) -> Graph:
    """Return the graph of a step.

    Args:
        content: Everything that was read of the step.
    """
    step, records, served = content.step, content.records, content.served
    graph = Graph(step.begin_ns, step.end_ns)
    graph.engines = {worker.name for worker in step.workers if worker.identity.replica is not None}
    loop = _Loop(step, graph)
    of_workers = loop.runs_of_workers(step)
    _add_lanes(graph, step, len(of_workers) + len(loop.loose))
    runs = list(chain.from_iterable(of_workers.values()))
    loop.call(runs)
    limits = list(limits_of(records, content.pieces))
    rollouts = [
        *_trajectories(records, content.pieces, served, limits),
        *_requests(step, served.values()),
    ]
    loop.roll_out(of_workers, rollouts)
    later = [run.begin_ns for run in runs if run.name == ROLLOUT and run.end_ns >= step.end_ns]
    later += [one.begin_ns for one in records.trajectories if one.cut_end]
    later += [since_ns for worker in step.workers for since_ns in worker.pending_since_ns]
    carried = loop.carried(later)
    polled = [wait for stage in loop.stages for wait in _polled(stage)]
    builder = _Builder(graph, content.calls, _process_of(step))
    builder.build(loop.root, loop.loose)
    _add_polls(graph, polled)
    _add_carried(builder, loop.root, carried)
    graph.cut = {run.exit for run in rollouts if run.is_cut}
    goes_on = any(ns < step.end_ns for ns in later) or any(
        run.end_ns >= step.end_ns for run in rollouts
    )
    graph.whole = not (goes_on or graph.carried or graph.unknown)
    _add_waits(graph, limits)
    graph.close()
    _mark_capture(graph, step, loop.root.who)
    return graph


def _process_of(step: Step) -> Callable[[Lane], str]:
    """Return the function that returns the process of a lane."""
    return (lambda lane: lane.name) if step.manifest is None else (lambda lane: lane.source.worker)


def _add_lanes(graph: Graph, step: Step, workers: int) -> None:
    """Add the number of lanes, the idle time of each process,
    and the processes whose waits are recorded.
    """
    devices = usage.shared_devices(step)
    on_device = [lanes for lanes in devices if lanes[0].on_device]
    graph.lanes, graph.on_device = len(on_device or devices) or workers, bool(on_device)
    process_of = _process_of(step)
    for lane in step.lanes:
        process, idle = process_of(lane), subtract(lane.observed, lane.busy)
        graph.idle[process] = intersection(graph.idle.get(process, idle), idle)
        if len(lane.collectives) or not len(lane.communication):
            graph.synced.add(process)


def _add_polls(graph: Graph, polled: Iterable[tuple[_Run, int, int]]) -> None:
    """Let the waits for the next poll end with one."""
    for run, begin_ns, period_ns in polled:
        ends = ((one.end_ns, at) for at, one in enumerate(graph.segments) if one.who == run.who)
        last_ns, last = max(end for end in ends if end[0] <= begin_ns)
        graph.polls[run.entry] = Poll(last, begin_ns - last_ns, period_ns)
        graph.segments[run.entry].kind = NEXT_POLL


def _add_carried(
    builder: _Builder, root: _Run, carried: Iterable[tuple[list[_Run], _Run, _Run]]
) -> None:
    """Let the work of the last step end as the next work of this step will."""
    segments = builder.graph.segments
    for early, mark, stage in carried:
        since_ns = root.begin_ns - (root.end_ns - mark.begin_ns)
        for work in early:
            first = len(segments)
            segments += _before_step(segments[work.entry], work.before, since_ns, root.begin_ns)
            before = list(range(first, len(segments)))
            builder.graph.carried.append(Carried(work.entry, mark.exit, before))
            builder.link(work.exit, stage.entry)  # if the work ended before the step
        # The next work begins after this one.
        segments[mark.entry].after.append(stage.exit)


def _before_step(
    entry: Segment, parts: Sequence[Segment], since_ns: int, until_ns: int
) -> Iterator[Segment]:
    """Yield the segments of work in the last step.

    Args:
        entry: First segment of the work in this step.
        parts: What the work did in the last step, if that is known.
        since_ns: Begin of the work in a last step that was like this one, which the parts fill.
        until_ns: Begin of this step.
    """
    parts = parts or [Segment(entry.kind, since_ns, until_ns, request=entry.request)]
    first_ns = parts[0].begin_ns
    factor = (until_ns - since_ns) / (parts[-1].end_ns - first_ns)
    for one in parts:
        one.begin_ns = since_ns + round((one.begin_ns - first_ns) * factor)
        one.end_ns = since_ns + round((one.end_ns - first_ns) * factor)
        one.who, one.within, one.trajectory = entry.who, entry.within, entry.trajectory
        yield one


def _add_waits(graph: Graph, limits: Iterable[Limit]) -> None:
    """Add the slots of limits, and what is assumed of all waits."""
    for number, limit in enumerate(limits):
        graph.slots[_slot_of(limit, number)] = limit.slots
        place = "in" if limit.name.startswith(WAIT) else "before"
        rule = f"waits {place} {limit.name} are for a limit of {limit.slots:,} at once"
        graph.assumed[rule] += len(limit.holds)
    for one in graph.segments:
        if one.waits:
            graph.assumed[
                f"what {one.kind} waits for is not known, so it takes as long as before"
            ] += 1


def _mark_capture(graph: Graph, step: Step, who: str) -> None:
    """Add the time of the capture itself, and set it in the segments of the loop."""
    graph.capture = capture_time(step)
    own = [
        one
        for one in graph.segments
        if one.who == who and one.kind in (OWN, WORK) and not one.trajectory
    ]
    spans = np.array([(one.begin_ns, one.end_ns) for one in own], np.int64).reshape(-1, 2)
    for one, capture_ns in zip(own, overlaps(spans, graph.capture).tolist(), strict=True):
        one.capture_ns = capture_ns


class _Loop:
    """The stages of the loop, and the runs that they call and wait for.

    Args:
        step: The step.
        graph: The graph, which gets sentences.

    Attributes:
        root: The step.
        stages: The stages.
        loose: Runs that no stage calls.
    """

    def __init__(self, step: Step, graph: Graph) -> None:
        manifest = step.manifest
        self._workers = [one for one in step.workers if manifest and manifest.runs_the_loop(one)]
        who, role = next(((one.name, one.identity.role) for one in self._workers), (LOOP, ""))
        self.root = _Run(who, role, "", step.begin_ns, step.end_ns)
        self.stages = list(_stages(who, role, step.stages, self.root))
        self.loose = list[_Run]()
        self._graph = graph
        self._error_ns = (
            max((clock.error_ns for clock in manifest.clocks), default=0) if manifest else 0
        )
        self._wait_by_name()
        ended = [run for run in self.root.waits if run.end_ns < step.end_ns]
        # Stages that go on when the step ends, beside stages that the step waits for.
        self._beside = [
            run
            for run in self.root.waits
            if run.end_ns >= step.end_ns
            and any(one.row != run.row and one.end_ns > run.begin_ns for one in ended)
        ]
        self.root.waits = [run for run in self.root.waits if run not in self._beside]

    def _wait_by_name(self) -> None:
        """Let stages wait for those that they are named after."""
        by_wait = defaultdict[str, list[_Run]](list)
        for stage in self.stages:
            by_wait[WAIT + stage.name].append(stage)
        for stage in self.stages:
            awaited = [run for run in by_wait.get(stage.name, ()) if run.ends_in(stage)]
            if awaited:
                stage.waits += awaited
                self._graph.assumed[_AWAITED] += 1

    def runs_of_workers(self, step: Step) -> dict[str, list[_Run]]:
        """Return the outermost stages by worker;
        whole ranks of the loop's program are called by nobody.
        """
        of_workers = dict[str, list[_Run]]()
        for worker in step.workers:
            if worker in self._workers:
                continue
            whole = _Run(worker.name, worker.identity.role, "", step.begin_ns, step.end_ns)
            list(_stages(worker.name, whole.role, worker.stages, whole))
            if self._workers and whole.role == self.root.role:
                whole.end_ns = max((run.end_ns for run in whole.inner), default=step.begin_ns)
                self.loose.append(whole)
            else:
                of_workers.setdefault(worker.name, []).extend(whole.inner)
        if step.manifest is None:  # plain traces have no stages: each lane is one run
            for lane in step.lanes:
                if len(lane.busy):
                    times = int(lane.busy[0, 0]), int(lane.busy[-1, 1])
                    of_workers[lane.name] = [_Run(lane.name, lane.source.role, "", *times)]
        return of_workers

    def call(self, runs: Iterable[_Run]) -> None:
        """Let stages call and wait for the runs of workers: those of their name,
        then those inside them.
        """
        named = defaultdict[str, list[_Run]](list)
        for stage in self.stages:
            named[stage.name].append(stage)
        others = list[_Run]()
        for run in runs:
            same = [stage for stage in named[run.name] if stage.holds(run, self._error_ns)]
            same = same or [stage for stage in named[run.name] if run.ends_in(stage)]
            if same:
                self._join(run, same, _SAME_NAME).called = True
            else:
                others.append(run)
        for run in others:
            inside = self._around(run)
            if inside or not self._is_beside(run):
                self._join(run, inside, _INSIDE if inside else _OUTSIDE)
            else:
                self.loose.append(run)

    def roll_out(self, of_workers: Mapping[str, Sequence[_Run]], runs: Iterable[_Run]) -> None:
        """Let stages wait for trajectories and requests."""
        rollouts = [stage for stage in self.stages if stage.name in (ROLLOUT, VALIDATE)]
        waiting = self._for_rollouts_without_a_stage()
        for run in runs:
            homes = [
                stage for stage in of_workers.get(run.who, ()) if stage.holds(run, self._error_ns)
            ]
            homes = (
                homes or [stage for stage in rollouts if run.ends_in(stage)] or self._around(run)
            )
            if run.end_ns >= self.root.end_ns or (not homes and self._is_beside(run)):
                self.loose.append(run)
                continue
            home = self._join(run, homes, _ROLLOUT)
            for stage in waiting:
                if run.ends_in(stage) and stage is not home:
                    stage.waits.append(run)

    def _for_rollouts_without_a_stage(self) -> list[_Run]:
        """Return the waits for a rollout that never ends, or that is no stage."""
        waits = [stage for stage in self.stages if stage.name == WAIT + ROLLOUT]
        return [stage for stage in waits if all(one.name != ROLLOUT for one in stage.waits)]

    def _around(self, run: _Run) -> list[_Run]:
        """Return the stages around a run that have no stage of a worker with their name."""
        return [
            stage for stage in self.stages if stage.holds(run, self._error_ns) and not stage.called
        ]

    def _is_beside(self, run: _Run) -> bool:
        return any(
            stage.begin_ns < run.end_ns and run.begin_ns < stage.end_ns for stage in self.stages
        )

    def _join(self, run: _Run, homes: Sequence[_Run], rule: str) -> _Run:
        """Let the shortest stage, else the step, wait for a run; return it.
        It calls runs inside.
        """
        home = min(homes, key=lambda stage: stage.end_ns - stage.begin_ns, default=self.root)
        self._graph.assumed[rule] += 1
        home.waits.append(run)
        if home.holds(run, self._error_ns):
            run.clip(home.begin_ns, home.end_ns)
            home.inner.append(run)
        else:
            run.around = (home.name,)
            self.loose.append(run)
        return home

    def carried(self, later: Sequence[int]) -> list[tuple[list[_Run], _Run, _Run]]:
        """Return the work that began in the last step, like work that begins in this step and goes
        on.

        Args:
            later: Begins of work that goes on after the step.

        Returns:
            The work, the begin of the next work, and the stage that waits.
        """
        carried = list(self._ended(later)) or list(self._going_on(later))
        for early, mark, _ in carried:
            self._graph.assumed[_STEADY] += 1
            self.loose += [
                mark,
                *(work for work in early if work.who == ROLLOUT),
            ]  # the others are there
        return carried

    def _ended(self, later: Sequence[int]) -> Iterator[tuple[list[_Run], _Run, _Run]]:
        """Yield the work for which a rollout waits that ends in the step."""
        root, waiting = self.root, self._for_rollouts_without_a_stage()
        rollouts = [one for one in self.stages if one.name == ROLLOUT and one not in self._beside]
        for stage in (*rollouts, *waiting):
            early = list(self._early(stage))
            if not early and (stage.waits or stage in waiting):
                continue
            next_ns = min((ns for ns in later if ns >= stage.end_ns), default=root.end_ns)
            if next_ns == root.end_ns:
                waits = (
                    "waits for work that began before the step"
                    if early
                    else "waits for nothing recorded"
                )
                sentence = (
                    f"{stage.name} {waits}, so a change is not applied to all that it waits for"
                )
                self._graph.unknown.append(sentence)
                continue
            if not early:
                early = [_before(root, stage.end_ns)]
                stage.waits += early
            yield early, _mark(root, next_ns), stage

    def _early(self, stage: _Run) -> Iterator[_Run]:
        """Yield the work from before the step that a stage waits for, in place of stages around
        it.
        """
        for one in stage.waits:
            if one.begin_ns <= self.root.begin_ns and one.who != self.root.who:
                yield from list(self._early(one)) or [one]

    def _going_on(self, later: Sequence[int]) -> Iterator[tuple[list[_Run], _Run, _Run]]:
        """Yield the work that is like that of a rollout which goes on after the step."""
        root = self.root
        waits = [stage for stage in self.stages if stage.name == WAIT + ROLLOUT]
        for stage in self._beside:
            if stage.name != ROLLOUT:
                continue
            waiting = [one for one in waits if one.end_ns <= stage.begin_ns]
            if waiting and stage.waits and not later:
                early_ns = root.end_ns - max(one.end_ns for one in stage.waits)
                yield (
                    [_before(root, root.begin_ns - early_ns)],
                    _mark(root, stage.begin_ns),
                    waiting[-1],
                )
            else:
                sentence = "rollout goes on after the step, so a change is not applied to all of it"
                self._graph.unknown.append(sentence)


def _before(root: _Run, end_ns: int) -> _Run:
    """Return work that began in the last step."""
    pieces = [Segment(BEFORE, root.begin_ns, end_ns)]
    return _Run(ROLLOUT, "", "", root.begin_ns, end_ns, pieces=pieces, around=(ROLLOUT,))


def _mark(root: _Run, ns: int) -> _Run:
    """Return an instant of the loop."""
    return _Run(root.who, "", "", ns, ns, pieces=[Segment(OWN, ns, ns)])


def _stages(who: str, role: str, spans: Iterable[StageSpan], around: _Run) -> Iterator[_Run]:
    """Yield the runs of stages; each joins the run around it, at last the given run."""
    opened: defaultdict[int, list[_Run]] = defaultdict(list)
    for span, row in stages_by_row(spans):
        run = _Run(who, role, span.name, span.begin_ns, span.end_ns, (who, row))
        run.clip(around.begin_ns, around.end_ns)
        stack = opened[row]
        while stack and stack[-1].end_ns < run.end_ns:
            stack.pop()
        if (
            run.end_ns > run.begin_ns and len(stack) < MOST_NESTED
        ):  # else its time is of the stage around
            parent = stack[-1] if stack else around
            parent.inner.append(run)
            parent.waits.append(run)
            stack.append(run)
            yield run


def _polled(stage: _Run) -> Iterator[tuple[_Run, int, int]]:
    """Let a stage that polls wait for the others, and then for the next poll, in place of all its
    polls.

    Yields:
        The wait for the next poll, the begin of the first period (ns), and the period (ns).
    """
    sleeps = [run for run in stage.inner if run.name == POLLING]
    if not sleeps:
        return
    begin_ns, end_ns = sleeps[0].begin_ns, sleeps[-1].end_ns
    period_ns = (end_ns - begin_ns) // len(sleeps)
    row = sleeps[0].row
    between = [run for run in stage.inner if run.row == row and begin_ns <= run.begin_ns < end_ns]
    others = [run for run in stage.waits if run not in between and run.begin_ns < end_ns]
    ended_ns = max((run.end_ns for run in others), default=end_ns)
    if ended_ns < end_ns and any(run.pieces for run in others):
        run = _Run(stage.who, stage.role, POLLING, max(ended_ns, end_ns - period_ns), end_ns, row)
        for runs in (stage.inner, stage.waits):
            runs[:] = [one for one in runs if one not in between] + [run]
        yield run, end_ns - period_ns * len(sleeps), period_ns


def _queued(records: Records, served: Mapping[int, Request]) -> dict[int, int]:
    """Return when the request before ended, by a request's span, for engines that serve one at a
    time.

    Such an engine never served two requests at once, though one was sent before another one began.
    """
    found: dict[int, int] = {}
    engines: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for span, one in served.items():
        engines[one.replica].append((one.scheduled_ns or one.begin_ns, one.end_ns, span))
    for served_here in engines.values():
        pairs = list(pairwise(sorted(served_here)))
        apart = all(end_ns <= begin_ns for (_, end_ns, _), (begin_ns, _, _) in pairs)
        if apart and any(
            records.spans.begin[span] < begin_ns for (begin_ns, _, _), (_, _, span) in pairs
        ):
            found |= {span: 0 for *_, span in served_here}
            found |= {span: end_ns for (_, end_ns, _), (*_, span) in pairs}
    return found


def _slot_of(limit: Limit, number: int) -> str:
    """Return the name of a limit's queue."""
    return f"{limit.name} {number}"


def _acquired(found: Sequence[Segment], holds: Sequence[tuple[str, str, Hold]]) -> list[Segment]:
    """Return the parts of a trajectory with instants in place of waits for a slot, and what
    releases it.

    A slot may be released when another one is acquired, so the instants are added before the
    releases.

    Args:
        found: The parts.
        holds: Name and queue of each slot that the trajectory held.
    """
    acquires = [
        Segment(name, hold.begin_ns, hold.begin_ns, queue=queue) for name, queue, hold in holds
    ]
    waits = sorted((hold.since_ns, hold.begin_ns) for _, _, hold in holds)
    until_ns = [0, *accumulate((end_ns for _, end_ns in waits), max)]  # end of the first waits
    begun = [bisect_left(waits, (part.begin_ns + 1,)) for part in found]
    parts = [
        part for part, place in zip(found, begun, strict=True) if until_ns[place] < part.end_ns
    ]
    by_end = sorted([*acquires, *parts], key=_end_of)
    for _, queue, hold in holds:
        last = by_end[bisect_right(by_end, hold.end_ns, key=_end_of) - 1]
        last.releases = (*last.releases, queue)
    return by_end


def _end_of(segment: Segment) -> int:
    return segment.end_ns


class _Call(NamedTuple):
    """A span, with the time before the step."""

    name: str
    begin_ns: int
    end_ns: int


def _calls(around: Iterable[_Call]) -> _Calls:
    return tuple((call.name, call.end_ns - call.begin_ns) for call in around)


class _Parts:
    """Divides the time of trajectories into segments.

    Args:
        records: The trajectories.
        served: The request of each span.
    """

    def __init__(self, records: Records, served: Mapping[int, Request]) -> None:
        self._records, self._served = records, served
        self._queued = _queued(records, served)
        self._around = list[list[_Call]]()  # each span and all around it
        took, spans = defaultdict[str, list[int]](list), records.spans
        for name, begin, end, parent in _rows(spans.name, spans.since, spans.end, spans.parent):
            around = self._around[parent] if parent >= 0 else []
            self._around.append([*around, _Call(records.names[name], begin, end)])
            took[records.names[name]].append(end - begin)
        self._mean_ns = {name: round(sum(times) / len(times)) for name, times in took.items()}
        self._blocks = defaultdict[int, list[tuple[int, int]]](list)
        blocks = records.blocks
        for loop, begin, what in sorted(_rows(blocks.loop, blocks.begin, blocks.what)):
            self._blocks[loop].append((begin, what))

    def _called(self, begin: int, end: int, cause: int, loop: int, span: int) -> tuple[str, _Calls]:
        """Return the kind of a time, and the calls around it;
        loop lag is part of the call that blocks.
        """
        kind, around = self._records.names[cause], self._around[span] if span >= 0 else []
        if kind == LOOP_LAG and (place := bisect_left(self._blocks[loop], (end,))):
            blocker = self._records.blockers[self._blocks[loop][place - 1][1]][1]
            mean_ns = self._mean_ns.get(blocker, 0)
            return LAG_BY + blocker, ((blocker, mean_ns),) if mean_ns else ()
        return kind, _calls(call for call in around if call.end_ns > begin)

    def before(self, span: int, since_ns: int, until_ns: int) -> list[Segment]:
        """Return a trajectory's time from its begin to an instant in a span, by open calls."""
        opened = [call for call in self._around[span] if call.begin_ns < until_ns]
        ends_ns = [*(call.begin_ns for call in opened), until_ns]
        parts = [Segment(BEFORE, since_ns, ends_ns[0])]
        for number, call in enumerate(opened, start=1):
            calls = _calls(opened[:number])
            parts.append(Segment(call.name, call.begin_ns, ends_ns[number], calls=calls))
        return parts

    def of(self, rows: Iterable[tuple[int, ...]]) -> list[Segment]:
        """Return the segments of a trajectory; rows are owner, begin, end, cause, loop and span."""
        found: list[Segment] = []
        for _, begin, end, cause, loop, span in rows:
            kind, calls = self._called(begin, end, cause, loop, span)
            request = self._served.get(span)
            segment = Segment(kind, begin, end, calls=calls, request=request)
            if (
                request is None
                or span not in self._queued
                or kind.startswith((LOOP_LAG, FROM_THE_ENGINE))
            ):
                found.append(segment)
            elif kind not in (TO_THE_ENGINE, "queued"):
                if found and found[-1].queue and found[-1].end_ns == begin:
                    segment.begin_ns, segment.kind = found.pop().begin_ns, GENERATE
                segment.queue = f"replica {request.replica}"
                segment.releases = (segment.queue,)
                found.append(segment)
            elif self._queued[span] <= self._records.spans.begin[span]:  # the engine was free
                found.append(segment)
        return found


def _trajectories(
    records: Records, pieces: Pieces, served: Mapping[int, Request], limits: Iterable[Limit]
) -> Iterator[_Run]:
    """Yield the trajectories that ended in the step, with their time by cause."""
    holds = defaultdict[int, list[tuple[str, str, Hold]]](list)
    for number, limit in enumerate(limits):
        for hold in limit.holds:
            holds[hold.trajectory].append((limit.name, _slot_of(limit, number), hold))
    parts, order = _Parts(records, served), np.lexsort((pieces.begin, pieces.owner))
    rows = list(_rows(*(column[order] for column in pieces[:-1])))
    first = np.searchsorted(pieces.owner[order], np.arange(len(records.trajectories) + 1)).tolist()
    for number, one in enumerate(records.trajectories):
        if not one.cut_end:
            mine = rows[first[number] : first[number + 1]]
            found = _acquired(parts.of(mine), holds[number])
            title = f"{one.said.group}.{one.said.sample}" if one.said.group else str(number)
            run = _Run(one.lane, "", "", one.begin_ns, one.end_ns, pieces=found, trajectory=title)
            run.is_cut = one.cut_begin
            first_span = mine[0][-1] if mine else -1
            if one.cut_begin and first_span >= 0:
                run.before = parts.before(first_span, one.since_ns, one.begin_ns)
            yield run


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _requests(step: Step, served: Iterable[Request]) -> Iterator[_Run]:
    """Yield the requests of no trajectory."""
    known = {id(request) for request in served}
    for worker in step.workers:
        for one in worker.requests:
            if id(one) not in known and one.end_ns > step.begin_ns:
                pieces = [Segment(*part, request=one) for part in one.parts()]
                run = _Run(
                    worker.name, worker.identity.role, "", one.begin_ns, one.end_ns, pieces=pieces
                )
                run.is_cut = one.begin_ns < step.begin_ns
                run.clip(step.begin_ns, step.end_ns)
                yield run


class _Builder:
    """Divides runs into the segments of a graph.

    Args:
        graph: The graph.
        calls: The matched collectives.
        name_of: Function that returns the process of a lane.
    """

    def __init__(
        self, graph: Graph, calls: Iterable[Calls], name_of: Callable[[Lane], str]
    ) -> None:
        self.graph = graph
        self.runs: list[_Run] = []
        self.joins: list[tuple[int, _Run]] = []
        self.joined: dict[int, int] = {}
        self.times: Counter[tuple[str, str]] = Counter()
        self.calls: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._collectives: list[tuple[str, str, int, int]] = []
        for whose, name, runs in _waited_for(calls, name_of):
            for who, (begin_ns, end_ns) in zip(whose, runs.tolist(), strict=True):
                self.calls[who].append((begin_ns, end_ns, len(self._collectives)))
            last = whose[int(runs[:, 0].argmax())]
            self._collectives.append((last, name, int(runs[:, 0].max()), int(runs[:, 1].min())))
        for mine in self.calls.values():
            mine.sort()

    def build(self, root: _Run, loose: Iterable[_Run]) -> None:
        """Add all segments and edges.

        Args:
            root: The step.
            loose: Runs that are not called by the loop.
        """
        found, graph = self.graph.segments, self.graph
        self.add(root, -1, (), -1)
        graph.last = root.exit
        ends = sorted((one.end_ns, at) for at, one in enumerate(found) if one.who == root.who)
        for run in loose:
            place = (
                bisect_right(ends, (run.begin_ns, len(found)))
                if run.begin_ns > root.begin_ns
                else 0
            )
            self.add(run, ends[place - 1][1] if place else -1, run.around, -1)
        last: dict[object, int] = {}
        for run in sorted(self.runs, key=lambda run: (run.begin_ns, run.end_ns)):
            if run.row in last:
                self.link(last[run.row], run.entry)
            if run.row is not None:
                before = last.get(run.row, run.exit)
                last[run.row] = max(run.exit, before, key=lambda at: found[at].end_ns)
        for at, run in self.joins:
            self.link(run.exit, at)
            if run.pieces and VALIDATE not in found[at].within:
                graph.tails.setdefault(at, []).append(run.exit)

    def link(self, before: int, after: int) -> None:
        """Add an edge between two segments if their times permit it."""
        found = self.graph.segments
        if before >= 0 and found[before].end_ns <= found[after].begin_ns:
            found[after].after.append(before)

    def add(self, run: _Run, caller: int, around: tuple[str, ...], part: int) -> None:
        """Add the segments of a run, and of all runs inside it.

        Args:
            run: The run.
            caller: Number of the segment that calls it, or -1.
            around: Stages around the run.
            part: Number of the part that the run belongs to, or -1.
        """
        within = (*around, run.name) if run.name and run.name not in around else around
        if part < 0 and run.role and run.name:
            part = len(self.graph.parts)
            self.times[run.who, run.name] += 1
            self.graph.parts.append((run.role, run.name, self.times[run.who, run.name]))
        self.runs.append(run)
        if run.pieces:
            self._add_pieces(run, caller, around, part)
            return
        inner = sorted(run.inner, key=lambda one: one.begin_ns)
        at, now_ns, place = caller, run.begin_ns, 0
        waited: list[_Run] = []
        for begin_ns, end_ns, following in [*_blocks(run), (run.end_ns, run.end_ns, [])]:
            first, last = self._own(run, now_ns, begin_ns, at, around, within, part)
            if run.entry < 0:
                run.entry = first
            self.joins += [(first, one) for one in waited]
            waited = following
            while place < len(inner) and inner[place].begin_ns < end_ns:
                self.add(
                    inner[place], last if inner[place].begin_ns >= begin_ns else at, within, part
                )
                place += 1
            at, now_ns, around = last, end_ns, within
        run.exit = at
        for one in inner[place:]:
            self.add(one, at, within, part)

    def _own(
        self,
        run: _Run,
        begin_ns: int,
        end_ns: int,
        before: int,
        around: tuple[str, ...],
        within: tuple[str, ...],
        part: int,
    ) -> tuple[int, int]:
        """Add a time of a run without its waits; return the first and the last segment.

        The time is divided by the collectives in it, each one segment for all ranks.
        """
        found, numbers = self.graph.segments, []
        kind = WORK if run.role else OWN
        calls = self.calls.get(run.who, [])
        for called_ns, left_ns, number in calls[bisect_left(calls, (begin_ns,)) :]:
            if called_ns >= end_ns:
                break
            if called_ns < begin_ns or left_ns > end_ns:
                continue
            one = Segment(kind, begin_ns, called_ns, run.who, within, around, part=part)
            numbers.append(self._new(one, before))
            if number not in self.joined:
                who, name, arrived_ns, free_ns = self._collectives[number]
                self.joined[number] = self._new(
                    Segment(name, arrived_ns, free_ns, who, within, within), -1
                )
            before, begin_ns, around = self.joined[number], left_ns, within
            found[before].after.append(numbers[-1])
        one = Segment(kind, begin_ns, end_ns, run.who, within, around, part=part)
        numbers.append(self._new(one, before))
        return numbers[0], numbers[-1]

    def _add_pieces(self, run: _Run, caller: int, around: tuple[str, ...], part: int) -> None:
        """Add the parts of a trajectory or a request;
        a part follows the last part that ended before it.
        """
        ends: list[tuple[int, int]] = []
        begun = len(self.graph.segments)
        for one in sorted(run.pieces, key=lambda piece: (piece.begin_ns, piece.end_ns)):
            one.who, one.within, one.around = run.who, around, around
            one.trajectory, one.part = run.trajectory, part
            place = bisect_right(ends, (one.begin_ns, one.begin_ns))
            at = self._new(one, ends[place - 1][1] if place else caller)
            insort(ends, (one.end_ns, at))
        followed = {at for one in self.graph.segments[begun:] for at in one.after}
        last = [at for at in range(begun, len(self.graph.segments)) if at not in followed]
        if len(last) != 1:  # the run ends when the last of them has ended
            done = Segment(
                OWN, run.end_ns, run.end_ns, run.who, around, around, [], run.trajectory, part=part
            )
            last.append(self._new(done, -1))
            for at in last[:-1]:
                self.link(at, last[-1])
        run.entry, run.exit = begun, last[-1]

    def _new(self, segment: Segment, before: int) -> int:
        """Add a segment after another one; return its number."""
        if before >= 0:
            segment.after.append(before)
        self.graph.segments.append(segment)
        return len(self.graph.segments) - 1


def _blocks(run: _Run) -> list[tuple[int, int, list[_Run]]]:
    """Return the waits of a stage or span: begin, end, and those that it waits for together."""
    found: list[tuple[int, int, list[_Run]]] = []
    for one in sorted(run.waits, key=lambda one: one.begin_ns):
        begin_ns, end_ns = max(one.begin_ns, run.begin_ns), min(one.end_ns, run.end_ns)
        if found and begin_ns < found[-1][1]:
            begun_ns, until_ns, others = found[-1]
            others.append(one)
            found[-1] = (begun_ns, max(until_ns, end_ns), others)
        else:
            found.append((begin_ns, end_ns, [one]))
    return found


def _waited_for(
    calls: Iterable[Calls], name_of: Callable[[Lane], str]
) -> Iterator[tuple[list[str], str, NDArray[np.int64]]]:
    """Yield the calls of collectives in which processes wait for each other.

    Left out are calls beside computation on a device, calls that only launch, and calls that a rank
    leaves before another one enters, by the clocks.

    Yields:
        The processes, the name, and begin and end (ns) in each process.
    """
    found = []
    for one in calls:
        if one.name.startswith(_LAUNCHES) or len(set(map(name_of, one.lanes))) < len(one.lanes):
            continue
        enter, leave = one.runs[:, :, 0], one.runs[:, :, 1]
        beside = np.stack(
            [
                overlaps(runs, lane.compute if lane.on_device else EMPTY)
                for lane, runs in zip(one.lanes, one.runs, strict=True)
            ]
        )
        waited = leave.min(axis=0) > enter.max(axis=0)
        waited &= (beside <= _HIDDEN * (leave - enter)).all(axis=0)
        waits = (enter.max(axis=0) - enter).sum(axis=0)
        found += [(int(waits[call]), one, call) for call in np.flatnonzero(waited).tolist()]
    found.sort(key=lambda call: -call[0])
    for _, one, call in found[:_MOST_COLLECTIVES]:
        yield [name_of(lane) for lane in one.lanes], one.name, one.runs[:, call]
