"""The seconds of rollout and training that taught nothing: equal rewards, truncated, masked and
unused samples.

E.g. samples of one prompt with equal rewards have no advantage over each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isfinite
from operator import attrgetter
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
    training = [trajectory for trajectory in trajectories if not trajectory.validate]
    rewards = list(map(_reward_of, training))
    return {"nothing": _rows(training), "rewarded": len(rewards) - rewards.count(None)}


def _rows(training: Sequence[Trajectory]) -> list[NothingRow]:
    """Return the time of training trajectories that taught nothing, by reason."""
    causes = defaultdict[str, list[Trajectory]](list)
    for group, members in grouped(training, attrgetter("said.group")).items():
        is_equal = group != "" and _is_equal(members)
        for trajectory in members:
            if trajectory.status not in KEPT:
                causes[trajectory.status].append(trajectory)
            elif is_equal:
                causes[EQUAL].append(trajectory)
            elif trajectory.said.facts.get("truncated") is True:
                causes[TRUNCATED].append(trajectory)
    whole_ns = sum(map(attrgetter("took_ns"), training))
    rows = []
    for cause, members in causes.items():
        took_ns = sum(map(attrgetter("took_ns"), members))
        row = NothingRow(
            cause=cause,
            seconds=took_ns / 1e9,
            share=took_ns / max(whole_ns, 1),
            trajectories=len(members),
            groups=len(set(map(attrgetter("said.group"), members))),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds)


def _is_equal(members: Sequence[Trajectory]) -> bool:
    """Return whether the used samples of a group, two or more, ended with the same reward."""
    kept = [trajectory for trajectory in members if trajectory.status in KEPT]
    for trajectory in kept:
        if trajectory.cut_end or trajectory.status == "running":
            return False
    rewards = set(map(_reward_of, kept))
    return len(kept) > 1 and len(rewards) == 1 and None not in rewards


def useless_training(step: Step) -> list[UselessRow]:
    """Return the lane-seconds of training on sequences that taught nothing, by stage and reason.

    Runs with known advantages or masks count. Of nested runs, such as mini-batches and their
    micro-batches, the innermost ones count.
    """
    of_stages = defaultdict[str, list[tuple[float, Work]]](list)
    for worker in step.workers:
        for stage, span in _innermost(worker.stages):
            took_s = (span.end_ns - span.begin_ns) / 1e9
            of_stages[stage].append((took_s, span.work or Work()))
    rows = []
    for stage, runs in of_stages.items():
        whole_s = sum(took_s for took_s, _ in runs) or 1.0
        for cause, field in _LEARNED.items():
            tokens = 0
            seconds = 0.0
            for took_s, work in runs:
                useless = getattr(work, field) or 0
                tokens += useless
                seconds += took_s * useless / (work.tokens or 1)
            if tokens:
                share = seconds / whole_s
                rows.append(
                    UselessRow(
                        stage=stage, cause=cause, tokens=tokens, seconds=seconds, share=share
                    )
                )
    return sorted(rows, key=lambda row: -row.seconds)


def _innermost(stages: Iterable[StageSpan]) -> list[tuple[str, StageSpan]]:
    """Return the innermost runs with known advantages or masks, with their outermost stage."""
    innermost: list[tuple[str, StageSpan]] = []
    outermost = ""
    for span in sorted(stages, key=attrgetter("begin_ns", "depth")):
        if not span.depth:
            outermost = span.name
        if span.work is None or span.work.useless_share is None:
            continue
        if innermost:
            _, before = innermost[-1]
            if span.begin_ns < before.end_ns and span.depth > before.depth:
                innermost.pop()
        innermost.append((outermost, span))
    return innermost
