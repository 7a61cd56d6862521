"""The stages of a process on the way into accounts: the step of each, and which runs are told apart."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiling.step_account import StageUse
from verl_profiling.watch.lane import MOST_PERIODS, Lane, StepTime
from verl_profiling.watch.reading import EndedStage

S = 1_000_000_000


def uses_of(*runs: tuple[str, float, float]) -> list[StageUse]:
    """Return the stages of a process in a step of 100 s, of runs with a begin and an end."""
    lane = Lane("rollout0_rank0", "rollout", 0, 1000)
    numbers = count(1)
    ended = sorted(runs, key=lambda run: run[2])
    lane.take(
        (
            EndedStage(next(numbers), name, int(begin * S), int((end - begin) * S), 0, 0)
            for name, begin, end in ended
        ),
        0,
        200 * S,
    )
    [use] = lane.uses([StepTime(7, 1 * S, 101 * S)])
    assert use is not None
    return use.stages


def in_s(use: StageUse) -> list[tuple[float, float]]:
    """Return the periods of a stage in seconds."""
    return [(begin / S, end / S) for begin, end in use.periods]


def test_pieces_that_touch_are_one_period() -> None:
    """Generation is kept in pieces of a second: two batches in a step are two periods, and all their time."""
    pieces = [("generate", at, at + 1) for at in (10, 11, 12, 60, 61)]
    [use] = uses_of(*pieces, ("generate", 62, 62.5))
    assert in_s(use) == [(10, 13), (60, 62.5)]
    assert (use.begin_ns, use.duration_ns, use.runs) == (10 * S, int(5.5 * S), 6)


def test_a_stage_that_ends_after_the_account_of_its_step_is_in_the_next() -> None:
    """A batch is generated across the end of step 1, whose account is made meanwhile; it is in one alone."""
    lane = Lane("rollout0_rank0", "rollout", 0, 1000)
    first, second, third = (StepTime(at, 100 * at * S, (100 * at + 99) * S) for at in (1, 2, 3))
    lane.take([EndedStage(1, "generate", 110 * S, 10 * S, 0, 0)], 0, 205 * S)
    [use] = lane.uses([first])
    lane.forget(first.begin_ns)
    assert use is not None
    assert [stage.begin_ns for stage in use.stages] == [110 * S]
    lane.take([EndedStage(2, "generate", 150 * S, 60 * S, 0, 0)], 0, 305 * S)
    [use] = lane.uses([second])
    lane.forget(second.begin_ns)
    assert use is not None
    assert [stage.begin_ns for stage in use.stages] == [150 * S]
    lane.take([], 0, 405 * S)
    [use] = lane.uses([third])
    assert use is not None
    assert use.stages == []


def test_of_very_many_runs_the_last_ones_are_one_period() -> None:
    """Samples that are scored one by one do not make an account large; their time is exact."""
    [use] = uses_of(*(("reward", 2 + at / 2, 2.25 + at / 2) for at in range(100)))
    assert len(use.periods) == MOST_PERIODS
    assert in_s(use)[-1] == (2 + (MOST_PERIODS - 1) / 2, 2.25 + 99 / 2)
    assert (use.duration_ns, use.runs) == (25 * S, 100)


def test_a_stage_that_ran_once_has_no_list_of_periods() -> None:
    """Most do, in every process and step."""
    assert [use.periods for use in uses_of(("old_log_prob", 5, 9), ("update_actor", 9, 20))] == [(), ()]


STEPS = [StepTime(1, 100, 200), StepTime(2, 230, 330, before_ns=200), StepTime(3, 340, 440, before_ns=330)]


def steps_with(begin_ns: int, end_ns: int) -> list[int]:
    """Return the steps that have a stage of such times, one account after the other, as they are made."""
    lane = Lane("rollout0_rank0", "rollout", 0, 10)
    lane.take([EndedStage(1, "rollout", begin_ns, end_ns - begin_ns, 0, 0)], 0, 1000)
    found = []
    for step in STEPS:
        [use] = lane.uses([step])
        found += [step.step] if use is not None and use.stages else []
        lane.forget(step.begin_ns)
    return found


@pytest.mark.parametrize(
    ("begin_ns", "end_ns", "steps"),
    [
        (120, 180, [1]),
        (120, 250, [1]),
        (170, 310, [2]),
        (180, 250, [2]),
        (150, 225, [1]),
        (190, 225, []),
        (205, 225, []),
        (20, 80, []),
        (20, 130, [1]),
    ],
    ids=[
        "inside",
        "middle in the first",
        "middle in the second",
        "middle between, goes on in the second",
        "middle in the first, ends between",
        "middle between, ends between",
        "between",
        "before all",
        "begins before all",
    ],
)
def test_a_stage_is_in_the_step_of_its_middle(begin_ns: int, end_ns: int, steps: list[int]) -> None:
    """One whose middle lies between two steps is that of the second, if it goes on in that."""
    assert steps_with(begin_ns, end_ns) == steps


@given(st.integers(0, 450), st.integers(0, 450))
def test_a_stage_is_in_one_step_at_most_and_in_one_that_it_touches(one_ns: int, other_ns: int) -> None:
    """Neither counted twice nor lost, where it goes on from one step into the next."""
    begin_ns, end_ns = sorted((one_ns, other_ns))
    found = steps_with(begin_ns, end_ns)
    touched = [step.step for step in STEPS if begin_ns < step.end_ns and end_ns > step.begin_ns]
    assert len(found) <= 1
    assert set(found) <= set(touched)
    if len(touched) > 1:
        assert found
