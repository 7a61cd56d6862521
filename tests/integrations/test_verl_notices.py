"""What verl's check says will be captured, and why nothing will be; without verl."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_profiling.integrations.verl.notices import captured_steps, say_nothing_is_profiled, why_nothing
from verl_profiling.settings.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "last", "says"),
    [
        ({"steps": [2, 3, 30]}, 8, "steps 2, 3"),
        ({"every": 10}, None, "and more"),
        ({"every": 10}, 8, "no step (schedule.every=10)"),
    ],
)
def test_the_steps_that_will_be_captured_are_named(
    schedule: dict[str, Any], last: int | None, says: str
) -> None:
    """Those that the run has, or that there are none."""
    assert says in captured_steps(Schedule(**schedule), last)


@pytest.mark.parametrize(
    ("profiling", "steps", "says"),
    [
        ({"schedule": {"steps": [2]}, "mode": "e2e"}, None, "has settings (schedule, mode) and does not say"),
        ("verl", None, "global_profiler.steps names no step"),
        ("verl", [2], "no role's profiler.enable is true"),
        ({"enable": False}, None, ""),
        ({}, None, ""),
    ],
)
def test_a_block_that_profiles_nothing_says_why(
    profiling: Any, steps: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A recipe's own block that replaces the chosen group is loud; what is switched off is silent."""
    config = OmegaConf.create({"profiling": profiling, "global_profiler": {"steps": steps}})
    assert says in why_nothing(config)
    assert bool(says) == bool(why_nothing(config))
    with caplog.at_level(logging.WARNING):
        say_nothing_is_profiled(config)
    assert bool(caplog.records) == bool(says)
    assert says in caplog.text
