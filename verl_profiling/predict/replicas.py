"""A step on other resources: other replicas, or the next rollout beside the training.

The prediction is a likely step and an interval. The ends of the interval are steps under other
assumptions on what a capture does not show: the order of requests, the time of engines, and who
waits for whom.

A replay on other replicas dispatches all requests anew, also with the recorded number of replicas.
Each request runs until its work, a number of engine iterations, is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from verl_profiling.errors import ConfigError
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.predict.changes import Changes, check_name
from verl_profiling.predict.engine_fit import Engines, Floats, Served, fitted, knee_of
from verl_profiling.predict.replays import Replay, replay

_ORDERS = 7  # random orders of the clients that are tried for round robin


def on_resources(
    found: Replay, changes: Changes, assumed: list[str], notes: list[str]
) -> tuple[Replay, list[int]]:
    """Return the likely step with other resources, and the durations (ns) that its interval spans.

    Args:
        found: The replay with all other changes.
        changes: The changes.
        assumed: Sentences on what is assumed; this function adds its own.
        notes: Sentences on extrapolation; this function adds its own.

    Raises:
        ConfigError: The step lacks what the prediction needs.
    """
    graph, steps = found.graph, [found]
    if changes.steps_ahead:
        check_name("--async", f"stage {ROLLOUT!r}", ROLLOUT, graph.segments.stages())
        if not graph.whole:
            raise ConfigError(
                "--async", "needs a step whose rollout begins and ends in it, with engines recorded"
            )
    if changes.replicas is not None or changes.concurrency is not None:
        assumed.append(f"the capture has all replicas of the run: {len(graph.engines):,}")
        steps = _on_replicas(found, changes, assumed, notes)
    if changes.steps_ahead:
        steps = [step for one in steps for step in _rollout_beside(one)]
    return steps[0], [step.span_ns for step in steps]


def _rollout_beside(step: Replay) -> Iterator[Replay]:
    """Yield two steps in which training and rollout run side by side: each takes as long as the
    longer one of both, and the weight update.

    The likely step is first. In the second, the loop's own time in a rollout counts as training.
    """
    rollout = _without(step, lambda stage, _: stage not in (ROLLOUT, WEIGHT_SYNC))
    loop = step.graph.segments[step.graph.last].who
    for training in (
        _without(step, lambda stage, _: stage == ROLLOUT),
        _without(step, lambda stage, who: stage == ROLLOUT and who != loop),
    ):
        yield max((training, rollout), key=lambda side: side.span_ns)


def _without(step: Replay, is_gone: Callable[[str, str], bool]) -> Replay:
    """Return the replay without the times and delays for which ``is_gone`` is true, given their
    outermost stage and process.
    """
    took_ns, delay_ns = step.took_ns.copy(), step.delay_ns.copy()
    for at, segment in step.graph.segments.of_others():
        if is_gone(segment.stage, segment.who):
            took_ns[at] = 0
        if is_gone((*segment.around, "")[0], segment.who):
            delay_ns[at] = 0
    chains = step.graph.segments.chains
    for link, who, ats in chains.each() if chains else ():
        if is_gone((*link.within, "")[0], who):
            took_ns[ats] = delay_ns[ats] = 0
    return replay(step.graph, took_ns, delay_ns, step.given)


def _on_replicas(
    recorded: Replay, changes: Changes, assumed: list[str], notes: list[str]
) -> list[Replay]:
    """Return the replays in which another number of replicas serves the requests.

    The first is the likely one, with the fitted curve and each request at the replica with the
    fewest requests. The others are the ends of the interval, with other curves and round robin.

    Args:
        recorded: The step with the recorded replicas.
        changes: Number of replicas, and most requests that each runs at once.
        assumed: Sentences on what is assumed; those on engines are added to it.
        notes: Sentences on extrapolation; those on engines are added to it.
    """
    engines = fitted(recorded, changes.replicas)
    replicas = changes.replicas or engines.load.replicas
    if changes.concurrency is not None:
        engines = engines._replace(slots=changes.concurrency)
    random = np.random.default_rng(0)
    clients = range(len(engines.served))
    orders = [None, clients, *(random.permutation(clients).tolist() for _ in range(_ORDERS))]
    low, likely, high = engines.curves
    spent_ns = np.zeros(len(clients) + 1)
    steps = list[Replay]()
    for curve, tried in ((likely, orders[:1]), (low, orders[:2]), (high, orders)):
        for order in tried:
            took_ns = _Simulation(recorded, engines, replicas, curve, order, spent_ns).took_ns
            whole_ns = list(map(round, took_ns))
            steps.append(replay(recorded.graph, whole_ns, recorded.delay_ns, recorded.given))
    assumed += engines.assumed(changes.concurrency is not None)
    notes += engines.notes(spent_ns)
    knee = knee_of(recorded, engines)
    if knee is not None:
        notes.append(f"{knee.wanted} requests a replica: {knee.sentence}")
    return steps


@dataclass(eq=False)
class _Replica:
    """A simulated replica of the engine.

    Attributes:
        seconds: Time of an iteration (ns), by the number of running requests.
        slots: Most requests that run at once.
        now_ns: Time up to which the replica is simulated.
        made: Iterations since the begin of the step.
        running: Iteration at which each running request ends, and the request's index.
        waiting: Index and iterations of the requests in the queue.
        spent_ns: Time with each number of running requests, of all replicas.
    """

    seconds: list[float]
    slots: int
    spent_ns: Floats
    now_ns: float = 0.0
    made: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)

    def advance(self, now_ns: float) -> None:
        """Simulate the replica up to a time."""
        if self.running:
            self.made += (now_ns - self.now_ns) / self.seconds[len(self.running)]
            self.spent_ns[len(self.running)] += now_ns - self.now_ns
        self.now_ns = now_ns

    def next_ns(self) -> float:
        """Return the time at which the next running request ends; infinite without one."""
        if not self.running:
            return math.inf
        return self.now_ns + (self.running[0][0] - self.made) * self.seconds[len(self.running)]


class _Simulation:
    """A replay of the step in which simulated replicas serve the requests.

    Args:
        recorded: The step with the recorded replicas.
        engines: The engines of the step.
        replicas: Number of replicas.
        curve: Time of an iteration (ns), by the number of running requests.
        order: For round robin, the position of each client, which are numbered by their first
            requests. ``None`` sends each request to the replica with the fewest requests.
        spent_ns: Time with each number of running requests, summed over all replicas.

    Attributes:
        took_ns: Duration of each segment.
    """

    def __init__(
        self,
        recorded: Replay,
        engines: Engines,
        replicas: int,
        curve: Floats,
        order: Sequence[int] | None,
        spent_ns: Floats,
    ) -> None:
        self.took_ns = recorded.took_ns.astype(float).tolist()
        self._delay_ns = recorded.delay_ns.tolist()
        self._served = engines.served
        self._work = engines.work(curve, recorded.took_ns)
        self._order = order
        seconds = curve.tolist()
        self._replicas = [_Replica(seconds, engines.slots, spent_ns) for _ in range(replicas)]
        self._next = self._replicas[0]  # the replica whose next request ends first
        self._clients = dict[object, int]()
        self._arrived_ns = dict[int, float]()
        self._begun_ns = dict[int, float]()
        self._owner = {at: number for number, one in enumerate(engines.served) for at in one.ats}
        after = list(map(recorded.before, range(len(recorded.graph.segments))))
        self._followers = _followers_of(after)
        self._left = list(map(len, after))
        self._events = list[
            tuple[float, bool, int]
        ]()  # time, whether a request arrives, and its index or that of a segment that ends
        for at, before in enumerate(after):
            if not before:
                self._begin(at, 0.0)
        while self._events or self._next.running:
            if self._events and self._events[0][0] <= self._next.next_ns():
                now_ns, is_arrival, number = heappop(self._events)
                if is_arrival:
                    self._arrive(number, now_ns)
                else:
                    self._end(number, now_ns)
            else:
                self._finish(self._next)

    def _begin(self, at: int, ready_ns: float) -> None:
        """Begin a segment; the segments of a request begin together."""
        now_ns = ready_ns + self._delay_ns[at]
        number = self._owner.get(at)
        if number is None:
            heappush(self._events, (now_ns + self.took_ns[at], False, at))
        elif at == self._served[number].ats[0]:
            heappush(self._events, (now_ns, True, number))

    def _end(self, at: int, now_ns: float) -> None:
        """End a segment; begin the segments of which it was the last predecessor."""
        for follower in self._followers[at]:
            self._left[follower] -= 1
            if not self._left[follower]:
                self._begin(follower, now_ns)

    def _arrive(self, number: int, now_ns: float) -> None:
        """Send a request to a replica."""
        self._arrived_ns[number] = now_ns
        turn = self._clients.setdefault(self._served[number].client, len(self._clients))
        if self._order is None:
            replica = min(self._replicas, key=lambda one: len(one.running) + len(one.waiting))
        else:
            replica = self._replicas[self._order[turn] % len(self._replicas)]
        replica.advance(now_ns)
        replica.waiting.append((number, self._work[number]))
        self._begin_requests(replica)

    def _finish(self, replica: _Replica) -> None:
        """End the running request of a replica that ends first."""
        replica.advance(replica.next_ns())
        _, number = heappop(replica.running)
        now_ns = replica.now_ns
        begun_ns = self._begun_ns[number]
        queued_ns = begun_ns - self._arrived_ns[number]
        _divide(self._served[number], queued_ns, now_ns - begun_ns, self.took_ns)
        self._begin_requests(replica)
        for at in self._served[number].ats:
            self._end(at, now_ns)

    def _begin_requests(self, replica: _Replica) -> None:
        """Begin requests in the queue of a replica, as long as there are slots."""
        while replica.waiting and len(replica.running) < replica.slots:
            number, work = replica.waiting.popleft()
            heappush(replica.running, (replica.made + work, number))
            self._begun_ns[number] = replica.now_ns
        self._next = min(self._replicas, key=_Replica.next_ns)


def _divide(request: Served, queued_ns: float, run_ns: float, took_ns: list[float]) -> None:
    """Set the durations of a request's segments.

    Args:
        request: The request.
        queued_ns: Time in the queue.
        run_ns: Time of running.
        took_ns: Durations of all segments; at first as recorded.
    """
    factor = run_ns / max(sum(took_ns[at] for at in request.segments), 1)
    for at in request.segments:
        took_ns[at] *= factor
    for at in request.queue:
        took_ns[at] = 0.0
    took_ns[request.ats[0]] += queued_ns


def _followers_of(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the successors of each segment, given its predecessors."""
    followers = [list[int]() for _ in after]
    for at, before in enumerate(after):
        for one in before:
            followers[one].append(at)
    return followers
