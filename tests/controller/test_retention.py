"""Which captures of a run stay, and when there is no room for another one."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fault_tools import FAULTY
from test_callback import configured, following, manifest, pass_steps, train_through

from verl_profiling import ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_run
from verl_profiling.steps.check import check


def every_step(tmp_path: Path, **given: Any) -> ProfilingConfig:
    return configured(tmp_path, **{"schedule": {"every": 1}, **given})


def kept(config: ProfilingConfig) -> list[str]:
    """Return what the run's folder holds, without ``run.json``."""
    return sorted(
        path.name for path in Path(config.save_path).iterdir() if not path.name.startswith("run.")
    )


def names(*steps: int) -> list[str]:
    return [f"step_{step:06d}" for step in steps]


def test_the_last_captures_stay(tmp_path: Path, session: Session) -> None:
    """What was removed is in the notes of the capture that took its place; the rest is whole."""
    config = every_step(tmp_path, tool="torch", limits={"keep_last": 2})
    train_through(config, *range(1, 7))
    assert kept(config) == names(5, 6)
    assert manifest(config, 5).notes == ["step_000003 was removed: limits.keep_last=2"]
    assert manifest(config, 6).notes == ["step_000004 was removed: limits.keep_last=2"]
    assert check(Path(config.save_path)).ok


@pytest.mark.parametrize(
    ("name", "text"), [("my notes.txt", "keep"), ("manifest.json", "{")], ids=["strange", "damaged"]
)
def test_a_folder_that_is_not_the_runs_alone_stays(
    tmp_path: Path, session: Session, name: str, text: str
) -> None:
    """With a file of somebody else, or whose manifest is damaged; later captures are whole."""
    config = every_step(tmp_path, limits={"keep_last": 1})
    file = Path(config.save_path) / names(1)[0] / name
    callback = following(config)
    with callback:
        for step in range(1, 5):
            callback.on_step_begin(step)
            callback.on_step_end()
            if step == 1:
                file.write_text(text)
    assert kept(config) == names(1, 4)
    assert manifest(config, 4).notes == ["step_000003 was removed: limits.keep_last=1"]
    assert check(Path(config.save_path) / names(4)[0]).ok
    assert file.read_text() == text


def test_a_step_is_not_removed_while_a_worker_writes(tmp_path: Path, session: Session) -> None:
    """An artifact that is still compressed keeps its folder until it is done."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({f"{step}/actor_rank0": "finishes late" for step in (1, 2, 3)}))
    options = {"tool": FAULTY, "tools": {FAULTY: {"plan": str(plan)}}}
    config = every_step(tmp_path, limits={"keep_last": 1}, **options)
    callback = following(config)
    pass_steps(callback, 1, 2, 3)
    assert kept(config) == names(1, 2, 3)
    plan.write_text("{}")
    callback.on_train_end()
    statuses = [
        a.status for step in (1, 2, 3) for w in manifest(config, step).workers for a in w.artifacts
    ]
    assert "pending" not in statuses


def test_a_step_has_another_name_before_its_removal_has_a_turn(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier removal takes long; a run that is killed meanwhile leaves whole steps."""
    config, go_on = every_step(tmp_path, limits={"keep_last": 1}), threading.Event()
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: go_on.wait(60))
    callback = following(config)
    pass_steps(callback, 1, 2, 3)
    assert kept(config) == [*(f".{name}.removed" for name in names(1, 2)), *names(3)]
    assert check(Path(config.save_path) / names(3)[0]).ok
    go_on.set()
    callback.on_train_end()


def test_a_full_disk_is_not_written_to(
    tmp_path: Path,
    session: Session,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step folder is made, which is logged once and noted in the next manifest,
    with what is free.
    """
    config = every_step(tmp_path)
    callback = following(config)
    usage, full = shutil.disk_usage, False
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(path)._replace(free=7) if full else usage(path)
    )
    for step in (1, 2, 3, 4):
        full = step in (2, 3)
        callback.on_step_begin(step)
        callback.on_step_end()
    callback.on_train_end()
    assert kept(config) == names(1, 4)
    [note], [warning] = manifest(config, 4).notes, caplog.messages
    assert note.startswith("captures stopped at step 2 (")
    assert warning.startswith("captures stop at step 2, until there is room: ")
    for said in (note, warning, read_run(Path(config.save_path)).not_captured[2]):
        assert (
            f"{config.save_path} has 7 bytes of free space, less than limits.min_free_bytes="
            in said
        )
