"""Folders that hold several runs: the commands list them and ask for one, and never mix."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_folders import build_step, rewrite

from verl_profiling.analysis import open_run
from verl_profiling.cli import main
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.run_files import write_json_atomically
from verl_profiling.timeline.inputs import find_steps

BEGIN_NS = 1_700_000_000_000_000_000


def build_run(folder: Path, run_id: str, *steps: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = RunInfo(run_id=run_id, begin_ns=BEGIN_NS, process=ProcessId.current(), config={}, versions={})
    write_json_atomically(folder / RUN_NAME, info)
    for step in steps:
        rewrite(build_step(folder, step=step), run_id=run_id)
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    build_run(tmp_path / "run", "first", 1, 2)
    build_run(tmp_path / "run" / "run_2", "second", 1)
    return tmp_path


COMMANDS = (["merge"], ["report"], ["report", "--save"], ["view", "--no-browser"], ["check"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_lists_the_runs_and_asks_for_one(
    outputs: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; each is named by a path to give; nothing was written. So does the folder above."""
    run = outputs / "run"
    before = sorted(outputs.rglob("*"))
    for path in (run, outputs):
        assert main([*command, str(path)]) == 2
        error = capsys.readouterr().err
        first, second = run / "run.json", run / "run_2" / "run.json"
        assert (
            error == f"verl-profiling: error: {path}: holds 2 runs; choose one of them: {first}, {second}\n"
        )
    assert sorted(outputs.rglob("*")) == before


def test_a_diff_asks_on_either_side(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one folder can be compared by name."""
    run = outputs / "run"
    for sides in ([run, run / "run_2"], [run / "run_2", run]):
        assert main(["diff", *map(str, sides)]) == 2
        assert "holds 2 runs" in capsys.readouterr().err
    assert main(["diff", str(run / "run.json"), str(run / "run_2")]) == 0


def test_each_run_can_be_named(outputs: Path) -> None:
    """By its folder or ``run.json``, a step by its own; a folder above a single run will do."""
    run = outputs / "run"
    assert [step.directory for step in find_steps(run / "run.json")] == [
        run / "step_000001",
        run / "step_000002",
    ]
    assert [step.directory for step in find_steps(run / "run_2")] == [run / "run_2" / "step_000001"]
    assert [step.directory for step in find_steps(run / "step_000002")] == [run / "step_000002"]
    assert [step.step for step in open_run(run / "run.json").steps()] == [1, 2]
    assert main(["check", str(run / "run.json")]) == 0
    with pytest.raises(TraceFormatError, match="holds 2 runs"):
        open_run(run)
    only = build_run(outputs / "above" / "a" / "profiling", "only", 1)
    assert [step.directory for step in find_steps(outputs / "above")] == [only / "step_000001"]


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[]"])
def test_a_run_whose_file_is_damaged_is_listed(outputs: Path, damage: bytes) -> None:
    (outputs / "run" / "run_2" / "run.json").write_bytes(damage)
    with pytest.raises(TraceFormatError, match=r"run_2/run\.json"):
        find_steps(outputs / "run")
    assert len(find_steps(outputs / "run" / "run_2")) == 1
