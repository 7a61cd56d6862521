"""Compares two steps or two runs: changes of stages, lanes, causes and kernels, and their noise.

Compared are medians over the captured steps of each side, and over all steps of the watch's log;
runs with a watch need no captures. With at least four runs a side, the noise is that between runs
(see :mod:`~verl_profiling.report.verdict`). With fewer, it is half the range over the steps of a
side, the larger of both sides; it is known only if each side has several steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import ClassVar

import msgspec
from rich.console import Console

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.numbers.report_columns import sum_of
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS
from verl_profiling.report.console import fitting_console
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import counted
from verl_profiling.report.run_table import middle
from verl_profiling.report.scaling import Scaling, scaling_of
from verl_profiling.report.tables import cells, named, without_middle
from verl_profiling.report.terminal import print_table
from verl_profiling.report.verdict import STARTS, Verdict, contradiction, interval, verdict_of
from verl_profiling.report.watch_frame import STEP, seconds_of, stage_seconds
from verl_profiling.steps.causes import joined_causes
from verl_profiling.steps.start_up import StartUp
from verl_profiling.steps.trajectory_columns import UNEXPLAINED
from verl_profiling.units import duration, visible

_SMALLEST_SHARE = 0.01
LEAST_S = 0.01
"""Smallest change (s) of :meth:`Diff.slower_than`."""
_SHOWN = 12  # changes of a kind

START = "start-up"
"""Name of the whole time before the first step."""


_Logs = Sequence[Sequence[StepSummary]]
"""Steps in the watch's log, by run."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A time of both sides (A: before, B: after), in seconds per step.

    Attributes:
        kind: ``step``, ``explained`` (what a stage, or a kind of trajectories' time, adds to the
            step's change), ``missing`` (what it adds to the time that more lanes should have saved;
            ``change_share`` is of all such time), ``watch`` (step and exposed time of stages, of
            all steps in the watch's log), ``start`` (the start-up and the parts of its path),
            ``stage``, ``around`` (pauses of the capture, and stages around the step),
            ``worker`` (busy time), ``lost`` (lane-seconds), ``trajectory`` (trajectory-seconds by
            cause) or ``kernel`` (self time).
        name: Name of the part, stage, lane, cause or kernel.
        before_s: Median over the steps of A; ``None`` if A does not have it.
        after_s: Median over the steps of B; ``None`` if B does not have it.
        change_s: ``after_s - before_s``, where ``None`` counts as 0.
        change_share: ``change_s / before_s``; ``None`` if ``before_s`` is 0 or ``None``. For
            ``explained``, the share of the step of A.
        noise_s: Changes up to this are noise: with at least four runs a side, by the interval of
            the change. Otherwise, half the range over the steps, the larger of both sides; ``None``
            unless both sides have several steps. For ``watch``, without a tenth of the steps at
            each end of the range; for ``explained``, of the part's effect on the steps.
    """

    columns: ClassVar[str] = (
        "name=shown_name, before_s, after_s, change_s, relative=change_share, noise"
    )

    kind: str
    name: str
    before_s: float | None = None
    after_s: float | None = None
    change_s: float
    change_share: float | None
    noise_s: float | None = None

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

    def is_slower_by(self, share: float, least_s: float) -> bool:
        """Return whether the time is at least ``least_s`` now, and grew by more than a share,
        :data:`LEAST_S` and the noise. The capture's own cost does not count.
        """
        if self.name == CAPTURE_CALLS or (self.after_s or 0.0) < least_s:
            return False
        is_large = self.change_share is None or self.change_share > share
        return is_large and self.stands_out and self.change_s > LEAST_S


_TITLES = {
    "step": "Step",
    "explained": "The change of the step, by part",
    "missing": "The missing speed-up, by part",
    "watch": "All steps of the watch, and by how much each stage made them longer",
    "start": "Start-up",
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
        between_runs: Whether the step changed; ``None`` for steps of one run.
        differs: Versions and settings that differ between the sides, as text.
    """

    before: int
    after: int
    changes: list[Change]
    logged: tuple[int, int] = (0, 0)
    scaling: Scaling | None = None
    between_runs: Verdict | None = None
    differs: str = ""

    @property
    def contradicted(self) -> str:
        """A sentence if the watched steps changed one way, and the captured ones the other way."""
        return contradiction(self)

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
    def started(self) -> str:
        """The change of the start-up, and the part that changed most; empty without it."""
        rows = {change.name: change for change in self.changes if change.kind == "start"}
        whole = rows.pop(START, None)
        if whole is None:
            return ""
        took = " before and ".join(
            duration(side or 0.0) for side in (whole.before_s, whole.after_s)
        )
        most = next(iter(rows.values()))
        return (
            f"start-up {took} after, most by {most.name} ({duration(most.change_s, signed=True)})"
        )

    @property
    def basis(self) -> str:
        """The number of compared steps on each side, and whether the noise is known, as text."""
        before, after = self.logged
        if not (self.before and self.after):
            return (
                f"medians of the watch's {before:,} steps before and {after:,} after; captures are "
                "compared where both sides have them"
            )
        logged = ""
        if before and after:
            logged = f"; the watch has {before:,} and {after:,}"
        if self.between_runs is not None:
            captured = f"{counted(self.before, 'captured step')} before and {self.after} after"
            return f"{captured}{logged}"
        if self.before > 1 and self.after > 1:
            steps = f"medians of {self.before} steps before and {self.after} after"
            return f"{steps}{logged}; noise is half their range"
        return (
            f"{self.before} step(s) before and {self.after} after{logged}; the noise is unknown, "
            "because only several steps on both sides show it"
        )

    def slower_than(self, share: float) -> list[Change]:
        """Return the step and the stages that became slower by more than a share, :data:`LEAST_S`
        and the noise: of the captures, or where these contradict the watch, of its steps.

        Stages below 1 % of the step are ignored, and so is the capture's own cost. With the noise
        between runs, stages count only if the change of the step is told: of many stages, one
        exceeds its noise by chance. With too few runs for that, a stage counts also where the step
        is not told, but the share is at least what two starts of one configuration differ by.

        Args:
            share: Smallest change, as a fraction of the value before.
        """
        runs = self.between_runs
        if runs is not None and runs.noise is None:
            share = max(share, STARTS)
        elif runs is not None and runs.more_runs:
            return []
        is_of_captures = self.before and self.after and not self.contradicted
        kinds = ("step", "stage") if is_of_captures else ("watch",)
        changes = [change for change in self.changes if change.kind in kinds]
        step = next((change for change in changes if change.name == STEP), None)
        least_s = _SMALLEST_SHARE * ((step and step.before_s) or 0.0)
        return [change for change in changes if change.is_slower_by(share, least_s)]


def compare(
    before: Sequence[Report],
    after: Sequence[Report],
    logged: tuple[_Logs, _Logs] = ((), ()),
    explained: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    differs: str = "",
    kernels: Mapping[str, str] = MappingProxyType({}),
    started: tuple[Sequence[StartUp], Sequence[StartUp]] = ((), ()),
) -> Diff:
    """Compare the steps of A (before) and B (after).

    Args:
        before: Reports of the captured steps of A; those in one folder are of one run.
        after: Reports of the captured steps of B.
        logged: Steps in the watch's log of each run of A and of B.
        explained: What each part (a stage, or a kind of trajectories' time) adds to the step's
            change (s), and the noise of that (s).
        differs: Versions and settings that differ, as text.
        kernels: Common names of kernels whose names differ, by their own.
        started: Start-up of each run of A and of B, as far as known.
    """
    changes: list[Change] = []
    scaling: Scaling | None = None
    is_one_run = bool(_folders(before) & _folders(after))
    sides = (_runs_of(before, kernels), _runs_of(after, kernels))
    if before and after:
        _join(*sides)
        changes = _changes(*sides)
        changes += _parts(changes[0], explained, before, after)
        scaling = scaling_of(before, after)
        changes += _missing(scaling)
    key = ("step", STEP)
    if all(logged) and all(map(all, logged)):
        key = ("watch", STEP)
        sides = (_logged_runs(logged[0]), _logged_runs(logged[1]))
        changes += _changes(*sides)
    if all(started):
        changes += _changes(*map(_starts, started))
    step = next(change for change in changes if (change.kind, change.name) == key)
    values = [_values(key, side) for side in sides]
    verdict = None if is_one_run else verdict_of(step.change_s, values)
    order = list(_TITLES)
    changes.sort(
        key=lambda row: (order.index(row.kind), row.name == UNEXPLAINED, -abs(row.change_s))
    )
    return Diff(
        before=len(before),
        after=len(after),
        changes=changes,
        logged=(sum(map(len, logged[0])), sum(map(len, logged[1]))),
        scaling=scaling,
        between_runs=verdict,
        differs=differs,
    )


def _folders(reports: Sequence[Report]) -> set[Path]:
    return {Path(report.directory).parent for report in reports}


def _runs_of(reports: Sequence[Report], kernels: Mapping[str, str]) -> list[_Run]:
    """Return the numbers of each step, by run."""
    runs = defaultdict[Path, _Run](list)
    for report in reports:
        runs[Path(report.directory).parent].append(_numbers_of(report, kernels))
    return list(runs.values())


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
            change_s=change_s,
            change_share=change_s / step.before_s if step.before_s else None,
            noise_s=None if step.noise_s is None else noise_s,
        )


def _missing(scaling: Scaling | None) -> Iterator[Change]:
    """Yield the parts of the missing speed-up, as shares of the whole if any is missing."""
    parts_s = {} if scaling is None else scaling.parts_s
    whole_s = sum(parts_s.values())
    for name, part_s in parts_s.items():
        share = part_s / whole_s if whole_s > 0 else None
        yield Change(
            kind="missing",
            name=name,
            change_s=part_s,
            change_share=share,
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
    stages = _changes([left], [right])
    rest_s = step.change_s - sum_of(stages, "change_s")
    parts = {stage.name: (stage.change_s, stage.noise_s or 0.0) for stage in stages}
    return parts | {UNEXPLAINED: (rest_s, step.noise_s or 0.0)}


_Key = tuple[str, str]
"""Kind and name of a time, e.g. ``stage`` and ``rollout``."""

_Numbers = dict[_Key, float]
"""The times of a step (s)."""

_Run = list[_Numbers]
"""The steps of a run."""


def _join(*sides: list[_Run]) -> None:
    """Add up causes of requests on both sides that one side has only as a sum.

    An example is ``first token`` for ``queued`` and ``prefill``.
    """
    steps = [list(chain(*side)) for side in sides]
    causes = [
        {name for numbers in side for kind, name in numbers if kind == "trajectory"}
        for side in steps
    ]
    for part, whole in joined_causes(*causes).items():
        for numbers in chain(*steps):
            part_s = numbers.pop(("trajectory", part), 0.0)
            numbers["trajectory", whole] = numbers.get(("trajectory", whole), 0.0) + part_s


def _numbers_of(report: Report, kernels: Mapping[str, str]) -> _Numbers:
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
        key = ("kernel", kernels.get(kernel.name, kernel.name))
        numbers[key] = numbers.get(key, 0.0) + kernel.self_us / 1e6
    return numbers


def _logged_runs(logs: _Logs) -> list[_Run]:
    return [[_keyed("watch", seconds_of(step)) for step in run] for run in logs]


def _starts(starts: Sequence[StartUp]) -> list[_Run]:
    return [[_keyed("start", {START: start.seconds, **start.part_seconds()})] for start in starts]


def _keyed(kind: str, seconds: Mapping[str, float]) -> _Numbers:
    return {(kind, name): number for name, number in seconds.items()}


def _changes(before: list[_Run], after: list[_Run]) -> list[Change]:
    """Return the change of each number that a step of either side has."""
    keys = dict.fromkeys(chain(*chain(*before, *after)))
    return [_change(key, _values(key, before), _values(key, after)) for key in keys]


def _change(key: _Key, before: list[list[float]], after: list[list[float]]) -> Change:
    """Return the change of a number, given its values by run."""
    sides = (before, after)
    before_s, after_s = (fmean(map(median, side)) if side else None for side in sides)
    change_s = (after_s or 0.0) - (before_s or 0.0)
    ends = interval(*([median(run) for run in side] for side in sides)) if all(sides) else None
    if ends is None:
        noise_s = _noise_s(key, sides)
    else:
        noise_s = change_s - ends[0] if change_s > 0 else ends[1] - change_s
    return Change(
        kind=key[0],
        name=key[1],
        before_s=before_s,
        after_s=after_s,
        change_s=change_s,
        change_share=change_s / before_s if before_s else None,
        noise_s=noise_s,
    )


def _noise_s(key: _Key, sides: tuple[list[list[float]], list[list[float]]]) -> float | None:
    """Return the noise by the range of the steps; ``None`` for a side with one step."""
    ranges_s = [_range_s(key, list(chain(*side))) for side in sides if side]
    if None in ranges_s:
        return None
    return max(filter(None, ranges_s), default=0.0) / 2


def _range_s(key: _Key, values: Sequence[float]) -> float | None:
    """Return the range of a number over the steps of a side; ``None`` for a single step."""
    if len(values) < 2:
        return None
    low, high = middle(values) if key[0] == "watch" else (min(values), max(values))
    return high - low


def _values(key: _Key, runs: list[_Run]) -> list[list[float]]:
    """Return a number of each step by run; 0 for a stage, cause or kernel that a step lacks.

    A worker's steps without the number are left out: the worker was not recorded there.
    """
    if not any(key in numbers for numbers in chain(*runs)):
        return []
    values = [
        [numbers.get(key, 0.0) for numbers in run if key in numbers or key[0] != "worker"]
        for run in runs
    ]
    return list(filter(None, values))


def print_diff(diff: Diff, console: Console) -> None:
    """Print the largest changes of each kind; changes within the noise are dim."""
    console = fitting_console(console)
    scaling = diff.scaling.sentence if diff.scaling else ""
    verdict = diff.between_runs.sentence if diff.between_runs else ""
    captures = (diff.contradicted, diff.explained, scaling)
    for sentence in filter(None, (diff.differs, verdict, diff.basis, *captures, diff.started)):
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
