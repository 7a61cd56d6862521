"""What verl's check says will be captured, and which settings will have no effect; without verl."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_profiling import ProfilingConfig
from verl_profiling.integrations.verl.dry_run import forecast, without_effect
from verl_profiling.integrations.verl.notices import say_nothing_is_profiled, why_nothing
from verl_profiling.integrations.verl.profiler import Profiler

ROLES = ("actor", "rollout")


def settings(**given: Any) -> ProfilingConfig:
    """Return settings that profile in discrete mode."""
    return ProfilingConfig.from_any({"enable": True, "mode": "discrete", **given})


def test_a_stage_that_nobody_has_is_named_with_the_choices() -> None:
    """A misspelt stage is warned of, wherever it is selected; those that workers have are not."""
    misspelt = settings(
        select={"stages": ["update_acotr", "update_actor"]}, roles={"critic": {"stages": ["vallues"]}}
    )
    first, second = without_effect(misspelt, None)
    assert "profiling.select.stages: verl's workers have no stage 'update_acotr' (your own may)" in first
    assert "did you mean 'update_actor'?" in first
    assert second.startswith("profiling.roles.critic.stages: verl's workers have no stage 'vallues'")
    assert not list(without_effect(settings(), None))


def test_steps_after_the_end_of_the_run_are_named() -> None:
    """With ``trainer.total_training_steps``, listed steps that are later never come."""
    chosen = settings(schedule={"steps": [2, 9, 30]})
    (text,) = without_effect(chosen, 8)
    assert "steps 9, 30 never come; the last step is trainer.total_training_steps=8" in text
    assert not list(without_effect(chosen, None))


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


def test_the_timers_of_verls_own_profiler_are_no_stages() -> None:
    """``start_profile`` and ``stop_profile`` time what is switched off here; other timers are stages."""
    marked: list[str] = []

    def stage(name: str) -> nullcontext[None]:
        marked.append(name)
        return nullcontext()

    profiler: Any = SimpleNamespace(stage=stage, stages=Profiler.stages)
    for timer in ("start_profile", "adv", "stop_profile"):
        with Profiler.timed(profiler, timer, nullcontext()):
            pass
    assert marked == ["advantage"]
