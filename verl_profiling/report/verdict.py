"""The verdict of a comparison of runs, and the settings in which the runs differ.

Two starts of one configuration differ by more than the steps of a run do: in the order of memory,
the cores that processes get, the machine. So the unit of a comparison is the run, with the median
of its steps as its value. No distribution is assumed: the interval has each change for which the
real division of the runs into two sides is not among the most extreme of all divisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import ceil
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import RunInfo
from verl_profiling.report.watch_frame import STEP
from verl_profiling.units import duration, listed

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
_MOST_RUNS = 50  # more runs than this are no advice
_OF_A_RUN = ("save_path", "run_id")  # settings that differ between any two runs
_MOST_DIFFERENCES = 6  # in the line
# Two starts differ by less than this many spreads in 19 of 20 pairs: sqrt(2) z(0.975). It only
# plans runs.
_STARTS_PER_SPREAD = 2.8


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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the step changed, given the noise between starts of one configuration.

    Attributes:
        change_s: Change of the step (s per step).
        before_s: The step before (s).
        low_s: Lower end of the interval of the change (s).
        high_s: Upper end of the interval of the change (s).
        runs: Runs of A and of B.
        noise: Noise between the runs of a side; ``None`` with too few runs, where the interval is
            what two starts of a configuration usually differ by, or more if these runs do.
        more_runs: How many more runs each side needs to tell a change of this size; ``None`` if the
            change is told, or none.
    """

    change_s: float
    before_s: float
    low_s: float
    high_s: float
    runs: tuple[int, int]
    noise: Noise | None
    more_runs: int | None

    @property
    def sentence(self) -> str:
        """The verdict as text."""
        change, low, high = (
            f"{part_s / self.before_s:+.1%}" for part_s in (self.change_s, self.low_s, self.high_s)
        )
        noise = f"two starts of one configuration differ by up to {STARTS:.0%}"
        if self.noise is not None:
            total, steps = (f"±{part_s / self.before_s:.1%}" for part_s in self.noise)
            noise = f"runs differ by {total}, {steps} of it by their steps"
        took = duration(self.change_s, signed=True)
        runs = f"{self.runs[0]} and {self.runs[1]} runs"
        step = f"step {took} ({change}, between {low} and {high}); {runs}, {noise}"
        if self.more_runs is None:
            return f"{'slower' if self.low_s > 0 else 'faster'}: {step}"
        more = f"more than {_MOST_RUNS}" if self.more_runs > _MOST_RUNS else f"{self.more_runs}"
        return f"cannot tell: {step}; such a change needs {more} more runs a side"


def verdict_of(change_s: float, sides: Sequence[Sequence[Sequence[float]]]) -> Verdict:
    """Return the verdict on a number.

    Args:
        change_s: Change of the number (s).
        sides: Its value in each step (s), by side and run.
    """
    medians = [[median(steps) for steps in side] for side in sides]
    before_s = fmean(medians[0])
    noise = noise_of(sides)
    spread_s = noise.total_s
    ends = interval(*medians)
    is_floor = ends is None
    if ends is None:
        spread_s = max(STARTS * before_s / _STARTS_PER_SPREAD, spread_s)
        width_s = _STARTS_PER_SPREAD * spread_s
        ends = (change_s - width_s, change_s + width_s)
    low_s, high_s = ends
    runs = (len(sides[0]), len(sides[1]))
    is_told = low_s > 0 or high_s < 0
    return Verdict(
        change_s=change_s,
        before_s=before_s,
        low_s=low_s,
        high_s=high_s,
        runs=runs,
        noise=None if is_floor else noise,
        more_runs=None if is_told else more_runs(change_s, spread_s, min(runs)),
    )


def differences(before: Sequence[RunInfo], after: Sequence[RunInfo]) -> str:
    """Return versions and settings that differ between the sides: ``vllm 0.32 -> 0.33``."""
    sides = [list(map(_facts, side)) for side in (before, after)]
    if not all(sides):
        return ""
    parts = []
    for name in dict.fromkeys(name for side in sides for facts in side for name in facts):
        left, right = ({facts.get(name, "none") for facts in side} for side in sides)
        if left != right:
            parts.append(f"{name} {'/'.join(sorted(left))} -> {'/'.join(sorted(right))}")
    return listed(parts, _MOST_DIFFERENCES)


def _facts(info: RunInfo) -> dict[str, str]:
    facts = dict(info.versions)
    for name, value in _leaves(info.config):
        if name not in _OF_A_RUN:
            facts[name.removeprefix("job.")] = str(value)
    return facts


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def contradiction(diff: Any) -> str:
    """Return a sentence if the watched steps changed one way, and the captured ones another.

    Args:
        diff: The ``Diff``, whose module imports this one.
    """
    steps = {change.kind: change for change in diff.changes if change.name == STEP}
    watched, captured = steps.get("watch"), steps.get("step")
    if watched is None or captured is None or not captured.stands_out:
        return ""
    if watched.change_s * captured.change_s >= 0:
        return ""
    before, after = diff.logged
    return (
        f"the {before:,} and {after:,} steps of the watch changed by "
        f"{duration(watched.change_s, signed=True)}, and the {diff.before} and {diff.after} "
        f"captured ones by {duration(captured.change_s, signed=True)}: believe the watch; "
        "the parts and the tables of captures are of these steps only"
    )
