"""A step on other resources: other replicas, or the next rollout beside the training.

The prediction is a likely step and an interval. The ends of the interval are steps under other
assumptions on what a capture does not show: the order of requests, the time of engines, and who
waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from verl_profiling.errors import ConfigError
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.numbers.lost import ROLLOUT
from verl_profiling.predict.changes import Changes, check_name
from verl_profiling.predict.path import Replay, replay
from verl_profiling.predict.replicas import Simulation, fitted

_ORDERS = 7  # random ones, of round robin


def on_resources(
    found: Replay, changes: Changes, assumed: list[str], notes: list[str]
) -> tuple[Replay, list[int]]:
    """Return the likely step with other resources, and the durations (ns) that its interval spans.

    Args:
        found: The replay with all other changes.
        changes: The changes.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.

    Raises:
        ConfigError: The step lacks what the prediction needs.
    """
    graph, steps = found.graph, [found]
    if changes.steps_ahead:
        check_name(
            "--async", f"stage {ROLLOUT!r}", ROLLOUT, {one.stage for one in graph.segments} - {""}
        )
        if not graph.whole:
            raise ConfigError(
                "--async", "needs a step whose rollout begins and ends in it, with engines recorded"
            )
    if changes.replicas is not None:
        assumed.append(f"the capture has all replicas of the run: {len(graph.engines):,}")
        steps = _on_replicas(found, changes.replicas, assumed, notes)
    if changes.steps_ahead:
        steps = [step for one in steps for step in _rollout_beside(one)]
    return steps[0], [step.span_ns for step in steps]


def _rollout_beside(step: Replay) -> Iterator[Replay]:
    """Yield the longer one of training and rollout, each with the weight update: the likely one
    first.

    The loop's own time in a rollout may be a part of the training.
    """
    rollout = _without(step, lambda stage, _: stage not in (ROLLOUT, WEIGHT_SYNC))
    loop = step.graph.segments[step.graph.last].who
    for training in (
        _without(step, lambda stage, _: stage == ROLLOUT),
        _without(step, lambda stage, who: stage == ROLLOUT and who != loop),
    ):
        yield max((training, rollout), key=lambda side: side.span_ns)


def _without(step: Replay, is_gone: Callable[[str, str], bool]) -> Replay:
    """Return the replay without some times and delays,
    by their outermost stage and their process.
    """
    took_ns, delay_ns = list(step.took_ns), list(step.delay_ns)
    for at, segment in enumerate(step.graph.segments):
        if is_gone(segment.stage, segment.who):
            took_ns[at] = 0
        if is_gone((*segment.around, "")[0], segment.who):
            delay_ns[at] = 0
    return replay(step.graph, took_ns, delay_ns, step.given)


def _on_replicas(
    recorded: Replay, replicas: int, assumed: list[str], notes: list[str]
) -> list[Replay]:
    """Return the replays in which another number of replicas serves the requests.

    The first is the likely one, with the fitted curve and each request at the replica with the
    fewest requests. The others are the ends of the interval, with other curves and round robin.

    Args:
        recorded: The step with the recorded replicas.
        replicas: Number of replicas.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.
    """
    engines = fitted(recorded, replicas)
    random = np.random.default_rng(0)
    clients = range(len(engines.served))
    orders = [None, clients, *(random.permutation(clients).tolist() for _ in range(_ORDERS))]
    low, likely, high = engines.curves
    spent_ns = np.zeros(len(clients) + 1)
    steps = list[Replay]()
    for curve, tried in ((likely, orders[:1]), (low, orders[:2]), (high, orders)):
        for order in tried:
            took_ns = Simulation(recorded, engines, replicas, curve, order, spent_ns).took_ns
            whole_ns = list(map(round, took_ns))
            steps.append(replay(recorded.graph, whole_ns, recorded.delay_ns, recorded.given))
    assumed += engines.assumed()
    notes += engines.notes(spent_ns)
    return steps
