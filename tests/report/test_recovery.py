"""``recover`` completes what a killed loop left: from files alone, and as often as one likes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from step_folders import build_step

from verl_profiling.cli import main
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import MANIFEST_NAME, CaptureResult, Manifest
from verl_profiling.report.check import check
from verl_profiling.report.recovery import recover
from verl_profiling.run_files import read_manifest, write_json_atomically


def gone() -> ProcessId:
    """Return a process that has ended."""
    return msgspec.structs.replace(ProcessId.current(), started="0")


def begun(run: Path, step: int = 12, process: ProcessId | None = None) -> Path:
    """Return a step folder as it is when the loop is killed: traces are there, nothing was entered."""
    folder = build_step(run, step=step)
    manifest = read_manifest(folder)
    workers = [
        msgspec.structs.replace(
            worker,
            status="failed",
            reason="the capture has begun, and nothing was written since",
            stages=[],
            artifacts=[
                msgspec.structs.replace(artifact, status="missing", end_ns=0) for artifact in worker.artifacts
            ],
        )
        for worker in manifest.workers
    ]
    write_json_atomically(
        folder / MANIFEST_NAME,
        msgspec.structs.replace(
            manifest,
            state="begun",
            end_ns=manifest.begin_ns,
            complete=False,
            stages=[],
            workers=workers,
            process=process or gone(),
        ),
    )
    (folder / "controller.trace.json.gz").unlink()
    return folder


def fates(manifest: Manifest) -> dict[str, str]:
    """Return what became of each artifact."""
    return {artifact.path: artifact.status for worker in manifest.workers for artifact in worker.artifacts}


def test_what_is_there_is_entered_with_its_true_fate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, cut and missing artifacts; afterwards the commands use the step."""
    folder = begun(tmp_path)
    cut = folder / "actor_rank1.torch.json.gz"
    cut.write_bytes(cut.read_bytes()[:-500])
    (folder / "rollout0_rank0.torch.json.gz").unlink()
    assert main(["recover", str(tmp_path)]) == 1
    assert "recovered" in (printed := capsys.readouterr().out)
    assert "1 of 3 artifacts" in printed
    manifest = read_manifest(folder)
    assert (manifest.state, manifest.complete) == ("recovered", False)
    assert fates(manifest) == {
        "actor_rank0.torch.json.gz": "ok",
        "actor_rank1.torch.json.gz": "truncated",
        "rollout0_rank0.torch.json.gz": "missing",
    }
    [lost] = [worker for worker in manifest.workers if worker.name == "rollout0"]
    assert lost.status == "failed"
    assert all(artifact.reason for worker in manifest.workers for artifact in worker.artifacts[1:])
    assert any("was never written" in note for note in manifest.notes)
    assert manifest.end_ns > manifest.begin_ns
    assert main(["merge", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0


def test_the_trace_that_was_being_written_is_kept_and_no_part_stays(tmp_path: Path) -> None:
    """Of a raw trace the part is all there is; that of a compressed one is a copy, like a manifest's."""
    folder = begun(tmp_path)
    whole, cut = (folder / f"actor_rank{rank}.torch.json.gz" for rank in (0, 1))
    (folder / f".{cut.stem}.part").write_bytes(gzip.decompress(cut.read_bytes())[:-5000])
    cut.unlink()
    for copy in (f".{whole.name}.part", ".manifest.json.host.7.part"):
        (folder / copy).write_bytes(b"half")
    recover(tmp_path)
    assert [path.name for path in folder.glob(".*")] == []
    assert fates(read_manifest(folder))[cut.name] == "truncated"
    assert fates(read_manifest(folder))[whole.name] == "ok"


def test_it_may_be_repeated(tmp_path: Path) -> None:
    """A second time, and on a step that was written, nothing changes."""
    folder = begun(tmp_path)
    whole = build_step(tmp_path, step=13)
    manifest = read_manifest(whole)
    workers = [
        msgspec.structs.replace(
            worker, artifacts=[msgspec.structs.replace(a, status="ok") for a in worker.artifacts]
        )
        for worker in manifest.workers
    ]
    write_json_atomically(whole / MANIFEST_NAME, msgspec.structs.replace(manifest, workers=workers))
    before = (whole / MANIFEST_NAME).read_bytes()
    assert [step.outcome for step in recover(tmp_path)] == ["recovered", "whole"]
    first = (folder / MANIFEST_NAME).read_bytes()
    assert main(["recover", str(tmp_path)]) == 0
    assert (folder / MANIFEST_NAME).read_bytes() == first
    assert (whole / MANIFEST_NAME).read_bytes() == before
    assert [entry.path for entry in check(tmp_path).artifacts if entry.fate != "ok"] == [
        "step_000012/manifest.json"
    ]


def test_a_capture_whose_process_runs_is_left_alone(tmp_path: Path) -> None:
    """A real process on this host, until it has ended; ``--force`` does not ask."""
    program = (
        "import msgspec, sys; from verl_profiling.identity import ProcessId;"
        "print(msgspec.json.encode(ProcessId.current()).decode(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        alive = msgspec.json.decode(child.stdout.readline(), type=ProcessId)
        folder = begun(tmp_path, process=alive)
        before = (folder / MANIFEST_NAME).read_bytes()
        [left] = recover(tmp_path)
        assert left.outcome == "refused"
        assert f"pid {child.pid}" in left.reason
        assert (folder / MANIFEST_NAME).read_bytes() == before
        assert main(["recover", str(tmp_path)]) == 1
        child.communicate()
    [done] = recover(tmp_path)
    assert done.outcome == "recovered"
    again = begun(tmp_path, step=13, process=ProcessId.current())
    assert [step.outcome for step in recover(again, force=True)] == ["recovered"]


def test_what_nobody_expected_is_taken_in_by_its_name(tmp_path: Path) -> None:
    """Stages of discrete mode, a worker that never answered, an engine; other files stay what they are."""
    folder = begun(tmp_path)
    trace = (folder / "actor_rank0.torch.json.gz").read_bytes()
    for name in (
        "actor_rank0.update_actor.2.torch.json.gz",
        "critic_rank3_tp1.torch.json.gz",
        "rollout7_rank1.rollout.torch.json.gz",
    ):
        (folder / name).write_bytes(trace)
    (folder / "notes.txt").write_text("mine")
    (folder / "timeline.json.gz").write_bytes(trace)
    recover(tmp_path)
    manifest = read_manifest(folder)
    assert set(fates(manifest).values()) == {"ok"}
    assert len(fates(manifest)) == 6
    found = {worker.name: worker for worker in manifest.workers}
    [_, second] = found["actor_rank0"].artifacts
    assert (second.stage, second.occurrence, second.lane) == ("update_actor", 2, "actor_rank0")
    assert found["rollout7"].artifacts[0].lane == "rollout7_rank1"
    assert found["critic_rank3"].artifacts[0].lane == "critic_rank3_tp1"
    assert main(["merge", str(tmp_path)]) == 0


def test_a_folder_without_a_manifest_gets_one(tmp_path: Path) -> None:
    """What its name and its files say."""
    folder = begun(tmp_path)
    (folder / MANIFEST_NAME).unlink()
    [done] = recover(folder.parent)
    assert (done.outcome, done.artifacts) == ("recovered", (3, 3))
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.state) == (12, "recovered")
    [cut] = [entry for entry in check(folder).artifacts if entry.fate != "ok"]
    assert (cut.path, cut.fate) == (MANIFEST_NAME, "cut")
    assert cut.reason == "the step was cut short: its process ended"
    assert main(["report", str(folder)]) == 0


def test_an_empty_folder_is_a_step_that_recorded_nobody(tmp_path: Path) -> None:
    """It was made, and then the loop was killed."""
    (tmp_path / "step_000004").mkdir()
    assert [step.outcome for step in recover(tmp_path)] == ["recovered"]
    assert main(["check", str(tmp_path)]) == 1


def test_what_a_worker_left_is_taken_in(tmp_path: Path) -> None:
    """Its stages make the step one that can be cut; the file is gone when the manifest has it."""
    folder = begun(tmp_path)
    other = read_manifest(build_step(tmp_path, step=99))
    left = next(worker for worker in other.workers if worker.name == "actor_rank0")
    left = msgspec.structs.replace(left, step=12)
    file = folder / "actor_rank0.result.json"
    write_json_atomically(file, left)
    (folder / "actor_rank1.result.json").write_text("{")
    recover(folder)
    assert not file.exists()
    [worker] = [worker for worker in read_manifest(folder).workers if worker.name == "actor_rank0"]
    assert [span.name for span in worker.stages] == ["update_actor"]
    assert (worker.status, worker.artifacts[0].status) == ("ok", "ok")
    assert main(["split", str(folder)]) == 0


def test_pending_does_not_stay_when_its_process_is_gone(tmp_path: Path) -> None:
    """Raw bytes count where nobody compressed them; what is nowhere is missing. Nsys still collects."""
    folder = build_step(tmp_path)
    manifest = read_manifest(folder)
    first, second, third = manifest.workers
    raw = folder / "actor_rank0.torch.json"
    raw.write_bytes(gzip.decompress((folder / "actor_rank0.torch.json.gz").read_bytes()))
    (folder / "actor_rank0.torch.json.gz").unlink()
    (folder / "actor_rank1.torch.json.gz").unlink()
    later = msgspec.structs.replace(third.artifacts[0], tool="nsys", path="rollout0_rank0.nsys-rep")
    third = msgspec.structs.replace(third, artifacts=[*third.artifacts, later])
    write_json_atomically(
        folder / MANIFEST_NAME,
        msgspec.structs.replace(manifest, workers=[first, second, third], process=gone()),
    )
    [done] = recover(tmp_path)
    assert done.outcome == "recovered"
    manifest = read_manifest(folder)
    assert fates(manifest) == {
        "actor_rank0.torch.json.gz": "ok",
        "actor_rank1.torch.json.gz": "missing",
        "rollout0_rank0.torch.json.gz": "ok",
        "rollout0_rank0.nsys-rep": "pending",
    }
    assert manifest.state == "written"
    assert [step.outcome for step in recover(tmp_path)] == ["whole"]


def test_a_manifest_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    """Somebody may still read it, e.g. a newer release."""
    folder = begun(tmp_path)
    content = json.dumps({**json.loads((folder / MANIFEST_NAME).read_text()), "schema_version": 99})
    (folder / MANIFEST_NAME).write_text(content)
    assert main(["recover", str(tmp_path)]) == 1
    assert (folder / MANIFEST_NAME).read_text() == content
    [left] = recover(tmp_path)
    assert (left.outcome, "move manifest.json away" in left.reason) == ("refused", True)
    assert main(["recover", str(tmp_path / "nowhere")]) == 2


def test_a_hostile_result_writes_nothing_outside(tmp_path: Path) -> None:
    """A lane or a path that leads out of the folder is refused, and the rest recovered."""
    folder = begun(tmp_path / "run")
    left = read_manifest(folder).workers[0]
    artifact = msgspec.structs.replace(left.artifacts[0], path="../../outside.json", lane="../../x")
    for name in ("../../x", "actor_rank0"):
        lane = artifact.lane if name != "actor_rank0" else "actor_rank0"
        bad: CaptureResult = msgspec.structs.replace(
            left, artifacts=[msgspec.structs.replace(artifact, lane=lane)]
        )
        write_json_atomically(folder / f"{name[-3:].replace('/', '_')}.result.json", bad)
    recover(folder)
    assert "unreadable" not in {entry.path for entry in check(folder).artifacts}
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
