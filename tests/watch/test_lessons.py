"""What trajectories taught, where the samples of a group ran in several processes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from verl_profiling.files.step_summary import GroupSum, RankUse, StepSummary
from verl_profiling.watch.lessons import lessons_in
from verl_profiling.watch.log_writer import values_of


def played(rank: int, *groups: GroupSum) -> RankUse:
    return RankUse(lane=f"agent_loop_rank{rank}", role="agent_loop", rank=rank, groups=groups)


@pytest.mark.parametrize(
    ("members", "rewards", "equal_ns"),
    [
        (2, [1.0, 1.0], 100),
        (2, [0.0, 0.0], 0),  # equal in each process, but not in the group
        (2, [1.0, 0.0], 0),
        (2, [1.0], 0),  # one of them is unknown
        (0, [], 40),  # none of this process was used
    ],
)
def test_a_group_of_two_processes_is_judged_as_one(
    members: int, rewards: list[float], equal_ns: int
) -> None:
    """Rewards are equal if they are in all processes."""
    here = GroupSum("g", "math", 2, [1.0, 1.0], {"": 40})
    there = GroupSum("g", "math", members, rewards, {"": 60} if members else {"aborted": 60})
    summary = StepSummary(
        step=1, begin_ns=0, end_ns=10, workers=[played(0, here), played(1, there)]
    )
    [(task, lessons)] = lessons_in(summary)["rollout"].items()
    assert task == "math"
    assert lessons.get("equal rewards", 0) == equal_ns
    assert sum(lessons.values()) == 100


def test_many_tasks_are_told_apart_up_to_a_bound() -> None:
    """Others are one; the trackers have the share of each that is told apart."""
    groups = [GroupSum(f"g{n}", f"task {n}", 2, [0.0, 0.0], {"": 10}) for n in range(40)]
    summary = StepSummary(step=1, begin_ns=0, end_ns=10, workers=[played(0, *groups)])
    lessons = lessons_in(summary)
    assert len(lessons["rollout"]) == 33
    assert lessons["rollout"]["(others)"] == {"equal rewards": 80}
    values = values_of(replace(summary, lessons=lessons))
    assert values["profiling/watch/rollout/taught_nothing"] == pytest.approx(1.0)
    assert values["profiling/watch/rollout/taught_nothing/task 3"] == pytest.approx(1.0)
