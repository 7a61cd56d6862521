"""A fault that is put into the recipe is the first finding of its step, and of no healthy one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed; `make env` builds an environment"
)

from reader import run_module

from verl_profiling.analysis import open_step
from verl_profiling.report.model import Finding

HEALTHY, SLOW = (2, 3), 4  # a machine that does other things may slow a rank down in one of them

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]


def first_finding(run: Path, step: int) -> Finding | None:
    """Return what the report says first of a step."""
    return next(iter(open_step(run / "profiling" / f"step_{step:06d}").report().findings), None)


def test_a_slow_rank_is_the_first_finding_of_its_step(tmp_path: Path) -> None:
    """Named with its stage and its seconds; a step without it says something else first."""
    settings = ["profiling=e2e", f"profiling.schedule.steps={[*HEALTHY, SLOW]}", "steps=4"]
    run_module("tests.recipes.slow_rank", SLOW, f"output_dir={tmp_path}", *settings)
    slow = first_finding(tmp_path, SLOW)
    assert (slow.rule, slow.lanes) == ("straggler", ["actor_rank1"])
    assert slow.text.startswith("actor_rank1 is slow in update_actor: ")
    assert 1.0 <= slow.seconds <= 3.0  # it slept for a second before each of two mini-batches
    healthy = [first_finding(tmp_path, step) for step in HEALTHY]
    assert any(
        first is None or (first.rule, first.lanes) != (slow.rule, slow.lanes) for first in healthy
    )
