"""The noise of a comparison of runs: between starts, inside a run, and the interval of a change.

Two starts of one configuration differ by more than the steps of a run do: in the order of memory,
the cores that processes get, the machine. So the unit of a comparison is the run, with the median
of its steps as its value. No distribution is assumed: the interval has each change for which the
real division of the runs into two sides is not among the most extreme of all divisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.05
"""Share of comparisons without a change in which an interval may say that there is one."""
LEAST_RUNS = 4
"""Runs a side from which on there are enough divisions for an interval at :data:`LEVEL`."""

STARTS = 0.22
"""How much two starts of one configuration usually differ by, as a share. Published are 12 to 22%;
12 of the 13 unchanged pairs of `make what-if-judge` differ by less than 5%, one by 29%.
"""

_DIVISIONS = 5_000  # drawn at random: 5 and 5 runs have 252, 10 and 10 runs have 184,756
_LEAST = 1e-9  # of a change, in seconds
_DRAWS = 200  # of the bootstrap of a run's steps
# Runs a side for a change of one spread: 2 (z(0.975) + z(0.9))^2, found in nine of ten cases. It
# only plans; `make verdict-judge` checks that the planned runs find the change.
_RUNS_PER_SPREAD = 21.0


class Noise(NamedTuple):
    """The noise of a number between the runs of a side.

    Attributes:
        total_s: Spread (standard deviation) between the medians of the runs (s).
        steps_s: The part of it that the runs' own steps explain (s).
    """

    total_s: float
    steps_s: float


def interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the change of the mean; ``None`` with too few runs.

    Args:
        before: Value of each run of A.
        after: Value of each run of B.
    """
    weights, moved, extreme = _divisions(len(before), len(after))
    if extreme < 0:
        return None
    changes = weights @ np.array([*before, *after])
    shifts = np.sort((np.mean(after) - np.mean(before) - changes) / (1 - moved))
    return float(shifts[extreme]), float(shifts[-1 - extreme])


@lru_cache
def _divisions(before: int, after: int) -> tuple[Floats, Floats, int]:
    """Return random divisions of all runs into two sides, other than the real one.

    Returns:
        The weight of each run in the change of the mean; by how much a shift of B moves this
        change; and how many divisions are more extreme than the ends of the interval.
    """
    real = np.repeat([-1 / before, 1 / after], [before, after])
    weights = np.random.default_rng(0).permuted(np.tile(real, (_DIVISIONS, 1)), axis=1)
    moved = weights[:, before:].sum(axis=1)
    is_other = moved < 1 - 1e-9
    extreme = int(LEVEL / 2 * _DIVISIONS) - int((~is_other).sum())  # the real one is one of them
    return weights[is_other], moved[is_other], extreme


def noise_of(sides: Sequence[Sequence[Sequence[float]]]) -> Noise:
    """Return the noise, given the steps of each run of each side.

    Without a side of several runs, it is only that of the steps.
    """
    random = np.random.default_rng(0)
    squares = spare = 0.0
    inside = []
    for side in sides:
        squares += np.var([np.median(steps) for steps in side]) * len(side)
        spare += len(side) - 1
        for steps in side:
            drawn = random.choice(steps, (_DRAWS, len(steps)))
            inside.append(np.median(drawn, axis=1).var())
    steps_s = float(np.sqrt(np.mean(inside)))
    return Noise(float(np.sqrt(squares / spare)) if spare else steps_s, steps_s)


def more_runs(change: float, spread: float, runs: int) -> int:
    """Return how many more runs each side needs to tell a change.

    Args:
        change: The change.
        spread: Spread between the runs of a side.
        runs: Runs of the side with fewer runs.
    """
    needed = ceil(_RUNS_PER_SPREAD * (spread / max(abs(change), _LEAST)) ** 2) + 1
    return max(needed, LEAST_RUNS, runs + 1) - runs
