"""The manifest: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

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


def artifact(status: str, **more: object) -> Artifact:
    return Artifact(path=f"{status}.json", lane="actor_rank0", tool="torch", status=status, **more)  # type: ignore[arg-type]


def a_request(**changes: Any) -> Request:
    """Return a request of which everything is known."""
    times = {"begin_ns": 10, "arrival_ns": 20, "scheduled_ns": 30, "first_token_ns": 50}
    times |= {"last_token_ns": 90, "end_ns": 100}
    facts = {"id": "r-1", "cached_tokens": 4, "preemptions": 1, "policy_version": 2}
    return Request(**{"replica": 0, "prompt_tokens": 8, "response_tokens": 16, **times, **facts, **changes})


def example() -> Manifest:
    """Return a manifest in which every part has something."""
    worker = WorkerIdentity(role="actor", rank=1, host="far", clock_domain="far", topology={"dp": 1})
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
        workers=[CaptureResult(identity=worker, artifacts=[artifact("ok", bytes=3)], requests=[a_request()])],
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
    ("changes", "parts"),
    [
        ({}, ["to the engine 10", "queued 10", "prefill 20", "decode 40", "from the engine 10"]),
        ({"last_token_ns": 0}, ["to the engine 10", "queued 10", "prefill 20", "decode 50"]),
        ({"arrival_ns": 0}, ["queued 20", "prefill 20", "decode 40", "from the engine 10"]),
        ({"arrival_ns": 0, "scheduled_ns": 0}, ["first token 40", "decode 40", "from the engine 10"]),
        ({"scheduled_ns": 0}, ["to the engine 10", "first token 30", "decode 40", "from the engine 10"]),
        ({"first_token_ns": 0}, ["to the engine 10", "queued 10", "generate 60", "from the engine 10"]),
        ({"arrival_ns": 5}, ["queued 20", "prefill 20", "decode 40", "from the engine 10"]),
        ({"scheduled_ns": 70}, ["to the engine 10", "queued 50", "decode 20", "from the engine 10"]),
        ({"last_token_ns": 2000}, ["to the engine 10", "queued 10", "prefill 20", "decode 50"]),
        ({"arrival_ns": -7, "end_ns": 10}, []),
        ({"end_ns": 1}, []),
    ],
)
def test_the_parts_of_a_request_add_up(changes: dict[str, int], parts: list[str]) -> None:
    """From begin to end, whatever is unknown, out of order or outside; no part is empty or negative."""
    request = a_request(**changes)
    found = request.parts()
    assert [f"{name} {end - begin}" for name, begin, end in found] == parts
    assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(found))
    if found:
        assert (found[0][1], found[-1][2]) == (request.begin_ns, request.end_ns)


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
