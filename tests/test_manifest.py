"""What all sides know: the manifest, the errors,
identities and the file names that follow from them.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import build_step

from verl_profiling import (
    CaptureStateError,
    ConfigError,
    ProfilingError,
    ToolUnavailableError,
    TraceFormatError,
)
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.identity import WorkerIdentity, artifact_name, safe_name
from verl_profiling.manifest import MANIFEST_NAME


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
def test_what_is_no_manifest_is_refused(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / MANIFEST_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=problem) as caught:
        read_manifest(tmp_path)
    assert caught.value.path == str(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """The error is raised, and the old content and the folder are unchanged."""
    step = build_step(tmp_path)
    before, names = read_manifest(step), sorted(path.name for path in step.iterdir())
    (step / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_json_atomically(step / "taken", before)
    assert read_manifest(step) == before
    assert sorted(path.name for path in step.iterdir()) == sorted([*names, "taken"])


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
def test_every_error_is_ours_and_a_standard_one(
    error: Exception, standard: type[Exception]
) -> None:
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
        (
            ("actor_rank0", ".torch.json.gz", "update_actor"),
            "actor_rank0.update_actor.torch.json.gz",
        ),
        (
            ("actor_rank0", ".torch.json.gz", "update_actor", 2),
            "actor_rank0.update_actor.2.torch.json.gz",
        ),
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
