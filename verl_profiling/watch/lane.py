"""The stages of one process on the way into the accounts of the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from verl_profiling.step_account import RankUse, SpanTotal, StageUse
from verl_profiling.watch.reading import EndedStage
from verl_profiling.watch.span_pieces import SpanPieces

__all__ = ["MOST_PERIODS", "Lane", "StepTime"]

MOST_PERIODS = 16
"""So many runs of a stage in a step are told apart."""

_TOUCHING_NS = 1_000_000

_begin_ns = attrgetter("begin_ns")


@dataclass
class StepTime:
    """When a step was, on the clock of the loop's process.

    Attributes:
        step: Its number.
        begin_ns: When it began.
        end_ns: When it ended; 0 until then.
        policy_version: Version of the weights that it began with, if the loop says it.
        captured: Name of its step folder, if it is captured.
        before_ns: When the step before it ended; 0 for the first.
    """

    step: int
    begin_ns: int
    end_ns: int = 0
    policy_version: int | None = None
    captured: str = ""
    before_ns: int = 0


class Lane:
    """Keeps the stages of a process that are not in an account yet.

    Args:
        name: Name of the process, as in manifests.
        role: Its role.
        rank: Its rank in that role.
        stages: How many are kept at most.
        replica: Index of the replica, if it serves a rollout engine.

    Attributes:
        told_ns: Up to when its stages are known, on its own clock.
        spans: What its spans add up to.
    """

    def __init__(self, name: str, role: str, rank: int, stages: int, replica: int | None = None) -> None:
        self.told_ns = 0
        self.spans = SpanPieces()
        self._use = RankUse(lane=name, role=role, rank=rank, replica=replica)
        self._stages: deque[EndedStage] = deque(maxlen=stages)
        self._last = 0
        self._until_ns = self._accounted_ns = 0

    @property
    def order(self) -> tuple[str, int, str]:
        """Where it stands among others: by role and rank."""
        return self._use.role, self._use.rank, self._use.lane

    @property
    def until_ns(self) -> int:
        """Up to when its stages are known, on the clock of the loop's process."""
        return self._until_ns

    def take(self, stages: Iterable[EndedStage], offset_ns: int, told_ns: int) -> None:
        """Take stages, but for those that it has had already.

        Args:
            stages: The stages, on the clock of the loop's process.
            offset_ns: How far the clock of their own process is ahead.
            told_ns: When it told them, on its own clock.
        """
        new = [stage for stage in stages if stage.number > self._last]
        if new:
            self._last = new[-1].number
            self._stages += new
        self.told_ns = told_ns
        self._until_ns = told_ns - offset_ns

    def uses(self, steps: Sequence[StepTime]) -> list[RankUse | None]:
        """Return what the process did in each step; ``None`` if that is not known.

        A stage belongs to the step in which its middle lies, also where it began before the step or ended
        after it. One whose middle lies between two steps belongs to the second if it goes on in that, and
        else to none. So does one whose step had its account already when the stage was told.

        Args:
            steps: Steps that have ended, in their order.
        """
        befores, ends = [step.before_ns for step in steps], [step.end_ns for step in steps]
        found: list[list[EndedStage]] = [[] for _ in steps]
        for stage in reversed(self._stages):
            begin_ns, duration_ns = stage.begin_ns, stage.duration_ns
            end_ns = begin_ns + duration_ns
            if end_ns < steps[0].begin_ns:
                break
            middle_ns = begin_ns + duration_ns // 2
            place = bisect_right(befores, middle_ns) - 1
            if place < 0 and end_ns > self._accounted_ns:
                place = 0
            if place >= 0 and middle_ns < ends[place] and end_ns > steps[place].begin_ns:
                found[place].append(stage)
        totals = self.spans.of_steps(befores, [step.begin_ns for step in steps], ends)
        return [
            self._of_step(stages[::-1], spans) if stages or spans or self._until_ns >= step.end_ns else None
            for step, stages, spans in zip(steps, found, totals, strict=True)
        ]

    def forget(self, before_ns: int) -> None:
        """Forget the stages and spans that ended before that; the steps until now have their accounts."""
        self._accounted_ns = self._until_ns
        self.spans.forget(before_ns)
        stages = self._stages
        while stages and stages[0].begin_ns + stages[0].duration_ns < before_ns:
            stages.popleft()

    def _of_step(self, stages: list[EndedStage], spans: list[SpanTotal]) -> RankUse:
        runs: dict[str, list[EndedStage]] = {}
        peak = held = None
        for stage in stages:
            runs.setdefault(stage.name, []).append(stage)
            if stage.peak_bytes:
                peak, held = max(peak or 0, stage.peak_bytes), stage.held_bytes
        return RankUse(
            lane=self._use.lane,
            role=self._use.role,
            rank=self._use.rank,
            replica=self._use.replica,
            stages=sorted((_use(ended) for ended in runs.values()), key=_begin_ns),
            peak_bytes=peak,
            held_bytes=held,
            spans=spans,
        )


def _use(runs: list[EndedStage]) -> StageUse:
    """Return the runs of one stage as one."""
    first = runs[0]
    if len(runs) == 1:
        return StageUse(first.name, first.duration_ns, 1, first.begin_ns)
    periods: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted((run.begin_ns, run.begin_ns + run.duration_ns) for run in runs):
        if periods and (begin_ns - periods[-1][1] <= _TOUCHING_NS or len(periods) == MOST_PERIODS):
            periods[-1] = (periods[-1][0], max(periods[-1][1], end_ns))
        else:
            periods.append((begin_ns, end_ns))
    duration_ns = sum(run.duration_ns for run in runs)
    return StageUse(first.name, duration_ns, len(runs), periods[0][0], tuple(periods))
