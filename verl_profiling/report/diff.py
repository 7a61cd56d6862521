"""Compares two steps or two runs: changes of stages, lanes, causes and kernels, and their noise.

Compared are medians over the captured steps of each side, and over all steps of the watch's log;
runs with a watch need no captures. The noise is half the range over the steps of a side, the larger
of both sides. Noise is known only if each side has several steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import sqrt
from statistics import correlation, median
from types import MappingProxyType
from typing import ClassVar

import msgspec
import numpy as np
from rich.console import Console

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.numbers.columns import sum_of
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS
from verl_profiling.report.model import Report
from verl_profiling.report.run_page import stage_seconds
from verl_profiling.report.scaling import Scaling, scaling_of
from verl_profiling.report.sentences import sparkline
from verl_profiling.report.tables import cells, named, without_middle
from verl_profiling.report.terminal import fitting_console, print_table
from verl_profiling.report.watch_frame import STEP, seconds_of
from verl_profiling.steps.causes import joined_causes
from verl_profiling.steps.trajectory_columns import UNEXPLAINED
from verl_profiling.units import duration, visible

_SMALLEST_SHARE = 0.01
LEAST_S = 0.01
"""Smallest change (s) of :meth:`Diff.slower_than`."""
_SHOWN = 12  # changes of a kind
_BARS = 20
_SHOWN_STAGES = 16

# z of Spearman's correlation with the step; chance exceeds it once in a thousand stages
_BY_CHANCE = 3.3
_JUMP_BY_CHANCE = 4.3  # as above, of the largest of all jumps
_LEAST_DRIFT = 0.01  # least change that is shown, as a share of the step


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A time of both sides (A: before, B: after), in seconds per step.

    Attributes:
        kind: ``step``, ``explained`` (what a stage, or a kind of trajectories' time, adds to the
            step's change), ``missing`` (what it adds to the time that more lanes should have saved;
            ``change_share`` is of all such time), ``watch`` (step and exposed time of stages, of
            all steps in the watch's
            log), ``stage``, ``around`` (pauses of the capture, and stages around the step),
            ``worker`` (busy time), ``lost`` (lane-seconds), ``trajectory`` (trajectory-seconds by
            cause) or ``kernel`` (self time).
        name: Name of the part, stage, lane, cause or kernel.
        before_s: Median over the steps of A; ``None`` if A does not have it.
        after_s: Median over the steps of B; ``None`` if B does not have it.
        change_s: ``after_s - before_s``, where ``None`` counts as 0.
        change_share: ``change_s / before_s``; ``None`` if ``before_s`` is 0 or ``None``. For
            ``explained``, the share of the step of A.
        noise_s: Half the range over the steps, the larger of both sides; ``None`` unless both
            sides have several steps. For ``watch``, without a tenth of the steps at each end of the
            range; for ``explained``, of the part's effect on the steps.
    """

    columns: ClassVar[str] = (
        "name=shown_name, before_s, after_s, change_s, relative=change_share, noise"
    )

    kind: str
    name: str
    before_s: float | None
    after_s: float | None
    change_s: float
    change_share: float | None
    noise_s: float | None

    @property
    def shown_name(self) -> str:
        """The name; of a cause of lost time, as in reports."""
        if self.kind == "lost":
            return cause_name(self.name)
        return self.name

    @property
    def noise(self) -> str:
        """The noise as text; empty if unknown."""
        if self.noise_s is None:
            return ""
        return f"±{duration(self.noise_s)}"

    @property
    def stands_out(self) -> bool:
        """Whether the change exceeds the noise; also ``True`` if the noise is unknown."""
        return abs(self.change_s) > (self.noise_s or 0.0)

    def is_slower_by(self, share: float) -> bool:
        """Return whether the time grew by more than a share, :data:`LEAST_S` and the noise."""
        is_large = self.change_share is None or self.change_share > share
        return is_large and self.stands_out and self.change_s > LEAST_S


_TITLES = {
    "step": "Step",
    "explained": "The change of the step, by part",
    "missing": "The missing speed-up, by part",
    "watch": "All steps of the watch, exposed time",
    "stage": "Stages",
    "around": "Around the step",
    "lost": "Lost lane-seconds",
    "trajectory": "Trajectory causes (training)",
    "worker": "Workers, busy time",
    "kernel": "Kernels, self time",
}
"""Kinds of changes, in the order of their tables."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All changes, the largest of each kind first.

    Attributes:
        before: Number of captured steps of A, the side before.
        after: Number of captured steps of B, the side after.
        changes: One entry per number that at least one side has.
        logged: Number of steps in the watch's log of A and of B.
        scaling: What is missing of the speed-up, if B has more lanes.
    """

    before: int
    after: int
    changes: list[Change]
    logged: tuple[int, int] = (0, 0)
    scaling: Scaling | None = None

    @property
    def explained(self) -> str:
        """The step's change by part, with the parts that exceed the noise;
        empty without an explanation.
        """
        parts = [change for change in self.changes if change.kind == "explained"]
        step = next((change for change in self.changes if change.kind == "step"), None)
        if not parts or step is None or not step.before_s:
            return ""
        total = f"step {duration(step.change_s, signed=True)} ({step.change_share:+.1%})"
        if not step.stands_out:
            return f"{total}: within the noise"
        *causes, unexplained = parts
        shares = []
        small_s = 0.0
        for part in causes:
            if not part.stands_out:
                small_s += part.change_s
            elif part.change_s:
                shares.append(f"{part.name} {part.change_s / step.before_s:+.1%}")
        if small_s:
            shares.append(f"parts within the noise {small_s / step.before_s:+.1%}")
        shares.append(f"{UNEXPLAINED} {unexplained.change_share:+.1%}")
        return f"{total}: {', '.join(shares)}"

    @property
    def basis(self) -> str:
        """The number of compared steps on each side, and whether the noise is known, as text."""
        before, after = self.logged
        if not (self.before and self.after):
            return (
                f"medians of the watch's {before:,} steps before and {after:,} after, "
                "without captures"
            )
        logged = ""
        if before and after:
            logged = f"; the watch has {before:,} and {after:,}"
        if self.before > 1 and self.after > 1:
            steps = f"medians of {self.before} steps before and {self.after} after"
            return f"{steps}{logged}; noise is half their range"
        return (
            f"{self.before} step(s) before and {self.after} after{logged}; the noise is unknown, "
            "because only several steps on both sides show it"
        )

    def slower_than(self, share: float) -> list[Change]:
        """Return the step and the stages that became slower by more than a share, :data:`LEAST_S`
        and the noise.

        Stages below 1 % of the step are ignored, and so is the capture's own cost.

        Args:
            share: Smallest change, as a fraction of the value before.
        """
        has_captures = any(change.kind == "step" for change in self.changes)
        kinds = ("step", "stage") if has_captures else ("watch",)
        changes = [change for change in self.changes if change.kind in kinds]
        step = next((change for change in changes if change.name == STEP), None)
        least_s = _SMALLEST_SHARE * ((step and step.before_s) or 0.0)
        return [
            change
            for change in changes
            if change.name != CAPTURE_CALLS
            and (change.after_s or 0.0) >= least_s
            and change.is_slower_by(share)
        ]


def compare(
    before: Sequence[Report],
    after: Sequence[Report],
    logged: tuple[Sequence[StepSummary], Sequence[StepSummary]] = ((), ()),
    explained: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Diff:
    """Compare the steps of A (before) and B (after).

    Args:
        before: Reports of the captured steps of A.
        after: Reports of the captured steps of B.
        logged: Steps in the watch's log of A and of B.
        explained: What each part (a stage, or a kind of trajectories' time) adds to the step's
            change (s), and the noise of that (s).
    """
    changes: list[Change] = []
    scaling: Scaling | None = None
    if before and after:
        left, right = (list(map(_numbers_of, side)) for side in (before, after))
        _join(left, right)
        changes = _changes(left, right)
        changes += _parts(changes[0], explained, before, after)
        scaling = scaling_of(before, after)
        changes += _missing(scaling)
    if all(logged):
        past, now = ([_keyed("watch", seconds_of(step)) for step in side] for side in logged)
        changes += _changes(past, now)
    order = list(_TITLES)
    changes.sort(
        key=lambda row: (order.index(row.kind), row.name == UNEXPLAINED, -abs(row.change_s))
    )
    logs = (len(logged[0]), len(logged[1]))
    return Diff(before=len(before), after=len(after), changes=changes, logged=logs, scaling=scaling)


def _parts(
    step: Change,
    explained: Mapping[str, tuple[float, float]],
    before: Sequence[Report],
    after: Sequence[Report],
) -> Iterator[Change]:
    """Yield the step's change by part, or by stage if the parts explain less than half of it.

    Captures of other processes or stages have few parts in common, but each has the loop's stages.
    """
    if 2 * abs(explained.get(UNEXPLAINED, (0.0, 0.0))[0]) > abs(step.change_s):
        explained = _by_stage(step, before, after)
    for name, (change_s, noise_s) in explained.items():
        yield Change(
            kind="explained",
            name=name,
            before_s=None,
            after_s=None,
            change_s=change_s,
            change_share=change_s / step.before_s if step.before_s else None,
            noise_s=None if step.noise_s is None else noise_s,
        )


def _missing(scaling: Scaling | None) -> Iterator[Change]:
    """Yield the parts of what is missing of the speed-up, as shares of it if anything is."""
    parts_s = {} if scaling is None else scaling.parts_s
    whole_s = sum(parts_s.values())
    for name, part_s in parts_s.items():
        share = part_s / whole_s if whole_s > 0 else None
        yield Change(
            kind="missing",
            name=name,
            before_s=None,
            after_s=None,
            change_s=part_s,
            change_share=share,
            noise_s=None,
        )


def _by_stage(
    step: Change, before: Sequence[Report], after: Sequence[Report]
) -> Mapping[str, tuple[float, float]]:
    """Return the change of each outermost stage of the loop, and its noise (s);
    the rest is unexplained.
    """
    left, right = (
        [_keyed("stage", stage_seconds(report)) for report in side] for side in (before, after)
    )
    stages = _changes(left, right)
    rest_s = step.change_s - sum_of(stages, "change_s")
    parts = {stage.name: (stage.change_s, stage.noise_s or 0.0) for stage in stages}
    return parts | {UNEXPLAINED: (rest_s, step.noise_s or 0.0)}


_Key = tuple[str, str]
"""Kind and name of a time, e.g. ``stage`` and ``rollout``."""

_Numbers = dict[_Key, float]
"""The times of a step (s)."""


def _join(*sides: list[_Numbers]) -> None:
    """Add up causes of requests on both sides that one side has only as a sum.

    An example is ``first token`` for ``queued`` and ``prefill``.
    """
    causes = [
        {name for numbers in side for kind, name in numbers if kind == "trajectory"}
        for side in sides
    ]
    for part, whole in joined_causes(*causes).items():
        for numbers in chain(*sides):
            part_s = numbers.pop(("trajectory", part), 0.0)
            numbers["trajectory", whole] = numbers.get(("trajectory", whole), 0.0) + part_s


def _numbers_of(report: Report) -> _Numbers:
    numbers = {("step", STEP): report.span_us / 1e6}  # first: ``compare`` takes its change
    for stage in report.stages:
        numbers["stage", stage.name] = stage.duration_us / 1e6
    for around in report.around_the_step:
        numbers["around", around.name] = around.duration_us / 1e6
    for worker in report.workers:
        numbers["worker", worker.name] = worker.busy_us / 1e6
    for lost in report.lost:
        numbers["lost", lost.cause] = lost.seconds
    if report.rollout is not None:
        for cause in report.rollout.causes:
            if not cause.validate:
                numbers["trajectory", cause.cause] = cause.seconds
    for kernel in report.kernels:
        key = ("kernel", kernel.name)
        numbers[key] = numbers.get(key, 0.0) + kernel.self_us / 1e6
    return numbers


def _keyed(kind: str, seconds: Mapping[str, float]) -> _Numbers:
    return {(kind, name): number for name, number in seconds.items()}


def _changes(before: list[_Numbers], after: list[_Numbers]) -> list[Change]:
    """Return the change of each number that a step of either side has."""
    return [_change(key, before, after) for key in dict.fromkeys(chain(*before, *after))]


def _change(key: _Key, before: list[_Numbers], after: list[_Numbers]) -> Change:
    sides = _values(key, before), _values(key, after)
    before_s, after_s = (median(values) if values else None for values in sides)
    change_s = (after_s or 0.0) - (before_s or 0.0)
    ranges_s = [_range_s(key, values) for values in sides if values]
    is_noise_known = len(before) > 1 and len(after) > 1 and None not in ranges_s
    return Change(
        kind=key[0],
        name=key[1],
        before_s=before_s,
        after_s=after_s,
        change_s=change_s,
        change_share=change_s / before_s if before_s else None,
        noise_s=max(filter(None, ranges_s), default=0.0) / 2 if is_noise_known else None,
    )


def _range_s(key: _Key, values: Sequence[float]) -> float | None:
    """Return the range of a number over the steps of a side; ``None`` for a single step."""
    if len(values) < 2:
        return None
    low, high = middle(values) if key[0] == "watch" else (min(values), max(values))
    return high - low


def _values(key: _Key, steps: list[_Numbers]) -> list[float]:
    """Return a number of each step; 0 for a stage, cause or kernel that a step does not have.

    A worker's steps without the number are left out: the worker was not recorded there.
    """
    if not any(key in numbers for numbers in steps):
        return []
    return [numbers.get(key, 0.0) for numbers in steps if key in numbers or key[0] != "worker"]


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Return least and largest value, without a tenth of the values at each end.

    Of five values or more, at least one is left out at each end.
    """
    ordered, cut = sorted(values), min(-(-len(values) // 10), (len(values) - 1) // 4)
    return ordered[cut], ordered[-1 - cut]


class _RunRow(msgspec.Struct, frozen=True):
    columns: ClassVar[str] = "name, median_s, from=low_s, to=high_s, change, trend"

    name: str
    median_s: float
    low_s: float
    high_s: float
    change: str
    trend: str


def print_run(steps: Sequence[Mapping[str, float]], which: str, console: Console) -> None:
    """Print median, spread and change of the step and the longest stages, for a run of several
    steps.

    Args:
        steps: Time of each step, and of its stages, by name (s).
        which: Kind of the steps, for the title of the table.
        console: Where to print it.
    """
    if len(steps) < 2:
        return
    series = {
        name: [step.get(name, 0.0) for step in steps]
        for name in dict.fromkeys(chain([STEP], *steps))
    }
    least_s = _LEAST_DRIFT * median(series[STEP])
    rows = [
        _RunRow(
            name,
            median(values),
            *middle(values),
            _trend(values, least_s),
            sparkline(values, _BARS),
        )
        for name, values in series.items()
    ]
    shown = sorted(rows, key=lambda row: (row.name != STEP, -row.median_s))[:_SHOWN_STAGES]
    note = (
        "from, to: without a tenth of the steps at each end; change: over the run, if "
        "beyond chance and 1%"
    )
    print_table(console, f"{len(steps):,} {which}", *cells(shown), note)


def _trend(values: Sequence[float], least: float) -> str:
    """Return the jump in a run, or the drift over it, as text; empty if small or perhaps chance."""
    ordered, third = sorted(values), len(values) // 3
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]
    if third == 0 or ordered[0] == ordered[-1]:
        return ""
    split = _jumps_at(values)
    if split:
        kind, change = "jump", median(values[split:]) - median(values[:split])
    elif abs(correlation(ranks, range(len(ranks)))) * sqrt(len(ranks) - 1) >= _BY_CHANCE:
        kind, change = "drift", 1.5 * (median(values[-third:]) - median(values[:third]))
    else:
        return ""
    if abs(change) >= least:
        return f"{kind} {duration(change, signed=True)}"
    return ""


def _jumps_at(values: Sequence[float]) -> int:
    """Return the index of the first value after a jump of the durations of a run's steps.

    Return 0 if a line fits the values better than two levels, or if the jump may be chance.
    """
    near = np.clip(values, *middle(values))  # an outlier is no level
    near -= near.mean()
    many = np.arange(1, len(near))
    of_levels = near.cumsum()[:-1] ** 2 * len(near) / (many * many[::-1])  # explained squared error
    steps = np.arange(len(near)) - many.mean() + 0.5
    of_line = (near @ steps) ** 2 / (steps @ steps)
    split, by_chance = int(of_levels.argmax()), _JUMP_BY_CHANCE**2 / len(many) * (near @ near)
    if of_levels[split] > max(of_line, by_chance):
        return split + 1
    return 0


def print_diff(diff: Diff, console: Console) -> None:
    """Print the largest changes of each kind; changes within the noise are dim."""
    console = fitting_console(console)
    scaling = diff.scaling.sentence if diff.scaling else ""
    for sentence in filter(None, (diff.basis, diff.explained, scaling)):
        console.print(visible(sentence), markup=False)
    for kind, title in _TITLES.items():
        rows = [change for change in diff.changes if change.kind == kind]
        headings, lines = cells(rows[:_SHOWN])
        for line in lines:
            line[0] = named(without_middle(line[0].text))
        more = len(rows) - _SHOWN
        note = ""
        if more > 0:
            note = f"{more:,} more, with smaller changes: --json"
        is_dim = [not change.stands_out for change in rows]
        print_table(console, title, headings, lines, note, is_dim)
