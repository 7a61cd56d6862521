"""A step on other resources: other replicas, rollouts ahead of the training, or a split of the devices.

The prediction is a likely step and an interval. The ends of the interval are steps under other assumptions on
what a capture does not show: the order of requests, the time of engines, and who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from verl_profiling.errors import ConfigError
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.predict.changes import Changes, check_name
from verl_profiling.predict.graph import CAPTURE, NEXT_POLL, OWN, Graph, Segment
from verl_profiling.predict.path import Replay, replay
from verl_profiling.predict.replicas import Simulation, fitted, has_requests
from verl_profiling.report.capture_rows import VALIDATE
from verl_profiling.report.lost import ROLLOUT

_NOT_LOGGED = (
    "extrapolated: without logged requests, the time of a rollout is between the recorded one and one in "
    "proportion to its replicas, or to the rollouts at once"
)
_ORDERS = 7  # random ones, of round robin
_WARM, _STEADY = 1, 2  # rounds of steps: before the mean step is taken, and for it
_WHOLE, _AFTER, _FIRST = "whole", "after", "first"  # trajectories that a training and a rollout wait for


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
    graph, ahead, replicas, factors = found.graph, changes.ahead, changes.replicas, [1.0]
    if changes.split or ahead:
        option = "--split" if changes.split else "--async"
        check_name(option, f"stage {ROLLOUT!r}", ROLLOUT, {one.stage for one in graph.segments} - {""})
        if not graph.whole:
            raise ConfigError(
                option, "needs a step whose rollout begins and ends in it, with engines recorded"
            )
    if changes.split:
        replicas, factor = _pools(graph, *changes.split, assumed)
        factors = [factor, 1.0]  # the training in proportion to its devices, or as long as before
        replicas = replicas if replicas != len(graph.engines) else None
    elif replicas is not None:
        assumed.append(f"the capture has all replicas of the run: {len(graph.engines):,}")
    logged, rollouts = has_requests(graph), [found]
    if not logged and (changes.split or ahead > 1):
        notes.append(_NOT_LOGGED)
    if replicas is not None and changes.split and not logged:
        ratio = len(graph.engines) / replicas
        rollouts = [_scaled(found, factor, _rolls_out) for factor in ((1 + ratio) / 2, 1.0, ratio)]
    elif replicas is not None and not (ahead > 1 and logged):
        rollouts = _on_replicas(found, replicas, "--split" if changes.split else "--replicas", assumed, notes)
    steps = [_scaled(one, factor, _trains, delays=False) for one in rollouts for factor in factors]
    if not ahead:
        return steps[0], [one.span_ns for one in steps]
    loop = graph.segments[graph.last].who
    pairs = []
    for one in steps:
        rollout = _scaled(one, 0, lambda stage, _: stage not in (ROLLOUT, WEIGHT_SYNC))
        # The loop's own time in a rollout may be a part of the training.
        pairs += [(_without_rollout(one, ""), rollout), (_without_rollout(one, loop), rollout)]
    if ahead > 1:
        return _some_ahead(pairs, replicas, ahead, assumed, notes)
    longer = [max(pair, key=lambda one: one.span_ns) for pair in pairs]
    return longer[0], [one.span_ns for one in longer]


def _pools(graph: Graph, training: int, rollout: int, assumed: list[str]) -> tuple[int, float]:
    """Return the number of replicas of a split, and the factor of the training's time in proportion.

    A worker without a known device counts as one, unless other workers have devices.

    Args:
        graph: The graph.
        training: Number of devices of the training.
        rollout: Number of devices of the rollout.
        assumed: Sentences on what is assumed, which get one more.
    """
    trainers = {one.who for one in graph.segments if _trains(one.stage, one)}
    if not trainers:
        raise ConfigError("--split", "needs stages of workers that train")
    on_devices = any(graph.devices.values())
    sizes = {len(graph.devices.get(name, ())) or int(not on_devices) for name in graph.engines}
    if len(sizes) != 1 or not min(sizes):
        raise ConfigError("--split", "the capture does not tell how many devices each replica has")
    (size,) = sizes
    if rollout % size:
        raise ConfigError("--split", f"a replica has {size} devices, and {rollout} is no multiple of it")
    devices = set[str]().union(*(graph.devices.get(name) or {name} for name in trainers))
    assumed.append(
        f"the capture has all workers of the run: {len(devices):,} train, and {len(graph.engines):,} replicas"
    )
    return rollout // size, len(devices) / training


def _trains(stage: str, one: Segment) -> bool:
    """Return whether a segment in an outermost stage is work of the training."""
    is_work = one.kind not in (OWN, CAPTURE, NEXT_POLL) and not one.trajectory and one.request is None
    return is_work and stage not in ("", ROLLOUT, WEIGHT_SYNC, VALIDATE)


def _rolls_out(stage: str, one: Segment) -> bool:
    return stage == ROLLOUT


def _without_rollout(found: Replay, who: str) -> Replay:
    """Return the replay without the rollout, but with the own time of a process in it."""
    return _scaled(found, 0, lambda stage, one: stage == ROLLOUT and one.who != who)


def _scaled(
    found: Replay, factor: float, which: Callable[[str, Segment], bool], *, delays: bool = True
) -> Replay:
    """Return the replay in which some times are multiplied by a factor.

    Args:
        found: The replay.
        factor: The factor.
        which: Function that selects times, of the outermost stage around a time and of the segment.
        delays: Whether the delays before segments are selected, too.
    """
    took_ns, delay_ns = list(found.took_ns), list(found.delay_ns)
    for at, one in enumerate(found.graph.segments):
        if which(one.stage, one):
            took_ns[at] = round(took_ns[at] * factor)
        if delays and which((*one.around, "")[0], one):
            delay_ns[at] = round(delay_ns[at] * factor)
    return replay(found.graph, took_ns, delay_ns, found.given)


def _on_replicas(
    recorded: Replay, replicas: int, option: str, assumed: list[str], notes: list[str]
) -> list[Replay]:
    """Return the replays in which another number of replicas serves the requests.

    The first is the likely one, with the fitted curve and each request at the replica with the fewest
    requests. The others are the ends of the interval, with other curves and round robin.

    Args:
        recorded: The step with the recorded replicas.
        replicas: Number of replicas.
        option: The option, for errors.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.
    """
    engines = fitted(recorded, replicas, option)
    most = len(engines.served)
    random = np.random.default_rng(0)
    orders = [None, range(most), *(random.permutation(most).tolist() for _ in range(_ORDERS))]
    spent_ns, found = np.zeros(most + 1), []
    step = recorded.took_ns, recorded.delay_ns, recorded.given
    simulation = Simulation(*step, engines.served, engines.slots, spent_ns)
    for curve, tried in zip(engines.curves, (orders[:2], orders[:1], orders), strict=True):
        work = engines.work(curve, recorded.took_ns)
        found.append([simulation.replay(replicas, curve, work, order)[0] for order in tried])
    assumed += engines.assumed()
    notes += engines.notes(spent_ns)
    return [
        replay(recorded.graph, list(map(round, ns)), recorded.delay_ns, recorded.given)
        for ns in (*found[1], *found[0], *found[2])
    ]


def _some_ahead(
    pairs: Sequence[tuple[Replay, Replay]],
    replicas: int | None,
    ahead: int,
    assumed: list[str],
    notes: list[str],
) -> tuple[Replay, list[int]]:
    """Return the likely step of rollouts that go on for several steps, and what the interval spans (ns).

    Args:
        pairs: Training and rollout of a step, the likely ones first.
        replicas: Number of replicas; by default as recorded.
        ahead: Most steps that a rollout is ahead of the training.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.
    """
    training, rollout = pairs[0]
    alone = _scaled(rollout, 0, lambda stage, _: stage != ROLLOUT)
    sync_ns = rollout.span_ns - alone.span_ns
    trained_ns, made_ns = (
        [times[0], min(times), max(times)]
        for times in ([one.span_ns - sync_ns for one in side] for side in zip(*pairs, strict=True))
    )
    if has_requests(rollout.graph):
        steps_ns = _means_ns(alone, replicas, ahead, trained_ns, assumed, notes)
    else:
        both = list(zip(trained_ns, made_ns, strict=True))
        as_fast = [max(train, (train + made) / (ahead + 1)) for train, made in both]
        shared = [max(train, made) for train, made in both]  # the rollouts at once share the engines' time
        steps_ns = [(as_fast[0] + shared[0]) / 2, as_fast[1], shared[2]]
    if steps_ns[0] > trained_ns[0]:
        whole = rollout._replace(graph=replace(rollout.graph, polls={}))  # a mean of steps ends at no poll
        training = _scaled(whole, steps_ns[0] / alone.span_ns, _rolls_out)
    return training, [training.span_ns, *(round(ns) + sync_ns for ns in steps_ns)]


def _means_ns(
    rollout: Replay,
    replicas: int | None,
    ahead: int,
    trained_ns: Sequence[float],
    assumed: list[str],
    notes: list[str],
) -> list[float]:
    """Return the mean step of a run whose rollouts go on for several steps beside the training (ns).

    A rollout begins once the training of some steps before has ended. The first begin at once.

    Args:
        rollout: The rollout alone, with the recorded replicas.
        replicas: Number of replicas; by default as recorded.
        ahead: Most steps that a rollout is ahead of the training.
        trained_ns: Likely, least and most time of the training.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.

    Returns:
        The likely mean, and those at the ends of the interval.
    """
    engines = fitted(rollout, replicas, "--async", ahead)
    replicas = engines.load.replicas if replicas is None else replicas
    each, size = ahead + 1, len(rollout.took_ns)
    count = each * (_WARM + _STEADY + 1)  # the last are alone in the engines
    trainings = [count * size + step for step in range(count)]
    took_ns, delay_ns = ([*list(ns) * count, *[0] * count] for ns in (rollout.took_ns, rollout.delay_ns))
    served = [one.in_step(step, step * size) for step in range(count) for one in engines.served]
    lasts = set(chain.from_iterable(rollout.graph.tails.values()))
    likely, least, longest = trained_ns
    spent_ns, found = np.zeros(len(engines.curves[0])), []
    low, middle, high = engines.curves
    longest_steps = [(high, longest, order) for order in (None, range(len(served)))]
    for by, tried in (
        (_WHOLE, [(middle, likely, None), (low, least, None), *longest_steps]),
        (_AFTER, longest_steps),
        (_FIRST, [(low, least, None)] if lasts else []),
    ):
        after = _edges(rollout, trainings, ahead, by)
        simulation = Simulation(took_ns, delay_ns, after, served, engines.slots, spent_ns)
        takers = [at for at in trainings for _ in lasts] if by == _FIRST else []
        ended = {at + step * size for at in lasts for step in range(count)} if takers else set()
        for curve, training_ns, order in tried:
            work = engines.work(curve, rollout.took_ns) * count
            times_ns = dict.fromkeys(trainings, training_ns)
            end_ns = simulation.replay(replicas, curve, work, order, ended, takers, times_ns)[1]
            first, last = (end_ns[trainings[each * rounds - 1]] for rounds in (_WARM, _WARM + _STEADY))
            found.append((last - first) / (each * _STEADY))
    assumed += [
        *engines.assumed(),
        "the training of a step waits for its own trajectories; in the interval, also for as many that end "
        "first",
        "a rollout begins after the training of an earlier step; in the interval, also after a rollout",
    ]
    notes += engines.notes(spent_ns)
    return found


def _edges(rollout: Replay, trainings: Sequence[int], ahead: int, by: str) -> list[list[int]]:
    """Return the edges to the segments of several rollouts, and then to the trainings.

    Args:
        rollout: Each of the rollouts, whose segments follow those of the rollout before.
        trainings: Numbers of the trainings, each a segment.
        ahead: Most steps that a rollout is ahead of the training.
        by: ``whole``: a training waits for the rollout of its step. ``after``: a rollout also waits for an
            earlier one. ``first``: a training waits for no rollout of a certain step.
    """
    size, last, steps = len(rollout.took_ns), rollout.graph.last, range(len(trainings))
    after: list[list[int]] = []
    for step in steps:
        base = step * size
        before = [trainings[step - ahead - 1]] if step > ahead else []
        if by == _AFTER and step >= ahead:
            before.append(base - ahead * size + last)
        after += [[base + at for at in edges] or before for edges in rollout.given]
    for step in steps:
        own = [] if by == _FIRST else [step * size + last]
        after.append([*own, *trainings[max(step - 1, 0) : step]])
    return after
