"""The time of a step that taught nothing, by task: of trajectories and of training.

Samples of a group may run in several processes, so only all of them together tell whether their
rewards are equal. A trajectory costs the watch about a microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from verl_profiling.files.step_summary import OTHERS, ROLLOUT, GroupSum, Period, StepSummary
from verl_profiling.files.trajectory_log import EQUAL, KEPT, reward_of, task_of
from verl_profiling.manifest import MOST_TASKS, Lessons, added, divided
from verl_profiling.trajectories.spans import Trajectory, later_statuses, open_spans

MOST_ENDED = 8192
"""Maximum number of ended trajectories that a process keeps until the watch reads them."""
_LONGEST_ID = 64


class EndedTrajectories(deque[Trajectory]):
    """The trajectories of a process that ended, until the watch reads them."""

    def of_steps(self, steps: Sequence[Period], ahead_ns: int) -> list[tuple[GroupSum, ...]]:
        """Return the groups whose last trajectory ended in each step, as far as facts tell what
        they taught; groups with an open trajectory are kept.

        Args:
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's.
        """
        ended = [self.popleft() for _ in range(len(self))]
        if not later_statuses and not any(map(_tells, ended)):
            return [()] * len(steps)
        groups = _by_group_and_task(ended)
        is_open = {str(span.group) for span in open_spans() if isinstance(span, Trajectory)} - {""}
        later = {(new.group, new.sample): new.status for new in [*later_statuses]}
        sums: list[list[GroupSum]] = [[] for _ in steps]
        for (group, task), members in groups.items():
            ended_ns = max(map(attrgetter("end_ns"), members)) - ahead_ns
            if group in is_open or not steps or ended_ns > steps[-1][1]:
                self.extend(members)
                continue
            for number, (begin_ns, end_ns) in enumerate(steps):
                if begin_ns <= ended_ns <= end_ns:
                    sums[number].append(_sum_of(group, task, members, later))
        return [*map(tuple, sums)]


def _by_group_and_task(
    ended: Iterable[Trajectory],
) -> dict[tuple[str, str], list[Trajectory]]:
    """Return trajectories by group and task, without trajectories of a validation."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    task, of_task = "", (None, None)
    for trajectory in ended:
        facts = trajectory.facts
        named = facts.get("task"), facts.get("environment")
        if named[0] is not of_task[0] or named[1] is not of_task[1]:  # few tasks, so seldom
            task, of_task = task_of(facts), named
        if facts.get("validate") is not True:
            groups.setdefault((str(trajectory.group), task), []).append(trajectory)
    return groups


def _text(value: object) -> str:
    return str(value)[:_LONGEST_ID].encode("utf-8", "replace").decode()


def _tells(trajectory: Trajectory) -> bool:
    """Return whether a fact tells what a trajectory taught."""
    facts = trajectory.facts
    return "reward" in facts or trajectory.status not in ("", *KEPT)


def _sum_of(
    group: str, task: str, members: Iterable[Trajectory], later: Mapping[Any, str]
) -> GroupSum:
    """Return the sum of a group's trajectories of a task.

    Args:
        group: The group; empty for all trajectories without one.
        task: The task.
        members: The trajectories.
        later: Statuses that were set after the end of trajectories, in this process.
    """
    many = 0
    rewards: list[float] = []
    times_ns: dict[str, int] = {}
    for trajectory in members:
        facts, reason = trajectory.facts, trajectory.status
        if later:
            of_sample = later.get((group, trajectory.sample))
            reason = of_sample or later.get((group, None)) or reason
        if reason and reason not in KEPT:
            reason = _text(reason)
        else:
            reason = ""
            many += 1
            reward = reward_of(facts)
            if reward is not None:
                rewards.append(reward)
        took_ns = trajectory.end_ns - trajectory.begin_ns
        if took_ns > 0:  # the clock may be set back
            times_ns[reason] = times_ns.get(reason, 0) + took_ns
    return GroupSum(_text(group), task, many, rewards, times_ns)


def lessons_in(summary: StepSummary) -> dict[str, Lessons]:
    """Return the time (ns) of a step by stage, task, and the reason why it taught nothing.

    Of the rollout, it is the time of trajectories; of other stages, that of their processes,
    divided by the tokens of their work.
    """
    lessons: dict[str, Lessons] = {}
    sums = [group for use in summary.processes for group in use.groups]
    if sums:
        lessons[ROLLOUT] = _of_rollout(sums)
    for use in summary.processes:
        for stage, work in (use.work or {}).items():
            if work.lessons is not None:
                took_ns = sum(ns for name, _, _, ns in use.each_run() if name == stage)
                lessons[stage] = added(lessons.get(stage, {}), divided(took_ns, work.lessons))
    return lessons


def _of_rollout(sums: Iterable[GroupSum]) -> Lessons:
    """Return the time (ns) of trajectories by task and reason, from the sums of all processes.

    The loop's process may have set statuses on whole groups after their end, e.g. ``filtered``.
    """
    later = {_text(new.group): _text(new.status) for new in [*later_statuses] if new.sample is None}
    groups: dict[tuple[str, str], GroupSum] = {}
    for part in sums:
        group = groups.setdefault((part.group, part.task), part)
        if group is not part:
            group.members += part.members
            group.rewards += part.rewards
            group.times_ns = added(group.times_ns, part.times_ns)
    lessons: Lessons = {}
    for group in groups.values():
        times_ns = group.times_ns
        status = later.get(group.group, "done")
        is_equal = len(group.rewards) > 1 and len(set(group.rewards)) == 1
        if status not in KEPT:
            times_ns = {status: sum(times_ns.values())}
        elif group.group and is_equal and len(group.rewards) == group.members:
            times_ns[EQUAL] = times_ns.pop("", 0)
        task = group.task if group.task in lessons or len(lessons) < MOST_TASKS else OTHERS
        of_task = lessons.setdefault(task, {})
        for reason, took_ns in times_ns.items():
            of_task[reason] = of_task.get(reason, 0) + took_ns
    return lessons
