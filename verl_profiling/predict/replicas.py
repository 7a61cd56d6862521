"""Engines as fitted to the requests of a step, and a simulation in which such replicas serve
requests.

A running request makes one token in each iteration of its engine, and the time of an iteration
depends on the number of running requests: the curve. The work of a request is the number of
iterations that fit into its recorded time. Beside as many requests as recorded, it takes as long as
recorded. A replay dispatches all requests anew, also with the recorded number of replicas, and each
runs until its work is done.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import ConfigError
from verl_profiling.predict.graph import Graph
from verl_profiling.predict.path import Replay, followers_of
from verl_profiling.steps.requests import VALIDATE

Floats = NDArray[np.float64]

OPTION = "--replicas"
_QUEUED, _DECODE = "queued", "decode"
_IN_ENGINE = (_QUEUED, "first token", "prefill", "generate", _DECODE)
_WAITED = 0.1  # more time in queues per time of running than this means that replicas were full
# share of the time at each end that does not count for the usual numbers of running requests
_BRIEF = 0.01
_LEAST = 8  # least requests to which a curve is fitted
_SAMPLES, _LOW, _HIGH = 200, 0.05, 0.95  # of the bootstrap
_ROUNDS = 6  # until the fit is steady


class Served(NamedTuple):
    """A request that ran in the step.

    Attributes:
        replica: Index of the replica.
        client: Trajectory of the request, else the request itself.
        queue: Numbers of its segments in the queue.
        segments: Numbers of its other segments in the engine, in order.
        begin_ns: Begin of running, since the begin of the step.
        end_ns: End of running.
        since_ns: Begin of the time in which the tokens were made.
        tokens: Number of tokens that were made in this time.
    """

    replica: int
    client: object
    queue: list[int]
    segments: list[int]
    begin_ns: int
    end_ns: int
    since_ns: int
    tokens: int

    @property
    def ats(self) -> list[int]:
        """Numbers of all its segments in the engine."""
        return [*self.queue, *self.segments]


class Engines(NamedTuple):
    """The engines of a step, as fitted to its requests.

    Attributes:
        served: The requests.
        load: The running requests.
        slots: Most requests that a replica runs at once.
        few: Least running requests in the capture.
        many: Most running requests in the capture.
        curves: Time of an iteration by the number of running requests: low, likely and high.
    """

    served: list[Served]
    load: _Load
    slots: int
    few: int
    many: int
    curves: list[Floats]

    def work(self, curve: Floats, took_ns: Sequence[float]) -> list[float]:
        """Return the number of iterations of each request.

        Args:
            curve: Time of an iteration by the number of running requests.
            took_ns: Duration of each segment with the recorded replicas.
        """
        begin, end = np.array([(one.begin_ns, one.end_ns) for one in self.served], np.float64).T
        iterations = self.load.during(begin, end, 1 / curve[self.load.running])
        run_ns = [sum(took_ns[at] for at in one.segments) for one in self.served]
        found: list[float] = (iterations * run_ns / np.maximum(end - begin, 1)).tolist()
        return found

    def assumed(self) -> list[str]:
        """Return sentences on what is assumed."""
        many = f"{len(self.served):,} requests"
        found = [
            f"the time of an iteration depends on the running requests alone ({many})",
            "a request goes to the replica with the fewest requests; in the interval, also "
            "round robin",
            "other replicas are as fast as the recorded ones, and have devices of their own",
            "beside more requests than in the capture, one more takes at least as much time "
            "as the last did",
        ]
        if self.slots < len(self.served):
            found.append(
                f"a replica runs at most {self.slots:,} requests at once, as in the capture, "
                "where others "
                "queued"
            )
        return found

    def notes(self, spent_ns: Floats) -> list[str]:
        """Return a sentence on extrapolation, if replicas run other numbers of requests at once.

        Args:
            spent_ns: Time by the number of running requests.
        """
        fewest, most = _usual(spent_ns)
        if self.few <= fewest and most <= self.many:
            return []
        return [
            f"extrapolated: a replica ran {self.few:,} to {self.many:,} requests at once in "
            "the capture, and "
            f"runs {fewest:,} to {most:,} in the prediction"
        ]


def fitted(recorded: Replay, replicas: int) -> Engines:
    """Return the engines of a step.

    Args:
        recorded: The step with the recorded replicas.
        replicas: Number of replicas of the prediction.

    Raises:
        ConfigError: The step lacks requests.
    """
    graph, took_ns = recorded.graph, recorded.took_ns
    served = list(_served(graph))
    if not any(one.tokens for one in served):
        raise ConfigError(
            OPTION,
            "needs requests with tokens in the step, which a capture with rollout.requests has",
        )
    if any(graph.segments[at].queue for one in served for at in one.segments):
        raise ConfigError(
            OPTION,
            "needs engines that serve several requests at once; raise their limit "
            "(max_num_seqs of vLLM, "
            "max_running_requests of SGLang) and capture again, or try --scale rollout=FACTOR",
        )
    if not graph.whole:
        raise ConfigError(OPTION, "needs a step in which all requests of its rollout begin and end")
    load = _Load(served)
    run_ns = sum(one.end_ns - one.begin_ns for one in served)
    waited = sum(took_ns[at] for one in served for at in one.queue) > _WAITED * run_ns
    if not waited:  # without a limit, a request is queued as long as it was
        served = [one._replace(queue=[]) for one in served]
    few, many = _usual(np.bincount(load.running, load.took_ns).astype(np.float64))
    knots = np.unique([few, (few + many) // 2, many])
    more = load.replicas / replicas
    low, likely, high = _curves(served, load, knots, more)
    between = np.diff(likely) / np.diff(knots) if few < many else likely / knots / 2
    rising = (low[-1] - low[-2]) / (knots[-1] - knots[-2]) if few < many else 0.0
    most = len(served)
    running, curves = np.maximum(np.arange(most + 1), 1), []
    for curve, below, above in (
        (low, low[0] / few, rising),
        (likely, between[0], between[-1]),
        (high, 0.0, high[-1] / many),
    ):
        beyond = above * np.maximum(running - many, 0) - below * np.maximum(few - running, 0)
        curves.append(np.interp(running, knots, curve) + beyond)
    return Engines(served, load, int(load.running.max()) if waited else most, few, many, curves)


def _served(graph: Graph) -> Iterator[Served]:
    """Yield the requests that ran, without those of validation."""
    segments: defaultdict[int, list[int]] = defaultdict(list)
    for at, one in enumerate(graph.segments):
        if one.request is not None and one.kind in _IN_ENGINE and VALIDATE not in one.within:
            segments[id(one.request)].append(at)
    for ats in segments.values():
        parts = [graph.segments[at] for at in ats]
        running = [one for one in parts if one.kind != _QUEUED]
        if not running:
            continue
        made = [
            one for one in running if one.kind == _DECODE
        ]  # without the first token, made by the prefill
        request = parts[0].request
        yield Served(
            replica=request.replica,  # type: ignore[union-attr]
            client=(parts[0].who, parts[0].trajectory) if parts[0].trajectory else ats[0],
            queue=[at for at in ats if graph.segments[at].kind == _QUEUED],
            segments=[at for at in ats if graph.segments[at].kind != _QUEUED],
            begin_ns=running[0].begin_ns - graph.begin_ns,
            end_ns=running[-1].end_ns - graph.begin_ns,
            since_ns=(made or running)[0].begin_ns - graph.begin_ns,
            tokens=max(request.response_tokens - bool(made), 0),  # type: ignore[union-attr]
        )


class _Load:
    """The number of running requests of each replica over time.

    Args:
        served: The requests.

    Attributes:
        replicas: Number of replicas.
        running: Numbers of running requests, one after another and replica by replica.
        took_ns: For how long each number lasted.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        times, running, self._of = [], [], np.empty(len(served), np.int64)
        names = sorted({one.replica for one in served})
        self.replicas = len(names)
        base = 0
        for name in names:
            mine = [number for number, one in enumerate(served) if one.replica == name]
            edges = np.array([(served[number].begin_ns, served[number].end_ns) for number in mine])
            at, where = np.unique(edges.ravel(), return_inverse=True)
            change = np.zeros(len(at), np.int64)
            np.add.at(change, where.ravel(), np.tile([1, -1], len(mine)))
            self._of[mine] = base - at[0]  # replicas follow each other on one axis of time
            times.append(at + base - at[0])
            running.append(np.cumsum(change))
            base = int(times[-1][-1])
        axis = np.concatenate(times)
        self._axis = axis.astype(np.float64)
        self.running = np.concatenate(running)[:-1]
        self.took_ns = np.diff(axis)

    def during(self, begin_ns: Floats, end_ns: Floats, weights: Floats) -> Floats:
        """Return the integral over a time of each request.

        Args:
            begin_ns: Begin of each request's time.
            end_ns: End of each request's time.
            weights: What is summed over time, for each of ``running``.
        """
        sums = np.concatenate(([0.0], np.cumsum(weights * (self.running > 0) * self.took_ns)))
        first, last = (
            np.interp(times + self._of, self._axis, sums) for times in (begin_ns, end_ns)
        )
        return np.asarray(last - first)


def _curves(
    served: Sequence[Served], load: _Load, knots: NDArray[np.int64], more: float
) -> list[Floats]:
    """Return a low, a likely and a high curve: the time of an iteration at each knot.

    Low and high are from a bootstrap over the requests: by them, the recorded work would take least
    and most time. Without enough requests, they are a curve in proportion to the number of running
    requests, and a constant one.

    Args:
        served: The requests.
        load: The running requests.
        knots: Numbers of running requests.
        more: How many times as many requests a replica runs in the prediction.
    """
    begin, end, tokens = np.array(
        [(one.since_ns, one.end_ns, one.tokens) for one in served], np.float64
    ).T
    known = tokens > 0
    tokens, weight = tokens[known], (end - begin)[known]
    own_ns = weight / tokens
    hats = [np.interp(load.running, knots, unit) for unit in np.eye(len(knots))]
    likely = np.full(len(knots), own_ns.mean())
    samples = np.stack((likely, likely * knots / knots.mean()))
    for _ in range(_ROUNDS):
        rate = 1 / np.interp(load.running, knots, likely)
        made = load.during(begin, end, rate)[known] / tokens
        parts = np.stack(
            [load.during(begin, end, hat * rate**2)[known] / tokens for hat in hats], axis=1
        )
        squares = parts[:, :, None] * parts[:, None, :] * weight[:, None, None]
        if len(tokens) < _LEAST or np.linalg.cond(squares.sum(axis=0)) > 1e9:
            likely = samples.mean(axis=0)
            break
        targets = parts * ((2 * made - 1) * weight)[:, None]  # Newton's method
        likely = _bounded(
            np.linalg.solve(squares.sum(axis=0), targets.sum(axis=0)), knots, own_ns.min()
        )
    else:
        drawn = np.random.default_rng(0).multinomial(
            len(weight), np.full(len(weight), 1 / len(weight)), _SAMPLES
        )
        inverse = np.linalg.pinv(np.tensordot(drawn, squares, 1))
        found = np.einsum("sij,sj->si", inverse, drawn @ targets)
        samples = np.stack([_bounded(one, knots, own_ns.min()) for one in found])
    order = np.argsort([_slowdown(curve, load, knots, more) for curve in samples])
    low, high = (samples[order[round(share * (len(order) - 1))]] for share in (_LOW, _HIGH))
    return [low, likely, high]


def _bounded(curve: Floats, knots: NDArray[np.int64], least: float) -> Floats:
    """Return a curve that does not fall, and does not rise faster than the number of running
    requests.

    Args:
        curve: The curve.
        knots: Numbers of running requests.
        least: Least time at the last knot.
    """
    found: Floats = curve.copy()
    found[-1] = max(found[-1], least)
    for at in range(len(knots) - 2, -1, -1):
        found[at] = np.clip(found[at], found[at + 1] * knots[at] / knots[at + 1], found[at + 1])
    return found


def _slowdown(curve: Floats, load: _Load, knots: NDArray[np.int64], more: float) -> float:
    """Return the mean factor of an iteration's time if all replicas run more requests at once."""
    busy = load.running > 0
    now, then = (np.interp(load.running[busy] * by, knots, curve) for by in (1.0, more))
    return float(np.average(then / now, weights=(load.running * load.took_ns)[busy]))


def _usual(spent_ns: Floats) -> tuple[int, int]:
    """Return the least and the largest number of running requests, without brief times.

    Args:
        spent_ns: Time by the number of running requests.
    """
    spent = np.cumsum(spent_ns[1:])
    few, many = np.searchsorted(spent / spent[-1], (_BRIEF, 1 - _BRIEF)) + 1
    return int(few), int(many)


@dataclass(eq=False)
class _Replica:
    """A replica in a replay.

    Attributes:
        seconds: Time of an iteration by the number of running requests.
        slots: Most requests that run at once.
        now_ns: Time of the last change.
        made: Iterations since the begin of the step.
        running: Iteration at which each running request ends, and its number.
        waiting: Number and work of the requests in the queue.
        spent_ns: Time by the number of running requests.
    """

    seconds: list[float]
    slots: int
    spent_ns: Floats
    now_ns: float = 0.0
    made: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)

    def advance(self, now_ns: float) -> None:
        """Go on to a time."""
        if self.running:
            self.made += (now_ns - self.now_ns) / self.seconds[len(self.running)]
            self.spent_ns[len(self.running)] += now_ns - self.now_ns
        self.now_ns = now_ns

    def next_ns(self) -> float:
        """Return the time at which the next running request ends; infinite without one."""
        if not self.running:
            return math.inf
        return self.now_ns + (self.running[0][0] - self.made) * self.seconds[len(self.running)]


class Simulation:
    """One step as segments with their order; the requests are served by simulated replicas.

    Args:
        recorded: The step with the recorded replicas.
        engines: The engines of the step.
        replicas: Number of replicas.
        curve: Time of an iteration by the number of running requests.
        order: Numbers of the clients, by their first requests, for round robin; else, a request
            goes to the replica with the fewest requests.
        spent_ns: Time by the number of running requests, to which all replicas add.

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
        self.took_ns = list[float](recorded.took_ns)
        self._recorded = recorded
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
        self._followers = followers_of(recorded.after)
        self._left = list(map(len, recorded.after))
        self._events = list[
            tuple[float, bool, int]
        ]()  # time, whether it is an arrival, request or segment
        for at, before in enumerate(recorded.after):
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
        """Begin a segment; those of a request begin together."""
        now_ns = ready_ns + self._recorded.delay_ns[at]
        number = self._owner.get(at)
        if number is None:
            heappush(self._events, (now_ns + self.took_ns[at], False, at))
        elif at == self._served[number].ats[0]:
            heappush(self._events, (now_ns, True, number))

    def _end(self, at: int, now_ns: float) -> None:
        """Begin the segments that waited for this one alone."""
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


def _divide(one: Served, queued_ns: float, run_ns: float, found: list[float]) -> None:
    """Set the durations of a request's segments.

    Args:
        one: The request.
        queued_ns: Time in the queue.
        run_ns: Time of running.
        found: Durations of all segments; at first as recorded.
    """
    factor = run_ns / max(sum(found[at] for at in one.segments), 1)
    for at in one.segments:
        found[at] *= factor
    for at in one.queue:
        found[at] = 0.0
    found[one.ats[0]] += queued_ns
