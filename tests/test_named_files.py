"""A folder of traces that somebody else made: what it names does not lead out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from step_folders import build_step, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import NsysRange
from verl_profiling.run_files import read_manifest, write_result

SPECIAL: dict[str, Callable[[Path], object]] = {
    "a link that leads out": lambda path: path.symlink_to("/etc/hostname"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
}


def around(folder: Path) -> set[Path]:
    return {path for path in folder.parent.parent.rglob("*") if folder not in path.parents}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_no_command_opens_a_special_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """It is named, and nobody waits for what has no end or no writer."""
    folder = build_step(tmp_path)
    victim = folder / read_manifest(folder).workers[0].artifacts[0].path
    victim.unlink()
    SPECIAL[kind](victim)
    for command in ("report", "merge"):
        assert main([command, str(folder)]) in (0, 1, 2)
        assert "localhost" not in capsys.readouterr().out
    assert main(["check", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "unreadable" in printed
    assert victim.name in printed


@pytest.mark.parametrize("path", ["../../x.torch.json.gz", "/etc/hostname", "a\0b", "", ".."])
def test_a_manifest_cannot_name_what_is_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A path that leads out is refused; nothing appears beside the step folder."""
    folder = build_step(tmp_path / "a" / "run")
    worker = read_manifest(folder).workers[0]
    artifacts = [msgspec.structs.replace(artifact, path=path) for artifact in worker.artifacts]
    rewrite_worker(folder, worker.name, artifacts=artifacts)
    before = around(folder)
    for command in ("check", "report", "merge"):
        assert main([command, str(folder)]) != 0 or command in ("report", "merge")
        assert around(folder) == before
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"path": "x" * 5000},
        {"path": "/etc/hostname"},
        {"lane": "../../x"},
        {"process": 1 << 40},
        {"link": "/etc/hostname"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_result_of_a_process_costs_its_own_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    """Whatever a result file names, the other workers are used, and nothing is written outside."""
    folder = build_step(tmp_path / "run")
    manifest = read_manifest(folder)
    worker, named = manifest.workers[0], {key: change[key] for key in ("path", "lane") if key in change}
    gone = msgspec.structs.replace(ProcessId.current(), pid=change.get("process", 1), started="0")
    result = msgspec.structs.replace(
        worker,
        capture_id=manifest.capture_id,
        process=gone,
        artifacts=[msgspec.structs.replace(worker.artifacts[0], status="pending", **named)],
    )
    write_result(folder, result)
    if "link" in change:
        (folder / "actor_rank0.result.json").unlink()
        (folder / "actor_rank0.result.json").symlink_to(change["link"])
    before = around(folder)
    assert main(["check", str(folder.parent)]) == (1 if "path" in change else 0)
    assert "ok          step_000012/actor_rank1.torch.json.gz" in capsys.readouterr().out
    for command in ("report", "merge"):
        assert main([command, str(folder.parent)]) in (0, 1)
    assert around(folder) == before


@pytest.mark.parametrize(("folder", "artifact"), [("..", "victim"), ("step_000001", "../../victim")])
def test_a_note_of_nsys_cannot_overwrite_a_file_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, artifact: str
) -> None:
    """``collect`` moves a report into a step folder of the run, or nowhere."""
    run = tmp_path / "run"
    (run / "nsys").mkdir(parents=True)
    (run / "step_000001").mkdir()
    (tmp_path / "victim").write_text("precious")
    noted = NsysRange(number=1, folder=folder, artifact=artifact, begin_ns=1, end_ns=2)
    (run / "nsys" / "actor.7.ranges.jsonl").write_bytes(msgspec.json.encode(noted) + b"\n")
    (run / "nsys" / "actor.7.nsys-rep").write_text("report")
    assert main(["collect", str(run)]) != 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert "Traceback" not in capsys.readouterr().err
