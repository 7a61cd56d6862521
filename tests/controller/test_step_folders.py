"""What becomes of a manifest after it was written: late artifacts, and the end of training."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_callback import configured

from verl_profiling.capture.messages import Finished
from verl_profiling.controller.step_folders import StepFolders
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, ArtifactStatus, CaptureResult, Manifest
from verl_profiling.run_files import read_manifest

LATE = "vLLM had not written it 5 s after the stop"


def written(tmp_path: Path, status: ArtifactStatus, reason: str = "") -> tuple[StepFolders, Path]:
    """Write a step with one engine that has one artifact of that status."""
    folders = StepFolders(configured(tmp_path))
    folder = folders.make(2)
    lane = "rollout0_rank0"
    artifact = Artifact(
        path=f"{lane}.torch.json.gz", lane=lane, tool="torch", status=status, reason=reason, step=2
    )
    engine = CaptureResult(
        identity=WorkerIdentity(role="rollout", replica=0),
        capture_id="run-1",
        status="failed" if status == "failed" else "ok",
        reason=reason,
        artifacts=[artifact],
    )
    folders.write(
        folder,
        Manifest(
            run_id="run",
            capture_id="run-1",
            step=2,
            steps=[2],
            begin_ns=1,
            end_ns=2,
            controller=WorkerIdentity(role="controller"),
            workers=[engine],
        ),
    )
    return folders, folder


@pytest.mark.parametrize("window", ["", "/1"])
def test_a_trace_that_an_engine_wrote_late_is_ok_with_the_delay_noted(tmp_path: Path, window: str) -> None:
    """It was failed when the manifest was written; the engine's next answer says what became of it."""
    folders, folder = written(tmp_path, "failed", LATE)
    [engine] = read_manifest(folder).workers
    assert folders.pending_workers() == {"rollout0"}, "it is asked again at the end of training"
    late = msgspec.structs.replace(engine.artifacts[0], status="ok", bytes=7, reason="")
    folders.note(Finished(f"run-1{window}", late))
    [engine] = read_manifest(folder).workers
    assert (engine.status, engine.reason) == ("ok", "")
    [artifact] = engine.artifacts
    assert (artifact.status, artifact.bytes, artifact.step) == ("ok", 7, 2)
    assert artifact.reason == f"it came late: {LATE}"
    assert folders.pending_workers() == set()


def test_what_is_late_and_damaged_stays_a_failure(tmp_path: Path) -> None:
    """The fate is the file's own."""
    folders, folder = written(tmp_path, "failed", LATE)
    artifact = read_manifest(folder).workers[0].artifacts[0]
    folders.note(
        Finished(
            "run-1", msgspec.structs.replace(artifact, status="truncated", reason="cut off after 9 bytes")
        )
    )
    [engine] = read_manifest(folder).workers
    assert (engine.status, engine.artifacts[0].reason) == ("truncated", "cut off after 9 bytes")


@pytest.mark.parametrize(
    ("on_disk", "status", "reason"),
    [
        ("rollout0_rank0.torch.json.gz", "ok", ""),
        ("rollout0_rank0.torch.json", "ok", "not compressed"),
        ("other", "missing", "nobody said"),
    ],
)
def test_pending_does_not_outlive_training(
    tmp_path: Path, on_disk: str, status: ArtifactStatus, reason: str
) -> None:
    """When nobody says what became of an artifact, the files do."""
    folders, folder = written(tmp_path, "pending")
    (folder / on_disk).write_bytes(b"trace")
    folders.flush()
    [artifact] = read_manifest(folder).workers[0].artifacts
    assert artifact.status == status
    assert reason in artifact.reason


def test_what_waits_for_collect_still_waits(tmp_path: Path) -> None:
    """Nsight Systems writes its reports when the process ends: the reason says so."""
    folders, folder = written(tmp_path, "pending", "fetch it with: verl-profiling collect run")
    folders.flush()
    assert read_manifest(folder).workers[0].artifacts[0].status == "pending"
