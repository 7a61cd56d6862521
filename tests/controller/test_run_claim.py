"""Whose a folder is: runs that share a save_path, runs that are resumed,
and steps that come twice.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_callback import configured, following, run, train_through

from verl_profiling import ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest, read_run


def record(config: ProfilingConfig) -> Path:
    """Run a loop from its first step; return the folder of the step that was captured."""
    callback = following(config)
    run(callback, lambda step: None)
    return callback.last_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_run_gets_a_folder_of_its_own(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """However often a script starts, nothing is moved or overwritten,
    and a warning says where it records.
    """
    config = configured(tmp_path)
    root = Path(config.save_path)
    first = record(config)
    before = contents(first), contents(root)
    assert caplog.text == ""
    assert [record(config).parent for _ in range(2)] == [root / "run_2", root / "run_3"]
    assert (contents(first), contents(root)) == before
    assert len({read_manifest(step).run_id for step in root.rglob("step_000002")}) == 3
    assert f"save_path {root} belongs to run {read_manifest(first).run_id}, started" in caplog.text
    assert f"by pid {os.getpid()} on" in caplog.text
    assert f"this run is recorded in {root / 'run_2'}" in caplog.text


def test_a_run_that_is_resumed_is_a_run_of_its_own(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the same name, its own folder, and its own settings on record; that is no warning."""
    caplog.set_level(logging.INFO)
    first = configured(tmp_path, run_id="experiment/7")
    again = configured(tmp_path, run_id="experiment/7", schedule={"steps": [3]})
    root = Path(first.save_path)
    assert [record(config) for config in (first, again)] == [
        root / "step_000002",
        root / "run_2" / "step_000003",
    ]
    for config, folder in ((first, root), (again, root / "run_2")):
        info = read_run(folder)
        assert (info.run_id, info.process.pid) == ("experiment/7", os.getpid())
        assert ProfilingConfig.from_any(info.config) == config
    assert f"run experiment/7 goes on in {root / 'run_2'}" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_run_that_goes_on_elsewhere_is_not_claimed_before_it_records(
    tmp_path: Path, session: Session
) -> None:
    """Where the folder is another run's, or cannot be read,
    nothing is made before a step is captured.
    """
    other = configured(tmp_path, run_id="other", tool="spans")
    train_through(other, *range(1, 4))
    root = Path(other.save_path)
    before = contents(root)
    for damage in (before["run.json"], b"{"):
        (root / "run.json").write_bytes(damage)
        train_through(
            configured(tmp_path, run_id="r", tool="spans", schedule={"steps": [9]}), *range(1, 4)
        )
        assert contents(root) == {**before, "run.json": damage}
        assert not list(root.glob("run_*"))


def test_steps_that_never_came_are_named_by_the_check(
    tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run says nothing of those before its first step."""
    config = configured(tmp_path, run_id="r", tool="spans", schedule={"steps": [2, 5]})
    root = Path(config.save_path)
    train_through(config, *range(1, 4))
    assert main(["check", str(root)]) == 1
    said = "step 5 of schedule.steps never came; the loop ran from step 1 to step 3"
    assert f"missing     run.json  {said}" in capsys.readouterr().out
    assert main(["report", str(root)]) == 0
    assert said in capsys.readouterr().err
    train_through(config, *range(4, 7))
    assert main(["check", str(root / "run_2")]) == 0


def test_a_loop_that_counts_from_the_start_again_overwrites_nothing(
    tmp_path: Path, session: Session
) -> None:
    config = configured(tmp_path)
    callback = following(config)
    folders = []
    for _ in range(2):
        run(callback, lambda step: None)
        folders.append(callback.last_folder)
    assert folders == [tmp_path / "run" / "step_000002", tmp_path / "run" / "step_000002.2"]


LIVING = """
    import sys
    from verl_profiling.controller.run import Run
    from verl_profiling import ProfilingConfig
    config = ProfilingConfig(enable=True, tool="spans", save_path=sys.argv[1],
                             run_id=sys.argv[2] or None)
    sys.stdin.readline()
    print(Run(config).path, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("run_id", ["", "r"])
def test_runs_that_start_at_the_same_moment_have_different_folders(
    tmp_path: Path, run_id: str
) -> None:
    """With and without a name: whoever creates the file has the folder."""
    root = tmp_path / "run"
    command = [sys.executable, "-c", textwrap.dedent(LIVING), str(root), run_id]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(5)]
    try:
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        folders = sorted(Path(process.stdout.readline().strip()) for process in processes)
    finally:
        for process in processes:
            process.communicate("done\n", timeout=30)
    assert folders == [root, *(root / f"run_{number}" for number in range(2, 6))]
    assert all(read_run(folder) for folder in folders)
    assert [path.name for path in root.rglob(".*")] == []


@pytest.mark.parametrize("damage", [b"", b'{"run_id": "r", "begin_ns": 1}', b"\xff"])
def test_a_folder_whose_run_cannot_be_told_is_left_alone(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    config = configured(tmp_path, run_id="r")
    root = Path(config.save_path)
    root.mkdir()
    (root / "run.json").write_bytes(damage)
    assert record(config).parent == root / "run_2"
    assert (root / "run.json").read_bytes() == damage
    assert "belongs to a run with an unreadable run.json" in caplog.text


def test_step_folders_without_a_run_are_left_alone(tmp_path: Path, session: Session) -> None:
    config = configured(tmp_path)
    theirs = Path(config.save_path) / "step_000002"
    theirs.mkdir(parents=True)
    (theirs / "trace.json").write_text("[]")
    assert record(config).parent == Path(config.save_path) / "run_2"
    assert contents(theirs) == {"trace.json": b"[]"}


def test_a_file_system_without_hard_links_will_do(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **folders: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    config = configured(tmp_path)
    assert [record(config).parent.name for _ in range(2)] == ["run", "run_2"]
    assert read_run(Path(config.save_path)) is not None


def test_a_name_of_a_run_is_no_path(tmp_path: Path, session: Session) -> None:
    config = configured(tmp_path, run_id="../../etc/ü\n/" + "x" * 5000)
    assert record(config) == Path(config.save_path) / "step_000002"
    info = read_run(Path(config.save_path))
    assert info.run_id == config.run_id
