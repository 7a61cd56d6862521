"""The slack of a step: how much longer its segments could take without a longer step."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import msgspec
import numpy as np

from verl_profiling.numbers.stage_rows import OUTSIDE_STAGES
from verl_profiling.predict.replays import Replay
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import Ints, grouped, length, union


class SlackRow(msgspec.Struct, frozen=True, kw_only=True):
    """The slack of a process in a stage.

    Attributes:
        stage: The outermost stage.
        who: Lane, worker or the loop.
        time_us: Time in which the process works in the stage.
        slack_us: How much longer this could take without a longer step; 0 on the critical path.
    """

    columns: ClassVar[str] = "stage, who, works=time_us, slack=slack_us"

    stage: str
    who: str
    time_us: float
    slack_us: float


def slack_rows(replayed: Replay) -> list[SlackRow]:
    """Return the slack of each process in each stage, given a replay."""
    slack, end, took = slacks_ns(replayed), replayed.end_ns, replayed.took_ns
    rows = []
    for (stage, who), ats in _by_stage_and_process(replayed).items():
        busy = union(np.stack((end[ats] - took[ats], end[ats]), axis=1))
        slack_us = slack[ats].min().item() / 1000
        rows.append(SlackRow(stage=stage, who=who, time_us=length(busy) / 1000, slack_us=slack_us))
    return rows


def _by_stage_and_process(replayed: Replay) -> dict[tuple[str, str], Ints]:
    """Return the segments that take time by outermost stage and process, in order of adding."""
    graph, took = replayed.graph, replayed.took_ns
    placed = defaultdict[tuple[str, str], list[tuple[float, Ints]]](list)
    for at in sorted(replayed.order):
        segment = graph.segments[at]
        if took[at] > 0:
            place = at - graph.segments.chained + 0.5
            placed[segment.stage or OUTSIDE_STAGES, segment.who].append((place, np.array([at])))
    chains = graph.segments.chains
    if chains is not None:
        keys = [((*link.within, OUTSIDE_STAGES)[0], who) for link, who in chains.linked_to()]
        for key, numbers in grouped(range(len(keys)), keys.__getitem__).items():
            ats = chains.rows_of(numbers)
            ats = ats[took[ats] > 0]
            if len(ats):
                place = min(chains.links[number].place for number in numbers)
                placed[key].append((place, ats))
    firsts = {key: min(place for place, _ in parts) for key, parts in placed.items()}
    return {
        key: np.concatenate([ats for _, ats in placed[key]])
        for key in sorted(placed, key=firsts.__getitem__)
    }


def slacks_ns(replayed: Replay) -> Ints:
    """Return how much longer each segment could take without a longer step.

    A segment that the step does not wait for could go on until the end of the step. One that a
    poll waits for could go on until that poll.
    """
    graph, ends, chained = replayed.graph, replayed.ends, replayed.graph.segments.chained
    last_ns = ends[graph.last]
    latest_ns = [last_ns] * len(ends)
    needed, lasts = {graph.last}, _lasts_by_caller(graph)
    for at in reversed(replayed.order):
        for last in lasts.get(at, ()):
            if last in needed:
                needed.add(at)
                latest_ns[at] = min(latest_ns[at], ends[at] + latest_ns[last] - ends[last])
        if at not in needed:
            continue
        before, slack_ns = replayed.before(at), latest_ns[at] - ends[at]
        ready_ns = max(map(ends.__getitem__, before), default=0) + slack_ns
        poll = graph.polls.get(at)
        if poll:
            delay_ns = replayed.delay_ns.item(at)
            before, ready_ns = [*before, poll.after], ends[at] - delay_ns - 1
        for one in before:
            until_ns = ends[one] + slack_ns if poll and one == poll.after else ready_ns
            latest_ns[one] = min(latest_ns[one], until_ns)
        needed.update(before)
    latest = np.array(latest_ns, np.int64)
    chains = graph.segments.chains
    if chains is not None:
        at_last = latest[chains.last] - replayed.end_ns[chains.last]
        is_needed = np.array([last in needed for last in chains.last.tolist()], bool)
        slack = chains.of_each(at_last) + replayed.end_ns[:chained]
        latest[:chained] = np.where(chains.of_each(is_needed), slack, last_ns)
    slacks: Ints = np.maximum(latest - replayed.end_ns, 0)
    return slacks


def _lasts_by_caller(graph: Graph) -> dict[int, list[int]]:
    """Return the last segments of the chains that follow each segment."""
    chains = graph.segments.chains
    if chains is None:
        return {}
    return {caller: chains.last[numbers].tolist() for caller, numbers in graph.called.items()}
