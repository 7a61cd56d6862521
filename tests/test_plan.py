"""``verl-profiling plan``: what a configuration would capture, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling.cli import main
from verl_profiling.commands.doctor import examine_machine
from verl_profiling.commands.plan import load_config
from verl_profiling.settings.schedule import Action, planned_captures
from verl_profiling.tools import TOOLS


def steps_of(schedule: dict[str, Any], steps: int | None = None) -> list[tuple[int, int]]:
    """Return the first and last step of each planned capture."""
    return planned_captures(settings(schedule=schedule).schedule, steps)[0]


def planned(tmp_path: Path, config: Any, *arguments: str) -> int:
    """Run the command on a configuration; return its exit code."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return main(["plan", str(path), *arguments])


def test_the_plan_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, steps, roles, workers, stages and files, in that order."""
    config = {
        "enable": True,
        "mode": "discrete",
        "select": {"ranks": "0,8-15", "stages": ["update_actor", "old_log_prob"]},
        "schedule": {"every": 50},
        "roles": {"rollout": {"mode": "e2e", "ranks": "0-3"}, "critic": {"enable": False}},
    }
    assert planned(tmp_path, {"profiling": config}, "--steps", "160") == 0
    assert capsys.readouterr().out == (
        "settings (the others are the defaults)\n"
        "  enable = true\n"
        '  mode = "discrete"\n'
        "  schedule.every = 50\n"
        '  select.ranks = "0,8-15"\n'
        '  select.stages = ["update_actor","old_log_prob"]\n'
        '  roles.rollout.mode = "e2e"\n'
        '  roles.rollout.ranks = "0-3"\n'
        "  roles.critic.enable = false\n"
        "captures (schedule.every=50)\n"
        "  step 50               step_000050/\n"
        "  step 100              step_000100/\n"
        "  step 150              step_000150/\n"
        "role rollout\n"
        "  mode     e2e\n"
        "  workers  ranks 0-3\n"
        "  files    torch: one *.torch.json.gz per rank of each replica\n"
        "           at most 4 for each capture\n"
        "role critic\n"
        "  not captured\n"
        "every other role\n"
        "  mode     discrete\n"
        "  workers  ranks 0, 8-15\n"
        "  stages   old_log_prob, update_actor\n"
        "  files    torch: one *.torch.json.gz per worker and stage, each time that it runs\n"
        "           at most 18 for each capture, if every stage runs once\n"
    )


def test_a_watch_that_judges_no_step_is_a_caution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule captures all steps, and says nothing of the anomalies that are asked for."""
    watch = {"enable": True, "trigger": {}}
    assert planned(tmp_path, {"enable": True, "watch": watch}) == 0
    assert "caution: watch.trigger: never requests a capture" in capsys.readouterr().out
    assert planned(tmp_path, {"enable": True, "watch": watch, "schedule": {"steps": []}}) == 0
    printed = capsys.readouterr().out
    assert "caution" not in printed
    assert (
        "noticed within 8 steps from 1.3 times where it varies by 8%, 1.6 times where it" in printed
    )


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"enable": False}, "10"),
        ({"enable": True, "schedule": {"steps": [100]}}, "10"),
        ({"enable": True, "schedule": {"every": 50}}, "49"),
        (
            {"enable": True, "roles": {"actor": {"enable": False}}, "select": {"roles": ["actor"]}},
            "10",
        ),
    ],
)
def test_a_plan_that_captures_nothing_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], steps: str
) -> None:
    """Exit code 1, and the plan says where it ends."""
    assert planned(tmp_path, config, "--steps", steps) == 1
    printed = capsys.readouterr().out
    assert any(word in printed for word in ("nothing is captured", "none up to", "not captured"))


@pytest.mark.parametrize("steps", ["-5", "0", "many"])
def test_a_last_step_that_no_loop_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    """The first step of a loop is 1, so the last one is no lower."""
    with pytest.raises(SystemExit) as ended:
        planned(tmp_path, {"enable": True}, f"--steps={steps}")
    assert ended.value.code == 2
    assert f"--steps: {steps!r} is not an integer of at least 1" in capsys.readouterr().err


def test_settings_inside_of_a_larger_file(tmp_path: Path) -> None:
    """A trainer's file holds them under ``profiling``, a run's ``run.json`` under ``config``."""
    for key in ("profiling", "config"):
        path = tmp_path / f"{key}.json"
        path.write_text(json.dumps({"run_id": "x", key: {"enable": True, "tool": "spans"}}))
        assert load_config(path).tool == "spans"


def test_a_file_of_another_kind_is_one_readable_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program in the place of its settings, or a text alone, or an unknown key."""
    assert planned(tmp_path, {"enable": True, "mod": "e2e"}) == 2
    capsys.readouterr()
    (tmp_path / "text.yaml").write_text("all of it\n")
    assert main(["plan", str(tmp_path / "text.yaml")]) == 2
    assert capsys.readouterr().err.endswith(
        f"{tmp_path / 'text.yaml'}: must be a mapping, is str\n"
    )
    (tmp_path / "x.py").write_text("import torch\ndef train(model: str) -> None:\n    pass\n")
    assert main(["plan", str(tmp_path / "x.py")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "\\n" not in error
    assert error.startswith(f"verl-profiling: error: {tmp_path / 'x.py'}: cannot be read: ")


@pytest.mark.parametrize(
    "schedule",
    [
        {"steps": [7, 2, 3, 90]},
        {"steps": [2, 3, 4, 8], "continuous": True},
        {"every": 7},
        {"skip_first": 2, "wait": 1, "warmup": 1, "active": 2},
        {"wait": 1, "warmup": 2, "active": 3, "repeat": 2, "continuous": True},
        {},
    ],
)
def test_the_planned_steps_are_those_of_the_schedule(schedule: dict[str, Any]) -> None:
    """Asked step by step, as the loop does, from the first one on."""
    config = settings(schedule=schedule)
    steps = range(1, 101)
    wanted = [step for step in steps if config.schedule.action(step) is Action.RECORD]
    _, warm_ups, more = planned_captures(config.schedule, 100)
    assert [
        step for first, last in steps_of(schedule, 100) for step in range(first, last + 1)
    ] == wanted
    assert warm_ups == [
        step for step in range(101) if config.schedule.action(step) is Action.WARMUP
    ]
    assert not more


def test_a_loop_without_an_end_is_cut_off() -> None:
    """The first captures are enough to see the pattern; far steps and long runs take no time."""
    assert steps_of({"every": 1000})[-1] == (10_000, 10_000)
    assert planned_captures(settings(schedule={"every": 1000}).schedule, None)[2]
    assert steps_of({"steps": [10**12]}) == [(10**12, 10**12)]
    assert planned_captures(settings().schedule, 10**12)[2]


def test_coordinates_and_tools_that_come_later_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last pipeline stage by -1, reports that are collected after the run,
    and what stays on disk.
    """
    roles = {"rollout": {"mode": "discrete"}, "actor": {"pp": [0, -1], "tp": 0}}
    config = {"enable": True, "tool": ["nsys", "spans"], "mode": "e2e", "roles": roles}
    assert planned(tmp_path, {**config, "schedule": {"steps": [3, 900]}}, "--steps", "100") == 0
    printed = capsys.readouterr().out
    for line in (
        "  never come in 100 steps: step 900\n",
        "  stages   from on_rollout_begin to on_rollout_end\n",
        "nsys: one *.nsys-rep per replica and stage, each time that it runs; collected "
        "after the run\n",
        "  spans: none; its spans are in manifest.json\n",
        "  workers  tp 0; pp -1, 0\n",
    ):
        assert line in printed
    assert planned(tmp_path, {"enable": True, "limits": {"keep_last": 5}}) == 0
    assert "  kept on disk: the last 5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rollout", "stack", "part"),
    [
        ({"max_window_s": None}, False, "rollout.count is null: a small model"),
        ({"max_window_s": None, "count": 500}, True, "rollout.count is 500: a small model"),
        ({"max_window_s": None, "count": 500}, False, ""),
        ({"max_window_s": None}, True, ""),
        ({}, False, ""),
    ],
)
def test_an_engine_that_records_without_a_bound_is_cautioned_of(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rollout: dict[str, Any],
    stack: bool,
    part: str,
) -> None:
    """With what is known of its size; a window of seconds, or of a few iterations, is a bound."""
    config = {"enable": True, "rollout": rollout, "tools": {"torch": {"stack": stack}}}
    assert planned(tmp_path, config) == 0
    printed = capsys.readouterr().out
    assert ("caution: " in printed) == bool(part)
    assert part in printed
    assert planned(tmp_path, {**config, "tool": "spans"}) == 0
    assert "caution: " not in capsys.readouterr().out


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """It names this torch and every tool; a missing tool is not a failure by itself."""
    import torch

    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    for name in TOOLS:
        assert f"tool {name}" in printed
    states = {finding.subject: finding.state for finding in examine_machine()}
    assert states["tool torch"] == states["tool spans"] == "available"
