"""Explains the difference of two runs, A and B: A's steps are replayed with the times of B.

A part is an outermost stage, or one kind of the time of trajectories and requests. The time of
responses is two parts: their lengths, and the time per token. Values of A become the values of B
with the same rank: the median becomes the median, and the longest the longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import sub
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.predict.replays import replay
from verl_profiling.predict.segments import DELAY, WORK
from verl_profiling.predict.step_graph import Graph
from verl_profiling.steps.causes import joined_causes
from verl_profiling.steps.trajectory_columns import BEFORE, OTHERS, UNEXPLAINED

_RESPONSES = ("decode", "generate")  # kinds whose time grows with the length of the response

_LEAST_SHARE = 0.005  # minimum effect of a listed part, as a share of the step
_MOST_TIMES = 100  # largest factor from A to B; what grows more was next to nothing in A


class _Unit(NamedTuple):
    """The time of one part in one step, for one process, trajectory or request.

    Attributes:
        step: Index of the step.
        at: Indexes of its segments; the delay of segment i of n has the index n + i.
        value: The time (ns), the tokens, or the time per token.
    """

    step: int
    at: list[int]
    value: float


_Units = dict[tuple[str, str], list[_Unit]]
_Changes = list[tuple[_Unit, float]]


def explain(before: Sequence[Graph], after: Sequence[Graph]) -> dict[str, tuple[float, float]]:
    """Return how much each part explains of the difference between the median steps, and the noise
    (s).

    The parts are replaced one after the other, first the part with the largest effect alone. Parts
    that only B has are removed from B. The last value is the unexplained rest, so all add up to the
    difference. A rest larger than the difference is the only value, as the parts explain nothing.

    Args:
        before: The steps of A, at least one.
        after: The steps of B, at least one.
    """
    sides = (before, after)
    kinds = joined_causes(*map(_kinds, sides))
    has_tokens = all(map(_has_tokens, sides))
    units, others = (_units(side, kinds, has_tokens) for side in sides)
    changes, gone = _changes(units, others)
    explained_s = _in_turn(before, changes)
    explained_s |= {part: -s for part, s in _in_turn(after, gone).items()}
    spans_s = [[(graph.end_ns - graph.begin_ns) / 1e9 for graph in side] for side in sides]
    change_s = median(spans_s[1]) - median(spans_s[0])
    least_s = _LEAST_SHARE * median(spans_s[0])
    step_noise_s = max((max(side) - min(side)) / 2 for side in spans_s)
    rest_s = change_s - sum(explained_s.values())
    if abs(rest_s) > max(abs(change_s), least_s):
        return {UNEXPLAINED: (change_s, step_noise_s)}
    replayed = [(before, units, _spans_s(before)), (after, others, _spans_s(after))]
    parts, small_s = dict[str, tuple[float, float]](), 0.0
    for part, s in explained_s.items():
        if abs(s) >= least_s:
            parts[part] = s, max(_noise_s(*side, part) for side in replayed)
        else:
            small_s += s
    return parts | {OTHERS: (small_s, step_noise_s), UNEXPLAINED: (rest_s, step_noise_s)}


def _kinds(graphs: Sequence[Graph]) -> set[str]:
    return set[str]().union(*(graph.segments.kinds() for graph in graphs))


def _has_tokens(graphs: Sequence[Graph]) -> bool:
    """Return whether any request has the number of its response tokens."""
    parts = chain.from_iterable(graph.segments.requested() for graph in graphs)
    return any(part.request and part.request.response_tokens for _, part in parts)


def _changes(units: _Units, others: _Units) -> tuple[dict[str, _Changes], dict[str, _Changes]]:
    """Return by part the changes from A to B, and the removals from B of what only B has."""
    changes: defaultdict[str, _Changes] = defaultdict(list)
    gone: defaultdict[str, _Changes] = defaultdict(list)
    for (part, kind), of_part in units.items():
        changes[part] += _replaced(of_part, others.get((part, kind), ()))
    for (part, _), of_part in others.items():
        if part not in changes:
            gone[part] += [(unit, 0.0) for unit in of_part]
    return changes, gone


def _in_turn(graphs: Sequence[Graph], changes: Mapping[str, _Changes]) -> dict[str, float]:
    """Apply the changes part by part, and return by how much each one changes the median step (s).

    The part whose changes have the largest effect alone is first.
    """
    last_s = median(_spans_s(graphs))
    alone = {
        part: abs(median(_spans_s(graphs, change)) - last_s) for part, change in changes.items()
    }
    effects: dict[str, float] = {}
    done: _Changes = []
    for part in sorted(alone, key=lambda part: -alone[part]):
        done += changes[part]
        before_s, last_s = last_s, median(_spans_s(graphs, done))
        effects[part] = last_s - before_s
    return effects


def _noise_s(
    graphs: Sequence[Graph], units: _Units, recorded_s: Sequence[float], part: str
) -> float:
    """Return how much a part's effect on the step varies among steps: half of its range (s).

    In each step, the effect is that of replacing the part's usual times by those of the step.
    """
    usual: _Changes = []
    for (name, _), of_part in units.items():
        if name == part:
            for step in range(len(graphs)):
                usual += _replaced([unit for unit in of_part if unit.step == step], of_part)
    excess = list(map(sub, recorded_s, _spans_s(graphs, usual)))
    return float(max(excess) - min(excess)) / 2


def _units(graphs: Sequence[Graph], kinds: Mapping[str, str], has_tokens: bool) -> _Units:
    """Return the times by part and kind.

    Args:
        graphs: The steps of a side.
        kinds: Kind that a part of requests counts as, if a side has it only joined with others.
        has_tokens: Whether the tokens of both sides are recorded.
    """
    units: _Units = defaultdict(list)
    for step, graph in enumerate(graphs):
        took = graph.segments.recorded_ns()
        for at, poll in graph.polls.items():
            took[at] = poll.period_ns
        times = np.concatenate((took, graph.delay_ns)).astype(float)
        for (part, kind, stage, *_), places in _owned(graph, kinds).items():
            spent = float(times[places].sum())
            if spent <= 0:
                continue
            tokens = 0
            if has_tokens and kind in _RESPONSES:
                requests = {graph.segments[at].request for at in places}
                tokens = sum(request.response_tokens for request in requests if request)
            if tokens:
                lengths, per_token = f"response lengths of {stage}", f"time per token of {stage}"
                units[lengths, ""].append(_Unit(step, places, tokens))
                units[per_token, ""].append(_Unit(step, places, spent / tokens))
            else:
                units[part, kind].append(_Unit(step, places, spent))
    return units


def _owned(graph: Graph, kinds: Mapping[str, str]) -> dict[tuple[Any, ...], list[int]]:
    """Return the indexes of segments and delays (:attr:`_Unit.at`) by what they are the time of:
    part, kind, outermost stage, process, and trajectory or request.

    Waits for something unknown are left out, so their growth stays unexplained.
    """
    owned = defaultdict[tuple[Any, ...], list[int]](list)
    for at, segment in enumerate(graph.segments):
        if segment.waits:
            continue
        kind = kinds.get(segment.kind, segment.kind)
        if segment.kind == BEFORE and not segment.trajectory:
            kind = WORK
        delay_at = at + len(graph.segments)
        for stages, of_kind, number in (
            (segment.within, kind, at),
            (segment.around, DELAY, delay_at),
        ):
            whose = segment.trajectory or segment.request
            stage = (*stages, ROLLOUT if whose else OUTSIDE_STAGES)[0]
            part = f"{of_kind} of {stage}" if whose else stage
            if number == at and segment.is_capture:
                part = CAPTURE_CALLS
            owned[part, of_kind, stage, segment.who, whose].append(number)
    return owned


def _replaced(units: Sequence[_Unit], others: Sequence[_Unit]) -> _Changes:
    """Return for each unit the factor that gives it the value of the same rank in ``others``;
    0 without others.
    """
    values, wanted = (np.array([unit.value for unit in side]) for side in (units, others or units))
    ranks = (values.argsort().argsort() + 0.5) / len(values)
    matched = np.interp(ranks, (np.arange(len(wanted)) + 0.5) / len(wanted), np.sort(wanted))
    factors = np.minimum(matched / values, _MOST_TIMES) * bool(others)
    return list(zip(units, factors.tolist(), strict=True))


def _spans_s(graphs: Sequence[Graph], changes: Sequence[tuple[_Unit, float]] = ()) -> list[float]:
    """Return the durations of the steps (s), replayed with these factors of their times."""
    factors = [np.ones(2 * len(graph.segments)) for graph in graphs]
    for unit, factor in changes:
        factors[unit.step][unit.at] *= factor
    spans = []
    for graph, of_step in zip(graphs, factors, strict=True):
        count = len(graph.segments)
        recorded = np.concatenate((graph.segments.recorded_ns(), graph.delay_ns)).astype(float)
        times = np.rint(recorded * of_step).astype(np.int64)
        graph = graph.with_polls(of_step.item)
        spans.append(replay(graph, times[:count], times[count:]).span_ns / 1e9)
    return spans
