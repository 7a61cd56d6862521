"""Compares two steps or two runs: what became slower or faster, and whether by more than the noise.

With several steps on a side, a number is their median and its noise is half their range. With one
step on each side the noise is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_profiling.report.model import Report
from verl_profiling.report.numbers import CAPTURE_CALLS

__all__ = ["Change", "Diff", "compare", "print_diff"]

_SMALLEST_SHARE = 0.01
_ROWS = 12


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One number of both sides, in seconds per step.

    Attributes:
        kind: ``step``, ``stage``, ``worker`` (busy time), ``lost`` (lane-seconds) or ``op`` (self time).
        name: Name of the stage, lane, cause or kernel.
        before_s: Median over the steps of A; ``None`` if A does not have it.
        after_s: Median over the steps of B; ``None`` if B does not have it.
        change_s: ``after_s - before_s``, where ``None`` counts as 0.
        change: ``change_s / before_s``; ``None`` if A does not have it.
        noise_s: Half the range over the steps, the larger of both sides; ``None`` with one step each.
    """

    kind: str
    name: str
    before_s: float | None
    after_s: float | None
    change_s: float
    change: float | None
    noise_s: float | None

    @property
    def stands_out(self) -> bool:
        """Whether the change exceeds the noise, if that is known."""
        return abs(self.change_s) > (self.noise_s or 0.0)


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All changes, the largest of each kind first.

    Attributes:
        before: Number of steps of A.
        after: Number of steps of B.
        changes: One entry per number that at least one side has.
    """

    before: int
    after: int
    changes: list[Change]

    def slower_than(self, share: float) -> list[Change]:
        """Return the step and the stages that became slower by more than a share and more than the noise.

        Stages below 1 % of the step are ignored, and so is the capture's own cost.
        """
        step_s = next((c.before_s for c in self.changes if c.kind == "step"), None) or 0.0
        return [
            change
            for change in self.changes
            if change.kind in ("step", "stage")
            and change.name != CAPTURE_CALLS
            and change.stands_out
            and (change.after_s or 0.0) >= _SMALLEST_SHARE * step_s
            and (change.change_s > 0 if change.change is None else change.change > share)
        ]


def compare(before: Sequence[Report], after: Sequence[Report]) -> Diff:
    """Compare the steps of two sides."""
    left, right = _numbers(before), _numbers(after)
    changes = [_change(key, left.get(key, []), right.get(key, [])) for key in dict.fromkeys([*left, *right])]
    order = {"step": 0, "stage": 1, "lost": 2, "worker": 3, "op": 4}
    changes.sort(key=lambda change: (order[change.kind], -abs(change.change_s)))
    return Diff(before=len(before), after=len(after), changes=changes)


def _numbers(reports: Iterable[Report]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for report in reports:
        for key, seconds in _numbers_of(report):
            found.setdefault(key, []).append(seconds)
    return found


def _numbers_of(report: Report) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("step", "step"), report.span_us / 1e6
    for stage in report.stages:
        yield ("stage", stage.name), stage.duration_us / 1e6
    for worker in report.workers:
        yield ("worker", worker.name), worker.busy_us / 1e6
    for lost in report.lost:
        yield ("lost", lost.cause), lost.seconds
    ops: dict[str, float] = {}
    for op in report.ops:
        ops[op.name] = ops.get(op.name, 0.0) + op.self_us / 1e6
    for name, seconds in ops.items():
        yield ("op", name), seconds


def _change(key: tuple[str, str], before: list[float], after: list[float]) -> Change:
    a, b = (median(side) if side else None for side in (before, after))
    ranges = [(max(side) - min(side)) / 2 for side in (before, after) if len(side) > 1]
    difference = (b or 0.0) - (a or 0.0)
    return Change(
        kind=key[0],
        name=key[1],
        before_s=a,
        after_s=b,
        change_s=difference,
        change=difference / a if a else None,
        noise_s=max(ranges) if ranges else None,
    )


def print_diff(diff: Diff, console: Console) -> None:
    """Print the largest changes of each kind; those within the noise are dim."""
    console = Console(file=console.file, width=100, highlight=False)
    console.print(f"{diff.before} step(s) before, {diff.after} after; medians, in seconds per step")
    titles = {
        "step": "Step",
        "stage": "Stages",
        "lost": "Idle time by cause",
        "worker": "Busy time",
        "op": "Kernels by self time",
    }
    for kind, title in titles.items():
        table = Table(
            title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("name", no_wrap=True, max_width=46)
        for heading in ("before", "after", "change", "", "noise"):
            table.add_column(heading, justify="right")
        for change in [change for change in diff.changes if change.kind == kind][:_ROWS]:
            cells = [_seconds(change.before_s), _seconds(change.after_s), f"{change.change_s:+.3f}"]
            cells.append("new" if change.change is None else f"{change.change:+.1%}")
            cells.append("" if change.noise_s is None else f"±{change.noise_s:.3f}")
            table.add_row(escape(change.name), *cells, style=None if change.stands_out else "dim")
        if table.row_count:
            console.print(table)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
