"""``check`` looks at every byte, so that "ok" means that the step can be analysed."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from step_folders import build_step, rewrite, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.report.check import check
from verl_profiling.run_files import read_manifest, write_json_atomically

VICTIM = "actor_rank0.torch.json.gz"


def statuses(path: Path) -> dict[str, str]:
    return {entry.path: entry.status for entry in check(path).artifacts}


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + path.read_bytes()[40:]), "unreadable"),
        (
            lambda path: path.write_bytes(gzip.compress(b'{"baseTimeNanoseconds":1,"traceEvents":[]}')),
            "empty",
        ),
    ],
    ids=["unlinked", "0 bytes", "cut", "no gzip", "no events"],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: object, status: str) -> None:
    """Whatever happened to one file, it is named, and the others stay ok."""
    folder = build_step(tmp_path)
    damage(folder / VICTIM)
    found = statuses(folder)
    assert found.pop(VICTIM) == status
    assert set(found.values()) == {"ok"}
    assert not check(folder).ok


@pytest.mark.parametrize("status", ["empty", "failed"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_what_the_manifest_knows_is_said_with_its_reason(tmp_path: Path, status: str, on_disk: bool) -> None:
    """A window that was never reached left no file: that is `empty` and why, not `missing`."""
    folder = build_step(tmp_path)
    [artifact] = read_manifest(folder).workers[0].artifacts
    reason = "the recording window never began (start=100)"
    known = msgspec.structs.replace(artifact, status=status, reason=reason)
    rewrite_worker(folder, "actor_rank0", artifacts=[known])
    if not on_disk:
        (folder / VICTIM).unlink()
    [entry] = [entry for entry in check(folder).artifacts if entry.path == VICTIM]
    assert (entry.status, entry.reason) == (status, reason)
    assert not check(folder).ok


@pytest.mark.parametrize(("end_ns", "said"), [(None, "missing"), (2, "never finished")])
def test_what_was_promised_until_the_run_ended_was_never_finished(
    end_ns: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the run goes on, its file may still come."""
    folder = build_step(tmp_path)
    (folder / VICTIM).unlink()
    process = ProcessId.current()
    run = RunInfo(run_id="run", begin_ns=1, end_ns=end_ns, process=process, config={}, versions={})
    write_json_atomically(tmp_path / "run.json", run)
    assert main(["check", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert said in shown
    assert ("never finished" in shown) == (end_ns is not None)


@pytest.mark.parametrize(
    "found",
    [
        {"status": "empty", "reason": "no selected stage ran (selected: reward)", "artifacts": []},
        {"status": "failed", "reason": "the actor died"},
    ],
)
def test_a_worker_that_is_not_well_is_named(tmp_path: Path, found: dict[str, Any]) -> None:
    """Without an artifact, or beside those that it wrote before it died."""
    folder = build_step(tmp_path)
    rewrite_worker(folder, "actor_rank0", **found)
    result = check(folder)
    assert [(e.path, e.status, e.reason) for e in result.artifacts if e.status != "ok"] == [
        ("actor_rank0", found["status"], found["reason"])
    ]
    assert not result.ok


def test_a_step_that_recorded_nobody_is_a_finding(tmp_path: Path) -> None:
    """The manifest's notes say why, and so does the check."""
    folder = build_step(tmp_path)
    rewrite(folder, workers=[], notes=["nobody was added"])
    result = check(folder)
    assert (result.artifacts[-1].path, result.artifacts[-1].status) == ("manifest.json", "empty")
    assert result.artifacts[-1].reason == "no worker was captured; nobody was added"
    assert not result.ok
