"""The seconds of rollout and training that taught nothing: equal rewards, truncated, masked and
unused samples.

E.g. samples of one prompt with equal rewards have no advantage over each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from verl_profiling.manifest import StageSpan, Work
from verl_profiling.numbers.columns import NothingRow, UselessRow
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.trajectory_columns import Trajectory

KEPT = ("done", "running")
"""Statuses of trajectories that are trained on, or may still be."""
EQUAL, TRUNCATED = "equal rewards", "truncated"
_LEARNED = {EQUAL: "equal_tokens", "masked": "masked_tokens"}
"""Field of a work that counts the tokens of sequences that taught nothing, by the reason."""


def _reward_of(trajectory: Trajectory) -> float | None:
    """Return the reward of a trajectory; ``None`` if it is unknown, or no finite number."""
    value = trajectory.said.facts.get("reward")
    if isinstance(value, int | float) and isfinite(value):
        return float(value)
    return None


def taught_nothing(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """Return the fields of ``Rollout`` on training trajectories that taught nothing."""
    training = [one for one in trajectories if not one.validate]
    rewards = [_reward_of(one) for one in training]
    known = len(rewards) - rewards.count(None)
    return {"nothing": _rows(training), "rewarded": known}


def _rows(training: Sequence[Trajectory]) -> list[NothingRow]:
    """Return the time of training trajectories that taught nothing, by reason."""
    causes: dict[str, list[Trajectory]] = {}
    for group, members in grouped(training, lambda one: one.said.group).items():
        is_equal = group != "" and _is_equal(members)
        for one in members:
            if one.status not in KEPT:
                causes.setdefault(one.status, []).append(one)
            elif is_equal:
                causes.setdefault(EQUAL, []).append(one)
            elif one.said.facts.get("truncated") is True:
                causes.setdefault(TRUNCATED, []).append(one)
    whole_ns = sum(one.end_ns - one.begin_ns for one in training)
    rows = []
    for cause, members in causes.items():
        took_ns = sum(one.end_ns - one.begin_ns for one in members)
        row = NothingRow(
            cause=cause,
            seconds=took_ns / 1e9,
            share=took_ns / max(whole_ns, 1),
            trajectories=len(members),
            groups=len({one.said.group for one in members}),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds)


def _is_equal(members: Sequence[Trajectory]) -> bool:
    """Return whether the used samples of a group, two or more, ended with the same reward."""
    kept = [one for one in members if one.status in KEPT]
    rewards = {_reward_of(one) for one in kept}
    has_ended = not any(one.cut_end or one.status == "running" for one in kept)
    return len(kept) > 1 and len(rewards) == 1 and None not in rewards and has_ended


def useless_training(step: Step) -> list[UselessRow]:
    """Return the lane-seconds of training on sequences that taught nothing, by stage and reason.

    Runs with known advantages or masks count. Of nested runs, such as mini-batches and their
    micro-batches, the innermost ones count.
    """
    found: dict[str, list[tuple[float, Work]]] = {}
    for worker in step.workers:
        for stage, span in _innermost(worker.stages):
            took_s = (span.end_ns - span.begin_ns) / 1e9
            found.setdefault(stage, []).append((took_s, span.work or Work()))
    rows = []
    for stage, runs in found.items():
        whole_s = sum(took_s for took_s, _ in runs)
        for cause, field in _LEARNED.items():
            each = [(took_s, getattr(work, field) or 0, work.tokens or 1) for took_s, work in runs]
            seconds = sum(took_s * many / of for took_s, many, of in each)
            tokens, share = sum(many for _, many, _ in each), seconds / (whole_s or 1.0)
            row = UselessRow(stage=stage, cause=cause, tokens=tokens, seconds=seconds, share=share)
            if tokens:
                rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds)


def _innermost(stages: Iterable[StageSpan]) -> list[tuple[str, StageSpan]]:
    """Return the innermost runs with known advantages or masks, with their outermost stage."""
    found: list[tuple[str, StageSpan]] = []
    outermost = ""
    for span in sorted(stages, key=lambda span: (span.begin_ns, span.depth)):
        if not span.depth:
            outermost = span.name
        if span.work is None or span.work.useless_share is None:
            continue
        if found and span.begin_ns < found[-1][1].end_ns and span.depth > found[-1][1].depth:
            found.pop()
        found.append((outermost, span))
    return found
