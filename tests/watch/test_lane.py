"""The stages of a process on the way into accounts: which runs of a stage are told apart."""

from __future__ import annotations

from itertools import count

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


def test_of_very_many_runs_the_last_ones_are_one_period() -> None:
    """Samples that are scored one by one do not make an account large; their time is exact."""
    [use] = uses_of(*(("reward", 2 + at / 2, 2.25 + at / 2) for at in range(100)))
    assert len(use.periods) == MOST_PERIODS
    assert in_s(use)[-1] == (2 + (MOST_PERIODS - 1) / 2, 2.25 + 99 / 2)
    assert (use.duration_ns, use.runs) == (25 * S, 100)


def test_a_stage_that_ran_once_has_no_list_of_periods() -> None:
    """Most do, in every process and step."""
    assert [use.periods for use in uses_of(("old_log_prob", 5, 9), ("update_actor", 9, 20))] == [[], []]
