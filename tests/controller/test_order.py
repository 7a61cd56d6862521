"""What the loop calls in the wrong order, or never: it is said once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_callback import configured, following, manifest, pass_steps, train_through

from verl_profiling import ProfilingCallback
from verl_profiling.capture.session import Session


def test_ends_without_begins_are_said_once(tmp_path: Path, session: Session, caplog: Any) -> None:
    """On captured steps and on others; later steps in order, with gaps or several rollouts,
    say nothing.
    """
    config = configured(tmp_path, schedule={"steps": [0, 1, 2]})
    callback = following(config)
    for _ in range(3):
        callback.on_step_end()
        callback.on_rollout_end()
    step_end, rollout_end = caplog.messages
    assert (
        step_end
        == "on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first"
    )
    assert rollout_end.startswith(
        "on_rollout_end without on_rollout_begin: the rollout has no begin"
    )
    caplog.clear()
    callback.on_step_begin(0)
    callback.on_rollout_end()
    callback.on_step_end()
    callback.on_step_end()
    for step in (1, 2, 4):
        callback.on_step_begin(step)
        for _ in range(2):
            callback.on_rollout_begin()
            callback.on_rollout_end()
        callback.on_step_end()
    assert not caplog.messages
    assert manifest(config, 2).complete


@pytest.mark.parametrize("watched", [True, False])
def test_steps_that_never_end_are_said_once(
    tmp_path: Path, session: Session, caplog: Any, watched: bool
) -> None:
    """Captured or only watched, with what to do; the watch has them from begin to begin."""
    watch = {"enable": watched, "trigger": None}
    config = configured(tmp_path, schedule={"steps": [] if watched else [4]}, watch=watch)
    callback = following(config)
    with callback:
        for step in range(1, 4):
            callback.on_step_begin(step)
    assert caplog.messages[:1] == [
        "step 2 begins and step 1 has not ended: call on_step_end() last in every step, or "
        "on_exception(error) where it raised"
    ]
    assert sum("has not ended" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("watched", [True, False])
def test_step_numbers_that_do_not_rise_are_said_once(
    tmp_path: Path, session: Session, caplog: Any, watched: bool
) -> None:
    """Those of an epoch, or one for all; captured or only watched."""
    watch = {"enable": watched, "trigger": None}
    config = configured(tmp_path, schedule={"steps": [] if watched else [2]}, watch=watch)
    callback = following(config)
    with callback:
        pass_steps(callback, 1, 2, 1, 2, 2)
    assert caplog.messages == [
        "step 1 begins after step 2: pass on_step_begin(step) a number that rises over the "
        "whole training, "
        "not over an epoch; the schedule chooses steps by it"
    ]


def test_a_step_that_raised_may_begin_again(tmp_path: Path, session: Session, caplog: Any) -> None:
    """After ``on_exception``, and after the end of a training; nothing is forgotten there."""
    config = configured(tmp_path, schedule={"steps": [100]})
    callback = following(config)
    for _ in range(2):
        with callback:
            for step in (1, 1, 2):
                callback.on_step_begin(step)
                callback.on_exception(ValueError("it is tried again"))
    assert caplog.messages == [
        "schedule.steps: step 100 never came; the loop ran from step 1 to step 2"
    ]


@pytest.mark.parametrize(
    ("schedule", "ran", "said"),
    [
        (
            {"steps": [2, 100, 200]},
            (1, 2, 3),
            "schedule.steps: steps 100, 200 never came; the loop ran from step 1 to step 3",
        ),
        (
            {"steps": [1]},
            (2, 3),
            "schedule.steps: step 1 never came; the loop ran from step 2 to step 3",
        ),
        (
            {"steps": list(range(10, 30))},
            (1, 2, 3),
            "schedule.steps: steps 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 10 more never came; "
            "the loop ran from step 1 to step 3",
        ),
        (
            {"skip_first": 2, "warmup": 1},
            (1, 2, 3),
            "schedule: no step was captured; the loop ran from step 1 to step 3, "
            "and schedule.skip_first=2, schedule.warmup=1",
        ),
    ],
)
def test_steps_that_never_came_are_said_when_training_ends(
    tmp_path: Path,
    session: Session,
    caplog: Any,
    schedule: dict[str, Any],
    ran: tuple[int, ...],
    said: str,
) -> None:
    """Which ones, and how far the loop got; a second end of training says nothing new."""
    config = configured(tmp_path, schedule=schedule)
    callback = train_through(config, *ran)
    callback.on_train_end()
    assert caplog.messages == [said]


def test_a_loop_that_begins_no_step_is_said(tmp_path: Path, caplog: Any) -> None:
    """Somebody forgot the hooks, and would wait for a folder in vain."""
    with ProfilingCallback(configured(tmp_path)):
        pass
    assert caplog.messages == [
        "training ends and on_step_begin(step) was never called: nothing was captured"
    ]
