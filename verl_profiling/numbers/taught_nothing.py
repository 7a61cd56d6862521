"""The seconds of a rollout that taught nothing: equal rewards, truncated and unused samples.

E.g. samples of one prompt with equal rewards have no advantage over each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from verl_profiling.numbers.columns import NothingRow
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.records import Trajectory

KEPT = ("done", "running")
"""Statuses of trajectories that are trained on, or may still be."""
EQUAL, TRUNCATED = "equal rewards", "truncated"


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
