"""The bytes of an artifact and of a step: larger traces are cut, and what cannot be cut is removed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from example_loops import settings, train

from verl_profiling.capture.artifact_size import ByteBudget
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import Session
from verl_profiling.manifest import Artifact
from verl_profiling.settings.limits import Limits
from verl_profiling.settings.typed_values import Size
from verl_profiling.testing import record_step
from verl_profiling.timeline.reader import Trace
from verl_profiling.tools import Output


def written(folder: Path, name: str, size: int) -> Output:
    """Write a file; return it as a tool's output."""
    (folder / name).write_bytes(bytes(size))
    return Output(Artifact(path=name, lane="actor_rank0", tool="torch", status="ok", bytes=size, events=9))


def request(folder: Path, workers: int = 1) -> CaptureRequest:
    """Return the request of a capture."""
    return CaptureRequest(capture_id="c", run_id="r", step=1, folder=str(folder), workers=workers)


def test_a_trace_that_is_too_large_keeps_its_begin(tmp_path: Path, session: Session) -> None:
    """What is left can be read; status, reason and size say what was cut."""
    with record_step(settings(limits={"artifact_bytes": "6kB"}), tmp_path) as recorded:
        train(1000)
    assert recorded.result is not None
    [artifact] = recorded.result.artifacts
    assert (artifact.status, artifact.bytes, artifact.events) == ("truncated", 6000, None)
    assert recorded.path.stat().st_size == 6000
    assert artifact.reason.startswith("cut to 6 kB of ")
    assert artifact.reason.endswith(": limits.artifact_bytes=6 kB")
    assert sum(len(events) for events in Trace(recorded.path).chunks()) > 50


def test_a_trace_that_fits_is_left_alone(tmp_path: Path, session: Session) -> None:
    """It is whole, and counted."""
    with record_step(settings(limits={"artifact_bytes": "1MB"}), tmp_path) as recorded:
        train()
    assert recorded.result is not None
    [artifact] = recorded.result.artifacts
    assert artifact.status == "ok"
    assert artifact.events


@pytest.mark.parametrize("name", ["actor_rank0.memory.pickle", "actor_rank0.npu"])
def test_what_is_of_no_use_when_cut_is_removed(tmp_path: Path, name: str) -> None:
    """A snapshot, or a folder: a failed artifact that says how large it was."""
    output = written(tmp_path, "x", 5000)
    if name.endswith("npu"):
        (tmp_path / name / "inside").mkdir(parents=True)
        (tmp_path / "x").rename(tmp_path / name / "inside" / "file")
    else:
        (tmp_path / "x").rename(tmp_path / name)
    output = Output(msgspec.structs.replace(output.artifact, path=name))
    bounded = ByteBudget(Limits(artifact_bytes=Size(4000)), request(tmp_path)).bound(output)
    assert bounded.artifact.status == "failed"
    assert bounded.artifact.reason.startswith("removed: its 5 kB are more than 4 kB")
    assert list(tmp_path.iterdir()) == []


def test_each_worker_may_write_its_part_of_a_step(tmp_path: Path) -> None:
    """What it wrote before counts, so that all workers together keep below the limit."""
    budget = ByteBudget(Limits(step_bytes=Size(20_000)), request(tmp_path, workers=2))
    sizes = [budget.bound(written(tmp_path, f"{number}.json.gz", 4000)).artifact.bytes for number in range(3)]
    assert sizes == [4000, 4000, 2000]
    last = budget.bound(written(tmp_path, "3.json.gz", 4000)).artifact
    assert last.status == "failed"
    assert "limits.step_bytes=20 kB is 10 kB for each of 2 workers" in last.reason
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 10_000


def test_the_ranks_of_a_replica_share_its_part(tmp_path: Path) -> None:
    """The first trace leaves as much for the second; what one does not need, the next may have."""
    budget = ByteBudget(Limits(step_bytes=Size(10_000)), request(tmp_path), artifacts=3)
    sizes = [
        budget.bound(written(tmp_path, f"{number}.json.gz", size)).artifact.bytes
        for number, size in enumerate((9000, 1000, 9000))
    ]
    assert sizes == [3333, 1000, 5667]
