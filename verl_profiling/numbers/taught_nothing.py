"""The seconds of rollout and training that taught nothing: equal rewards, masked or unused samples.

E.g. samples of one prompt with equal rewards have no advantage over each other. A response that was
cut off teaches, unless the loop drops or masks it: only its status or the training tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from verl_profiling.files.trajectory_log import EQUAL, KEPT, reward_of, task_of
from verl_profiling.manifest import Lessons, StageSpan, Work, added, divided, useless_parts
from verl_profiling.numbers.report_columns import NothingRow, UselessRow
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.trajectory_columns import Trajectory


def taught_nothing(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """Return the fields of ``Rollout`` on training trajectories that taught nothing."""
    training = [trajectory for trajectory in trajectories if not trajectory.validate]
    rewards = [reward_of(trajectory.said.facts) for trajectory in training]
    return {"nothing": _rows(training), "rewarded": len(rewards) - rewards.count(None)}


def _rows(training: Iterable[Trajectory]) -> list[NothingRow]:
    """Return the time of training trajectories that taught nothing, by reason and task."""
    lessons = defaultdict[str, Counter[str]](Counter)
    groups = defaultdict[tuple[str, str], list[str]](list)
    for group, members in grouped(training, attrgetter("said.group")).items():
        is_equal = group != "" and _is_equal(members)
        for trajectory in members:
            task, reason = task_of(trajectory.said.facts), _reason(trajectory, is_equal)
            lessons[task][reason] += trajectory.took_ns
            groups[task, reason].append(group)
    rows = []
    for part in useless_parts(lessons):  # type: ignore[arg-type]
        of_part = groups[part.task, part.cause]
        row = NothingRow(
            cause=part.cause,
            seconds=part.amount / 1e9,
            share=part.share,
            trajectories=len(of_part),
            groups=len(set(of_part)),
            task=part.task,
            share_of_task=part.share_of_task,
        )
        rows.append(row)
    return rows


def _reason(trajectory: Trajectory, is_equal: bool) -> str:
    """Return why nothing is learned from a trajectory, or an empty text."""
    if trajectory.status not in KEPT:
        return trajectory.status
    return EQUAL if is_equal else ""


def _is_equal(members: Sequence[Trajectory]) -> bool:
    """Return whether the used samples of a group, two or more, ended with the same reward."""
    kept = [trajectory for trajectory in members if trajectory.status in KEPT]
    for trajectory in kept:
        if trajectory.cut_end or trajectory.status == "running":
            return False
    rewards = {reward_of(trajectory.said.facts) for trajectory in kept}
    return len(kept) > 1 and len(rewards) == 1 and None not in rewards


def useless_training(step: Step) -> list[UselessRow]:
    """Return the lane-seconds of training on sequences that taught nothing, by stage, reason and
    task.

    Runs with known advantages, masks or reasons count. Of nested runs, such as mini-batches and
    their micro-batches, the innermost ones count.
    """
    of_stages = defaultdict[str, list[tuple[int, Work]]](list)
    for worker in step.workers:
        for stage, span in _innermost(worker.stages):
            of_stages[stage].append((span.end_ns - span.begin_ns, span.work or Work()))
    rows: list[UselessRow] = []
    for stage, runs in of_stages.items():
        rows += _useless(stage, runs)
    return sorted(rows, key=lambda row: -row.seconds)


def _useless(stage: str, runs: Iterable[tuple[int, Work]]) -> Iterator[UselessRow]:
    """Yield the rows of a stage, from duration (s) and work of each run."""
    times_ns: Lessons = {}
    tokens: Lessons = {}
    for took_ns, work in runs:
        lessons = work.lessons or {}
        tokens = added(tokens, lessons)
        times_ns = added(times_ns, divided(took_ns, lessons))
    for part in useless_parts(times_ns):
        many = tokens[part.task][part.cause]
        if many:
            yield UselessRow(
                stage=stage,
                cause=part.cause,
                tokens=many,
                seconds=part.amount / 1e9,
                share=part.share,
                task=part.task,
                share_of_task=part.share_of_task,
            )


def _innermost(stages: Iterable[StageSpan]) -> list[tuple[str, StageSpan]]:
    """Return the innermost runs whose lessons are known, with their outermost stage."""
    innermost: list[tuple[str, StageSpan]] = []
    outermost = ""
    for span in sorted(stages, key=attrgetter("begin_ns", "depth")):
        if not span.depth:
            outermost = span.name
        if span.work is None or span.work.lessons is None:
            continue
        if innermost:
            _, before = innermost[-1]
            if span.begin_ns < before.end_ns and span.depth > before.depth:
                innermost.pop()
        innermost.append((outermost, span))
    return innermost
