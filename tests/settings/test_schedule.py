"""The schedule: stepped through, and held against ``torch.profiler.schedule``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiling import ConfigError
from verl_profiling.settings.schedule import Action, Schedule, StepRange

LETTERS = {Action.OFF: ".", Action.WARMUP: "w", Action.RECORD: "R"}


def drawn(schedule: Schedule, steps: int = 12, first: int = 1) -> str:
    return "".join(LETTERS[schedule.action(step)] for step in range(first, first + steps))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), "RRRRRRRRRRRR"),
        (Schedule(steps=(2, 3, 7)), ".RR...R....."),
        (Schedule(steps=(100,)), "............"),
        (Schedule(every=1), "RRRRRRRRRRRR"),
        (Schedule(every=4), "...R...R...R"),
        (Schedule(skip_first=5), ".....RRRRRRR"),
        (Schedule(wait=3), "...R...R...R"),
        (Schedule(wait=1, warmup=1, active=2), ".wRR.wRR.wRR"),
        (Schedule(wait=1, warmup=1, active=2, repeat=2), ".wRR.wRR...."),
        (Schedule(skip_first=2, wait=1, active=1, repeat=3), "...R.R.R...."),
    ],
)
def test_each_form_captures_the_steps_it_says(schedule: Schedule, expected: str) -> None:
    assert drawn(schedule) == expected


def test_step_zero_is_a_step_like_any_other() -> None:
    """``every`` and a list capture it, cycles begin at 1."""
    assert drawn(Schedule(every=3), steps=8, first=-1) == ".R..R..R"
    assert drawn(Schedule(steps=(0,)), steps=3, first=-1) == ".R."
    assert drawn(Schedule(), steps=3, first=-1) == "..R"
    schedule = Schedule(wait=1, warmup=1, active=2)
    assert schedule.step_range(1) is None
    assert schedule.step_range(2) == StepRange(2, 2, Action.WARMUP)
    assert schedule.step_range(3) == StepRange(3, 3)
    assert schedule.step_range(4) == StepRange(4, 4)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@given(
    skip_first=st.integers(0, 5),
    wait=st.integers(0, 4),
    warmup=st.integers(0, 4),
    active=st.integers(1, 4),
    repeat=st.integers(0, 3),
    step=st.integers(0, 60),
)
def test_cycles_mean_what_they_mean_in_torch(
    skip_first: int, wait: int, warmup: int, active: int, repeat: int, step: int
) -> None:
    """Every step of a cycle does what ``torch.profiler.schedule`` does in it."""
    from torch.profiler import ProfilerAction, schedule

    theirs = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
    ours = Schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    meaning = {
        ProfilerAction.NONE: Action.OFF,
        ProfilerAction.WARMUP: Action.WARMUP,
        ProfilerAction.RECORD: Action.RECORD,
        ProfilerAction.RECORD_AND_SAVE: Action.RECORD,
    }
    assert ours.action(1 + step) is meaning[theirs(step)]


@pytest.mark.parametrize(
    "endless",
    [{}, {"every": 1}, {"skip_first": 3}, {"active": 5}],
)
def test_a_continuous_capture_needs_an_end(endless: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="bound it with steps or repeat"):
        Schedule(continuous=True, **endless)
