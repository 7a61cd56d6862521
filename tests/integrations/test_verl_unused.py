"""The plugin where nothing is profiled, and where two profilers are asked for: in real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integrations.counted_calls import PREFIX
from integrations.verl_runs import PLATFORM, PLUGINS, Run, run_verl

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

COUNTER = "integrations.counted_calls"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run with no plugin of this package in it."""
    return run_verl(
        tmp_path_factory.mktemp("without"),
        "profiling.enable=false",
        PLUGINS=f"{PLATFORM},{COUNTER}",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )


def counted(run: Run) -> dict[int, dict[str, Any]]:
    """Return what the counting plugin printed, by step."""
    assert run.code == 0, run.output[-4000:]
    lines = [line.partition(PREFIX)[2] for line in run.output.splitlines() if PREFIX in line]
    found: dict[int, dict[str, Any]] = {}
    for step in map(json.loads, lines):
        found.setdefault(
            step["step"], step
        )  # reports are logged under their steps when training has ended
    return found


def test_unused_it_changes_nothing(without: Run, tmp_path: Path) -> None:
    unused = run_verl(
        tmp_path,
        "profiling.enable=false",
        PLUGINS=f"{PLUGINS},{COUNTER}",
    )
    plain, loaded = counted(without), counted(unused)
    assert plain.keys() == loaded.keys() == {1, 2, 3}
    for step in (1, 2, 3):
        assert loaded[step]["calls"] == plain[step]["calls"]
        assert loaded[step]["metrics"].keys() == plain[step]["metrics"].keys()
    assert not unused.save_path.exists()


def test_steps_that_are_not_profiled_make_no_call(without: Run, tmp_path: Path) -> None:
    """Next to a profiled step, the trainer makes the calls of a run without the plugin,
    and no other.
    """
    profiled = run_verl(
        tmp_path,
        "profiling=e2e",
        "profiling.schedule.steps=[3]",
        "profiling.watch.enable=false",
        "trainer.total_training_steps=4",
        PLUGINS=f"{PLUGINS},{COUNTER}",
    )
    plain, others = counted(without), counted(profiled)
    assert others[2]["calls"] == plain[2]["calls"]
    assert others[4]["calls"] == plain[2]["calls"]
    added = {
        name: count
        for name, count in others[3]["calls"].items()
        if count != plain[2]["calls"].get(name, 0)
    }
    assert added == {
        "actor_rollout_start_capture": 1,
        "actor_rollout_stop_capture": 1,
        "start_capture": 3,  # engine, agent loop, reward
        "stop_capture": 3,
    }
