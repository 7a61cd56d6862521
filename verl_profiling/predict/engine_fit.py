"""Engines as fitted to the requests of a step, and a simulation in which such replicas serve
requests.

A running request makes one token in each iteration of its engine, and the time of an iteration
depends on the number of running requests: the curve. The work of a request is the number of
iterations that fit into its recorded time. So among the recorded requests, it takes as long as
recorded. A replay dispatches all requests anew, also with the recorded number of replicas, and each
runs until its work is done.

The knee says how many requests a replica should get. One more running request makes each iteration
of an engine longer, and makes one more token in it. At first, twice as many requests make nearly
twice as many tokens per second. Beyond the knee, they make hardly more, and each response is late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import ConfigError
from verl_profiling.predict.limits import ENGINE
from verl_profiling.predict.replays import Replay
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.requests import VALIDATE

Floats = NDArray[np.float64]

OPTION = "--replicas, --concurrency"
_QUEUED, _DECODE = "queued", "decode"
_IN_ENGINE = (_QUEUED, "first token", "prefill", "generate", _DECODE)
_WAITED = 0.1  # more time in queues per time of running than this means that replicas were full
# share of the time with fewest, and with most, running requests that is left out as unusual
_BRIEF = 0.01
_LEAST = 8  # least requests to which a curve is fitted
_SAMPLES, _LOW, _HIGH = 200, 0.05, 0.95  # of the bootstrap; quantiles of its curves
_ROUNDS = 6  # of Newton's method, until the fit is steady
_GAIN = 0.25  # of tokens per second, that twice as many requests have to bring to be worth it


class Served(NamedTuple):
    """A request that ran in the step.

    Attributes:
        replica: Index of the replica.
        client: Trajectory of the request, else the request itself.
        queue: Indexes of its segments in the engine's queue.
        segments: Indexes of its other segments in the engine, in order.
        begin_ns: Begin of running, since the begin of the step.
        end_ns: End of running.
        since_ns: Begin of decoding; begin of running if decoding has no segment.
        tokens: Number of tokens that were made from then on.
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
        """Indexes of all its segments in the engine."""
        return [*self.queue, *self.segments]


class Engines(NamedTuple):
    """The engines of a step, as fitted to its requests.

    Attributes:
        served: The requests.
        load: The number of running requests over time.
        slots: Most requests that a replica runs at once.
        few: Least requests that a replica usually ran at once in the capture.
        many: Most requests that a replica usually ran at once in the capture.
        curves: Time of an iteration (ns) by the number of running requests: low, likely and high.
    """

    served: list[Served]
    load: _Load
    slots: int
    few: int
    many: int
    curves: list[Floats]

    def work(self, curve: Floats, took_ns: Ints) -> list[float]:
        """Return the number of iterations of each request.

        Args:
            curve: Time of an iteration (ns), by the number of running requests.
            took_ns: Duration of each segment with the recorded replicas.
        """
        begin, end = self.load.begin, self.load.end
        iterations = self.load.during(begin, end, 1 / curve[self.load.running])
        run_ns = [took_ns[request.segments].sum() for request in self.served]
        work: list[float] = (iterations * run_ns / np.maximum(end - begin, 1)).tolist()
        return work

    def assumed(self, is_limit_given: bool) -> list[str]:
        """Return sentences on what a prediction with other replicas assumes."""
        many = f"{len(self.served):,} requests"
        sentences = [
            f"the time of an iteration depends on the running requests alone ({many})",
            "a request goes to the replica with the fewest requests; in the interval, also "
            "round robin",
            "other replicas are as fast as the recorded ones, and have devices of their own",
            "beside more requests than in the capture, one more takes at least as much time "
            "as the last did",
        ]
        if self.slots < len(self.served) and not is_limit_given:
            sentences.append(
                f"a replica runs at most {self.slots:,} requests at once, as in the capture, "
                "where others "
                "queued"
            )
        return sentences

    def notes(self, spent_ns: Floats) -> list[str]:
        """Return a sentence on extrapolation, if replicas run other numbers of requests at once.

        Args:
            spent_ns: Time with each number of running requests, in the prediction.
        """
        fewest, most = _usual(spent_ns)
        if self.few <= fewest and most <= self.many:
            return []
        return [
            f"extrapolated: a replica ran {self.few:,} to {self.many:,} requests at once in "
            "the capture, and "
            f"runs {fewest:,} to {most:,} in the prediction"
        ]


def fitted(recorded: Replay, replicas: int | None = None) -> Engines:
    """Return the engines of a step, fitted to its requests.

    Args:
        recorded: The step with the recorded replicas.
        replicas: Number of replicas of the prediction; by default, that of the step.

    Raises:
        ConfigError: The step lacks tokens or whole requests, or engines serve one at a time.
    """
    graph, took_ns = recorded.graph, recorded.took_ns
    served = list(_served(graph))
    if not any(request.tokens for request in served):
        raise ConfigError(
            OPTION,
            "needs requests with tokens and own ends in the step, as rollout.requests logs",
        )
    if any(one.queue.startswith(ENGINE) for one in graph.segments.others):
        raise ConfigError(
            OPTION,
            "needs engines that serve several requests at once; raise their limit "
            "(max_num_seqs of vLLM, "
            "max_running_requests of SGLang) and capture again, or try --scale rollout=FACTOR",
        )
    if not graph.whole:
        raise ConfigError(OPTION, "needs a step in which all requests of its rollout begin and end")
    load = _Load(served)
    run_ns = float((load.end - load.begin).sum())
    waited = sum(took_ns[at] for request in served for at in request.queue) > _WAITED * run_ns
    if not waited:  # without a limit, a request is queued as long as it was
        served = [request._replace(queue=[]) for request in served]
    few, many = _usual(np.bincount(load.running, load.took_ns).astype(np.float64))
    knots = np.unique([few, (few + many) // 2, many])
    more = load.replicas / (replicas or load.replicas)
    low, likely, high = _curves(load, knots, more)
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
    """Yield the requests that ran, without requests of validation."""
    of_requests = defaultdict[int, list[int]](list)
    for at, segment in graph.segments.requested():
        is_trained = VALIDATE not in segment.within
        request = segment.request
        if request is None or request.ends_with_batch:
            continue
        if segment.kind in _IN_ENGINE and is_trained:
            of_requests[id(request)].append(at)
    for ats in of_requests.values():
        running = [at for at in ats if graph.segments[at].kind != _QUEUED]
        if running:
            yield _as_served(graph, ats, running)


def _as_served(graph: Graph, ats: list[int], running: list[int]) -> Served:
    """Return a request from its segments in the engine, and the segments in which it ran."""
    one, parts = graph.segments[ats[0]], [graph.segments[at] for at in running]
    made = [part for part in parts if part.kind == _DECODE]  # the prefill makes the first token
    request = one.request
    assert request is not None
    return Served(
        replica=request.replica,
        client=(one.who, one.trajectory) if one.trajectory else ats[0],
        queue=[at for at in ats if at not in running],
        segments=running,
        begin_ns=parts[0].begin_ns - graph.begin_ns,
        end_ns=parts[-1].end_ns - graph.begin_ns,
        since_ns=(made or parts)[0].begin_ns - graph.begin_ns,
        tokens=max(request.response_tokens - bool(made), 0),
    )


class _Load:
    """The number of running requests of each replica over time.

    Args:
        served: The requests.

    Attributes:
        replicas: Number of replicas.
        begin: Begin of running of each request, since the begin of the step.
        end: End of running.
        since: Begin of the time in which its ``tokens`` were made.
        tokens: Number of tokens of each request.
        running: Numbers of running requests, one after another and replica by replica.
        took_ns: For how long each of these numbers lasted.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        columns = [(one.begin_ns, one.end_ns, one.since_ns, one.tokens) for one in served]
        self.begin, self.end, self.since, self.tokens = np.array(columns, np.float64).T
        replicas, of_replica = np.unique([one.replica for one in served], return_inverse=True)
        self.replicas = len(replicas)
        times, running, self._of = [], [], np.empty(len(served), np.int64)
        base = 0
        for number in range(self.replicas):
            mine = np.flatnonzero(of_replica == number)
            edges = np.stack((self.begin[mine], self.end[mine]), axis=1).astype(np.int64)
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
        """Return the integral of a weight over one period of each request.

        Args:
            begin_ns: Begin of each request's period.
            end_ns: End of each request's period.
            weights: Weight per ns at each of the numbers in ``running``.
        """
        sums = np.concatenate(([0.0], np.cumsum(weights * (self.running > 0) * self.took_ns)))
        first = np.interp(begin_ns + self._of, self._axis, sums)
        return np.asarray(np.interp(end_ns + self._of, self._axis, sums) - first)


def _curves(load: _Load, knots: NDArray[np.int64], more: float) -> list[Floats]:
    """Return a low, a likely and a high curve: the time of an iteration (ns) at each knot.

    Low and high are from a bootstrap over the requests: with ``more`` requests, iterations slow
    down least and most. Without enough requests, one curve is constant, and the other in
    proportion to the number of running requests.

    Args:
        load: The number of running requests over time.
        knots: Numbers of running requests at which a curve has a value; it is linear between them.
        more: Requests of a replica in the prediction, as a multiple of those in the capture.
    """
    begin, end = load.since, load.end
    has_tokens = load.tokens > 0
    tokens, weight = load.tokens[has_tokens], (end - begin)[has_tokens]
    own_ns = weight / tokens
    hats = [np.interp(load.running, knots, unit) for unit in np.eye(len(knots))]
    likely = np.full(len(knots), own_ns.mean())
    samples = np.stack((likely, likely * knots / knots.mean()))
    for _ in range(_ROUNDS):
        rate = 1 / np.interp(load.running, knots, likely)
        made = load.during(begin, end, rate)[has_tokens] / tokens
        parts = np.stack(
            [load.during(begin, end, hat * rate**2)[has_tokens] / tokens for hat in hats], axis=1
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
        solved = np.einsum("sij,sj->si", inverse, drawn @ targets)
        samples = np.stack([_bounded(one, knots, own_ns.min()) for one in solved])
    order = np.argsort([_slowdown(curve, load, knots, more) for curve in samples])
    low, high = np.rint(np.array([_LOW, _HIGH]) * (len(order) - 1)).astype(int)
    return [samples[order[low]], likely, samples[order[high]]]


def _bounded(curve: Floats, knots: NDArray[np.int64], least: float) -> Floats:
    """Return a curve that does not fall, and does not rise faster than the number of running
    requests.

    Args:
        curve: The time of an iteration at each knot.
        knots: Numbers of running requests.
        least: Least time at the last knot.
    """
    bounded: Floats = curve.copy()
    bounded[-1] = max(bounded[-1], least)
    for at in range(len(knots) - 2, -1, -1):
        bounded[at] = np.clip(
            bounded[at], bounded[at + 1] * knots[at] / knots[at + 1], bounded[at + 1]
        )
    return bounded


def _slowdown(curve: Floats, load: _Load, knots: NDArray[np.int64], more: float) -> float:
    """Return how many times as long an iteration takes, in the mean, with ``more`` requests."""
    busy = load.running > 0
    running = load.running[busy]
    slower = np.interp(running * more, knots, curve) / np.interp(running, knots, curve)
    return float(np.average(slower, weights=running * load.took_ns[busy]))


def _usual(spent_ns: Floats) -> tuple[int, int]:
    """Return the least and the largest number of running requests, without brief times.

    Args:
        spent_ns: Time with each number of running requests.
    """
    spent = np.cumsum(spent_ns[1:])
    few, many = np.searchsorted(spent / spent[-1], (_BRIEF, 1 - _BRIEF)) + 1
    return int(few), int(many)


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The knee of a replica.

    Attributes:
        few: Least requests that a replica usually ran at once in the capture.
        many: Most requests that a replica usually ran at once in the capture.
        requests: Requests from which on twice as many make less than a quarter more tokens per
            second; ``None`` if there is no such number up to ``many``.
        gain: Share of more tokens per second by the last doubling up to the knee, or ``many``.
        preempted: Number of requests that the engine preempted, as its KV cache was full.
        most: Most requests that a replica ran at once.
    """

    few: int
    many: int
    requests: int | None
    gain: float
    preempted: int
    most: int

    @property
    def wanted(self) -> str:
        """How many requests a replica should get at once, as text."""
        if self.requests is None:
            return f"over {self.many:,}"
        about = "at most" if self.requests == self.few else "about"  # fewer were not seen
        return f"{about} {self.requests:,}"

    @property
    def sentence(self) -> str:
        """The reason as text."""
        if self.requests is None:
            text = f"twice as many made {self.gain:.0%} more tokens/s"
        else:
            text = f"beyond, twice as many make under {_GAIN:.0%} more tokens/s"
        if self.preempted:
            text += f"; KV cache full at {self.most:,}"
        return text


def knee_of(recorded: Replay, engines: Engines) -> Knee | None:
    """Return the knee of a step's replicas; ``None`` if its requests do not show it.

    Args:
        recorded: The step with the recorded replicas.
        engines: The engines, as fitted to its requests.
    """
    if 2 * engines.few > engines.many:
        return None  # no number of requests and its double were seen
    gain, knee, running = 0.0, None, engines.few
    while 2 * running <= engines.many and knee is None:
        gain = _gain(engines, running)
        if gain < _GAIN:
            knee = running
        running *= 2
    requests = {id(one.request): one.request for _, one in recorded.graph.segments.requested()}
    return Knee(
        few=engines.few,
        many=engines.many,
        requests=knee,
        gain=gain,
        preempted=sum(bool(request and request.preemptions) for request in requests.values()),
        most=int(engines.load.running.max()),
    )


def _gain(engines: Engines, running: int) -> float:
    """Return the share of more tokens per second with twice as many running requests."""
    seconds = engines.curves[1]
    return float(2 * seconds[running] / seconds[2 * running] - 1)
