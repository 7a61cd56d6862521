"""Which captures of a run stay, and when there is no room for another one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_callback import configured, following, manifest

from verl_profiling import ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.report.check import check


def every_step(tmp_path: Path, **given: Any) -> ProfilingConfig:
    return configured(tmp_path, **{"schedule": {"every": 1}, **given})


def record(config: ProfilingConfig, steps: range) -> None:
    callback = following(config)
    callback.on_train_begin()
    for step in steps:
        callback.on_step_begin(step)
        callback.on_step_end()
    callback.on_train_end()


def kept(config: ProfilingConfig) -> list[str]:
    """Return what the run's folder holds, without ``run.json``."""
    return sorted(path.name for path in Path(config.save_path).iterdir() if not path.name.startswith("run."))


def names(*steps: int) -> list[str]:
    return [f"step_{step:06d}" for step in steps]


def test_the_last_captures_stay(tmp_path: Path, session: Session) -> None:
    """What was removed is in the notes of the capture that took its place; the rest is whole."""
    config = every_step(tmp_path, tool="torch", limits={"keep_last": 2})
    record(config, range(1, 7))
    assert kept(config) == names(5, 6)
    assert manifest(config, 5).notes == ["step_000003 was removed: limits.keep_last=2"]
    assert manifest(config, 6).notes == ["step_000004 was removed: limits.keep_last=2"]
    assert check(Path(config.save_path)).ok


def test_a_folder_with_files_of_somebody_else_stays(tmp_path: Path, session: Session) -> None:
    """A note in it, a report that was made of it: the folder is left alone, and that is said once."""
    config = every_step(tmp_path, limits={"keep_last": 1})
    note = Path(config.save_path) / names(1)[0] / "my notes.txt"
    callback = following(config)
    with callback:
        for step in range(1, 5):
            callback.on_step_begin(step)
            callback.on_step_end()
            if step == 1:
                note.write_text("keep")
    assert kept(config) == names(1, 4)
    assert manifest(config, 4).notes == ["step_000003 was removed: limits.keep_last=1"]
    assert note.read_text() == "keep"


def test_a_folder_that_cannot_be_read_stays(tmp_path: Path, session: Session) -> None:
    """Its manifest is damaged: that is a note, and the capture that takes its place is whole."""
    config = every_step(tmp_path, limits={"keep_last": 1})
    callback = following(config)
    with callback:
        for step in (1, 2, 3):
            callback.on_step_begin(step)
            callback.on_step_end()
            if step == 1:
                (Path(config.save_path) / names(1)[0] / "manifest.json").write_text("{")
    assert kept(config) == names(1, 3)
    [note] = manifest(config, 3).notes
    assert note == "step_000002 was removed: limits.keep_last=1"
    assert check(Path(config.save_path) / names(3)[0]).ok


def test_a_step_is_not_removed_while_a_worker_writes(tmp_path: Path, session: Session) -> None:
    """An artifact that is still compressed keeps its folder until it is done."""
    import threading

    config = every_step(tmp_path, tool="torch", limits={"keep_last": 1})
    callback = following(config)
    release = threading.Event()
    session._slot.background.submit(lambda: release.wait(20))
    for step in (1, 2, 3):
        callback.on_step_begin(step)
        callback.on_step_end()
    assert kept(config) == names(1, 2, 3)
    release.set()
    callback.on_train_end()
    statuses = [a.status for step in (1, 2, 3) for w in manifest(config, step).workers for a in w.artifacts]
    assert "pending" not in statuses


def test_a_run_that_is_killed_while_it_removes_leaves_whole_steps(tmp_path: Path, session: Session) -> None:
    """The rest of what was being removed is hidden: no command takes it for a step."""
    config = every_step(tmp_path, run_id="r", limits={"keep_last": 1})
    program = """
        import os, shutil, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_callback import local_worker
        from test_retention import record
        from verl_profiling import ProfilingConfig
        import json

        shutil.rmtree = lambda *a, **k: os._exit(9)
        record(ProfilingConfig.from_any(json.loads(sys.argv[1])), range(1, 4))
    """
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            msgspec.json.encode(config.to_dict()).decode(),
            str(Path(__file__).parent),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tests.parent), str(tests)))},
        check=False,
        capture_output=True,
    )
    assert done.returncode == 9, done.stderr
    left = kept(config)
    assert left[0] == f".{names(1)[0]}.removed"
    assert check(Path(config.save_path)).ok


def test_a_full_disk_is_not_written_to(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """No step folder is made; the warning names the folder, what is free, and the limit."""
    config = every_step(tmp_path, limits={"min_free_bytes": "5000TB"})
    with caplog.at_level(logging.WARNING):
        record(config, range(1, 4))
    assert kept(config) == []
    [warning] = [line.message for line in caplog.records]
    assert warning.startswith("captures stop at step 1, until there is room: ")
    assert f"{config.save_path} has " in warning
    assert "limits.min_free_bytes=5,000 TB" in warning


def test_that_nothing_was_captured_for_a_while_is_in_the_next_manifest(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = every_step(tmp_path)
    callback = following(config)
    usage = shutil.disk_usage
    for step in (1, 2, 3, 4):
        full = step in (2, 3)
        monkeypatch.setattr(
            shutil,
            "disk_usage",
            lambda path, full=full: usage(path)._replace(free=7) if full else usage(path),
        )
        callback.on_step_begin(step)
        callback.on_step_end()
    callback.on_train_end()
    assert kept(config) == names(1, 4)
    [note] = manifest(config, 4).notes
    assert note.startswith("captures stopped at step 2 and go on now: ")
    assert "has 7 bytes of free space" in note
