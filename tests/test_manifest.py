"""What all sides know: the manifest, the errors, identities and the file names that follow from them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)
from verl_profiling.identity import WorkerIdentity, artifact_name, safe_name
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


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (ConfigError("a.b", "is wrong"), ValueError),
        (CaptureStateError("state"), RuntimeError),
        (ToolUnavailableError("tool"), RuntimeError),
        (TraceFormatError("x.json", "is cut off"), ValueError),
        (TraceFormatError("x.json", "is cut off", 12), ValueError),
    ],
)
def test_every_error_is_ours_and_a_standard_one(error: Exception, standard: type[Exception]) -> None:
    """One base class catches all; Ray pickles what a worker raises, and nothing of it is lost."""
    assert isinstance(error, ProfilingError)
    assert isinstance(error, standard)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_replica_has_a_lane_for_each_of_its_ranks() -> None:
    """A rollout replica is one worker; its tensor-parallel ranks are lanes of it."""
    replica = WorkerIdentity(role="rollout", rank=8, replica=2)
    assert replica.name == "rollout2"
    assert [replica.lane(), replica.lane(0), replica.lane(1)] == [
        "rollout2_rank0",
        "rollout2_rank0",
        "rollout2_rank1",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("actor_rank0", ".torch.json.gz"), "actor_rank0.torch.json.gz"),
        (("actor_rank0", ".torch.json.gz", "update_actor"), "actor_rank0.update_actor.torch.json.gz"),
        (("actor_rank0", ".torch.json.gz", "update_actor", 2), "actor_rank0.update_actor.2.torch.json.gz"),
        (("rollout0_rank0", ".npu", "a-b"), "rollout0_rank0.a-b.npu"),
        (("rollout0_rank0", ".npu", "a/b"), "rollout0_rank0.a-b-07f4401c.npu"),
    ],
)
def test_artifact_names_are_canonical(arguments: tuple[str, ...], expected: str) -> None:
    """Lane, stage, and which run of it when it ran again."""
    assert artifact_name(*arguments) == expected


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_stages_of_different_names_have_different_files(names: list[str]) -> None:
    """Even if they become equal once unsafe characters are replaced or the name is shortened."""
    for ending in ("", "x" * 100):
        first, second = (artifact_name("actor_rank0", ".json", name + ending) for name in names)
        assert first != second


@given(st.text())
def test_no_name_leaves_its_folder(text: str) -> None:
    """Whatever a role or stage is called, its name is one short, safe path component."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", safe_name(text))
    assert "/" not in WorkerIdentity(role=text).name
