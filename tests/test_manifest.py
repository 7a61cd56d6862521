"""The manifest: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_profiling import TraceFormatError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    HostClock,
    Manifest,
    Request,
    Rpc,
    StageSpan,
)
from verl_profiling.run_files import read_manifest, write_json_atomically


def example() -> Manifest:
    """Return a manifest in which every part has something."""
    worker = WorkerIdentity(role="actor", rank=1, host="far", clock_domain="far", topology={"dp": 1})
    artifact = Artifact(path="ok.json", lane="actor_rank0", tool="torch", status="ok", bytes=3)
    request = Request(replica=0, begin_ns=10, end_ns=100, prompt_tokens=8, response_tokens=16)
    return Manifest(
        run_id="run",
        capture_id="run-1",
        step=3,
        steps=[3, 4],
        policy_version=2,
        begin_ns=1_700_000_000_123_456_789,
        end_ns=1_700_000_001_123_456_789,
        controller=WorkerIdentity(role="controller"),
        stages=[StageSpan("rollout", 1, 2, failed=True)],
        rpcs=[Rpc("actor_rank1", "start_capture", 1, 2)],
        workers=[CaptureResult(identity=worker, artifacts=[artifact], requests=[request])],
        clocks=[HostClock(host="far", clock_domain="far", offset_ns=-5, error_ns=2)],
        metrics={"reward": 0.5},
        notes=["note"],
    )


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Nanoseconds included, corrected by a host's clock; one of an unknown clock is left as it is."""
    write_json_atomically(tmp_path / MANIFEST_NAME, example())
    assert read_manifest(tmp_path) == example()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]
    manifest = example()
    assert manifest.offset_ns(manifest.workers[0].identity) == -5
    assert manifest.offset_ns(WorkerIdentity(role="actor")) == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is this a step folder"),
        (b"", "not a manifest"),
        (b"{", "not a manifest"),
        (b"[]", "not a manifest"),
        (b'{"run_id": 3}', "not a manifest"),
        (b"{}", "not a manifest: .*missing required field"),
        (b"\xff\xfe", "not a manifest"),
        (b'{"schema_version": 999}', "schema version 999, newer than 1: update verl-profiling"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / MANIFEST_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=problem) as caught:
        read_manifest(tmp_path)
    assert caught.value.path == str(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """The error is raised, and the old content and the folder are unchanged."""
    write_json_atomically(tmp_path / MANIFEST_NAME, example())
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_json_atomically(tmp_path / "taken", example())
    assert read_manifest(tmp_path) == example()
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_NAME, "taken"]
