"""Factors of a stage's segments after its work is divided anew among its workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.predict.segments import WORK
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.slices import Floats

BY_WORK, LONGEST_FIRST = "work", "longest-first"
"""Ways to divide work: equally, and run by run, each next longest one to the worker with least."""


def shares_by_work(graph: Graph, stage: str, way: str) -> dict[int, float]:
    """Return the factors of a stage's segments with which workers have other work.

    Each worker keeps its pace, so a slow machine stays slow. Times in collectives stay.

    Args:
        graph: The graph.
        stage: The stage.
        way: ``work`` or ``longest-first``.

    Raises:
        ConfigError: There is no such way, or the work is unknown.
    """
    if way not in (BY_WORK, LONGEST_FIRST):
        hint = choices_hint(way, (BY_WORK, LONGEST_FIRST))
        raise ConfigError("--balance", f"{stage}={way}: no way to divide work; {hint}")
    loads = graph.loads(stage)
    if not loads:
        raise ConfigError(
            "--balance",
            f"the work in {stage} is unknown, or of too few runs; pass it: "
            f'with stage("{stage}").given(lengths=lengths)',
        )
    after = dict(zip(loads, _divided([load.expected for load in loads.values()], way), strict=True))
    factors: dict[int, float] = {}
    for at, segment in graph.segments.of_others():
        load = loads.get(segment.who)
        if load is None or segment.kind != WORK or stage not in segment.within:
            continue
        run = int(np.searchsorted(load.begin_ns, segment.begin_ns, side="right")) - 1
        if run >= 0 and segment.begin_ns < load.end_ns[run]:
            factors[at] = float(after[segment.who][run] / load.expected[run])
    return factors


def _divided(before: Sequence[Floats], way: str) -> list[Floats]:
    """Return the expected time of each run of each worker after the work is divided anew.

    Workers with equally many runs, such as micro-batches, do their nth ones at the same time. They
    get the runs in rounds; in each round, the longest goes to the worker with least so far. Others
    only have other totals.
    """
    if len({*map(len, before)}) > 1:
        totals = np.array([own.sum() for own in before])
        return [own * totals.mean() / total for own, total in zip(before, totals, strict=True)]
    runs = np.stack(before)
    if way == BY_WORK:
        return [runs.mean(axis=0) for _ in before]
    rounds = np.sort(runs, axis=None)[::-1].reshape(-1, len(before))
    after = np.zeros_like(runs)
    for number, lengths in enumerate(rounds):
        after[np.argsort(after.sum(axis=1), kind="stable"), number] = lengths
    return list(after)
