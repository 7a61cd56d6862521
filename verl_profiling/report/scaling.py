"""Why a run with more lanes is not as many times faster: the parts of the missing speed-up.

With n times the lanes and w times the tokens, a step would take w/n of its time. Each part of each
stage is compared with w/n of the same part before, so all parts add up to the missing time.
Numbers are means over the captured steps: unlike medians, they add up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from verl_profiling.manifest import POLLING, WAIT, WEIGHT_SYNC
from verl_profiling.numbers.report_columns import StageRow, sum_of
from verl_profiling.report.model import Report
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.trajectory_columns import OTHERS, UNEXPLAINED
from verl_profiling.units import duration, listed

_LEAST_SHARE = 0.01  # of the step: smaller parts are added up
_MOST = 5  # parts in the sentence
_WHOLE_STEP, _LOOP = "", "controller"
_Means = defaultdict[tuple[str, str], float]
"""Means over steps: times (s), tokens, ... by what they are, and by stage."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """The speed-up of a run with more lanes, and what is missing of it.

    Attributes:
        lanes: Factor by which the lanes of the stage with most lanes grew.
        tokens: Factor by which the tokens of a step grew; ``None`` if unknown, so that 1 is used.
        before_s: Duration of the step before.
        after_s: Duration of the step after.
        missing_s: ``after_s - before_s * tokens / lanes``.
        parts_s: ``missing_s`` by part, largest first; what is unexplained is the last one.
        pass_work: Stages whose lengths are unknown and would explain more.
    """

    lanes: float
    tokens: float | None
    before_s: float
    after_s: float
    missing_s: float
    parts_s: dict[str, float]
    pass_work: list[str] = []

    @property
    def sentence(self) -> str:
        """The speed-up and the largest parts of what is missing, as text."""
        tokens = "if the steps have as many tokens, "
        if self.tokens is not None:
            tokens = f"{self.tokens:.2f} times the tokens, "
        speed = (self.tokens or 1.0) * self.before_s / self.after_s
        text = f"{self.lanes:.3g} times the lanes, {tokens}{speed:.2f} times as fast"
        if self.missing_s <= _LEAST_SHARE * self.after_s:
            return f"{text}: nothing is missing"
        *parts, (_, rest_s) = self.parts_s.items()
        named = [f"{name} {duration(s)}" for name, s in parts if s > 0 and name != OTHERS]
        text += f"; {duration(self.missing_s)} a step are missing: {listed(named, _MOST)}"
        rest = round(rest_s / self.missing_s, 2) + 0.0  # no "-0%"
        text += f", {UNEXPLAINED} {rest:.0%}"
        for stage in self.pass_work:
            text += f'; pass its work: with stage("{stage}").given(lengths=lengths)'
        return text


def scaling_of(before: Sequence[Report], after: Sequence[Report]) -> Scaling | None:
    """Return what is missing of the speed-up; ``None`` unless the second side has more lanes.

    Args:
        before: Reports of the captured steps of A.
        after: Reports of the captured steps of B.
    """
    past, now = (_means(side) for side in (before, after))
    key = ("lanes", _WHOLE_STEP)
    if not 0 < past[key] < now[key]:
        return None
    lanes = now[key] / past[key]
    growths = [
        now[key] / past[key] for key in past if key[0] == "tokens" and past[key] and now[key]
    ]
    # Where each lane repeats the work, the tokens of its stage grow more than those of the step.
    tokens = min(growths, default=None)
    missing: defaultdict[str, float] = defaultdict(float)
    pass_work = _add_missing(missing, past, now, (tokens or 1.0) / lanes)
    before_s, after_s = (sum(_times(means).values()) for means in (past, now))
    missing_s = after_s - before_s * (tokens or 1.0) / lanes
    least_s = _LEAST_SHARE * after_s
    parts_s = {
        name: s
        for name, s in sorted(missing.items(), key=lambda part: -part[1])
        if abs(s) >= least_s
    }
    parts_s[OTHERS] = sum(s for s in missing.values() if abs(s) < least_s)
    parts_s[UNEXPLAINED] = missing_s - sum(parts_s.values())
    return Scaling(
        lanes=lanes,
        tokens=tokens,
        before_s=before_s,
        after_s=after_s,
        missing_s=missing_s,
        parts_s=parts_s,
        pass_work=pass_work,
    )


def _add_missing(
    missing: defaultdict[str, float], past: _Means, now: _Means, ideal: float
) -> list[str]:
    """Add the missing time (s) by part; return the stages whose work should be passed.

    Args:
        missing: Where to add the parts.
        past: Means of the run with fewer lanes.
        now: Means of the run with more lanes.
        ideal: Factor by which each part would change, if nothing was missing.
    """
    pass_work = []
    for kind, stage in {**_times(past), **_times(now)}:
        before_s, after_s = past[kind, stage], now[kind, stage]
        rest_s = after_s - before_s * ideal
        if kind != "work" or not before_s:
            missing[f"{kind} of {stage}"] += rest_s
            continue
        of_lane = [means["tokens of a lane", stage] for means in (past, now)]
        if all(of_lane):
            undivided_s = before_s * (of_lane[1] / of_lane[0] - ideal)
            missing[f"{stage} does not scale"] += undivided_s
            is_smaller = now["tokens of a batch", stage] < past["tokens of a batch", stage]
            why = "smaller batches in" if is_smaller else "time per token of"
            missing[f"{why} {stage}"] += rest_s - undivided_s
        elif rest_s > before_s * (1 - ideal) / 2:  # most of what more lanes should have saved
            missing[f"{stage} does not scale"] += rest_s
        elif rest_s > _LEAST_SHARE * sum(_times(now).values()):
            pass_work.append(stage)
    return pass_work


def _times(means: _Means) -> dict[tuple[str, str], float]:
    """Return the times of all parts of stages, which add up to the step."""
    return {key: s for key, s in means.items() if key[0] in _KINDS}


_KINDS = {
    "fixed part": "alone_us",
    "work": "work_us",
    "communication": "communication_us",
    "tail": "tail_us",
    "wait": "",
    "sync": "",
}
"""Parts of a stage, and their columns; waits and weight syncs are whole stages."""


def _means(reports: Sequence[Report]) -> _Means:
    """Return the means over steps: of facts, over the steps in which they are known."""
    sums, known = _Means(float), Counter[tuple[str, str]]()
    for report in reports:
        _add_times(sums, report)
        facts = _facts(report)
        known.update(facts.keys())
        for key, value in facts.items():
            sums[key] += value
    means = _Means(
        float, {key: value / (known[key] or len(reports)) for key, value in sums.items()}
    )
    # A worker may be missing in a step.
    means["lanes", _WHOLE_STEP] = max(
        (row.lanes for report in reports for row in report.stages), default=0
    )
    return means


def _add_times(sums: _Means, report: Report) -> None:
    """Add the parts of a step's outermost stages (s)."""
    for row in report.stages:
        if row.depth == 0:
            stage_s = row.share * report.span_us / 1e6  # stages side by side share their time
            for kind, share in _shares(row).items():
                sums[kind, row.name] += stage_s * share


def _facts(report: Report) -> dict[tuple[str, str], float]:
    """Return the known tokens of a step and its stages."""
    facts: dict[tuple[str, str], float] = {}
    if report.throughput is not None:
        facts["tokens", _WHOLE_STEP] = report.throughput.tokens
    for stage, rows in grouped(report.work, lambda row: row.stage).items():
        of_lanes = [row for row in rows if row.worker != _LOOP]  # the loop passes that of all lanes
        if not all(row.tokens for row in of_lanes or rows):
            continue
        tokens = facts["tokens", stage] = sum_of(of_lanes or rows, "tokens")
        if of_lanes:
            facts["tokens of a lane", stage] = tokens / len(of_lanes)
            batches = sum(row.micro_batches or 1 for row in of_lanes)
            facts["tokens of a batch", stage] = tokens / batches
    return facts


def _shares(row: StageRow) -> dict[str, float]:
    """Return the parts of an outermost stage, as shares of it."""
    if row.name.startswith(WAIT) or row.name == POLLING:
        return {"wait": 1.0}
    if row.name == WEIGHT_SYNC:
        return {"sync": 1.0}
    if not row.lanes:
        return {"fixed part": 1.0}
    columns = {kind: column for kind, column in _KINDS.items() if column}
    return {kind: getattr(row, column) / row.duration_us for kind, column in columns.items()}
