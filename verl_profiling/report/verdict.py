"""The verdict of a comparison of runs, and the settings in which the runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from verl_profiling.manifest import RunInfo
from verl_profiling.numbers.noise import STARTS, Noise, interval, more_runs, noise_of
from verl_profiling.report.watch_frame import STEP
from verl_profiling.units import duration, listed

_MOST_RUNS = 50  # more runs than this are no advice
_OF_A_RUN = ("save_path", "run_id")  # settings that differ between any two runs
_MOST_DIFFERENCES = 6  # in the line
# Two starts differ by less than this many spreads in 19 of 20 pairs: sqrt(2) z(0.975). It only
# plans runs.
_STARTS_PER_SPREAD = 2.8


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
