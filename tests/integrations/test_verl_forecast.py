"""What verl's check says will be captured, and why nothing will be; without verl."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_profiling import ProfilingConfig
from verl_profiling.integrations.verl.dry_run import forecast
from verl_profiling.integrations.verl.notices import say_nothing_is_profiled, why_nothing

ROLES = ("actor", "rollout")


def settings(**given: Any) -> ProfilingConfig:
    """Return settings that profile in discrete mode."""
    return ProfilingConfig.from_any({"enable": True, "mode": "discrete", **given})


@pytest.mark.parametrize(
    ("given", "roles", "last", "says"),
    [
        ({"schedule": {"steps": [2, 3, 30]}}, ROLES, 8, "will be captured: steps 2, 3 of actor, rollout"),
        ({"schedule": {"every": 10}}, ROLES, None, "and more of actor, rollout"),
        ({"schedule": {"steps": [30]}}, ROLES, 8, "nothing will be captured: schedule.steps=(30,); the last"),
        ({"schedule": {"every": 10}}, ROLES, 8, "nothing will be captured: schedule.every=10"),
        ({}, (), 8, "nothing will be captured: no role of this run is selected"),
    ],
)
def test_the_last_line_says_what_will_be_captured(
    given: dict[str, Any], roles: tuple[str, ...], last: int | None, says: str
) -> None:
    """Steps and roles that will be captured are named, or that nothing will be."""
    assert says in forecast(settings(**given), roles, last)


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
