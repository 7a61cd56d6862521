"""The archive holds the traces byte for byte, and a manifest by Perfetto's documented rules."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from step_folders import WORKERS, build_step, recordings

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.archive import write_archive
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.sources import StepInputs

CLOCK_NS = 1_234_567_891


def archive(folder: Path) -> tuple[dict[str, bytes], dict]:
    """Pack a step and return the files of the archive, in order, and its manifest."""
    (inputs,) = find_steps(folder)
    path, problems = write_archive(inputs)
    assert problems == []
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    return files, json.loads(files["perfetto_manifest.json"])


def test_traces_are_copied_byte_for_byte(tmp_path: Path) -> None:
    """Nothing is parsed, so nothing can change."""
    folder = build_step(tmp_path)
    files, _ = archive(folder)
    assert files["controller/controller.trace.json.gz"] == (folder / "controller.trace.json.gz").read_bytes()
    for lane in WORKERS:
        name = f"{lane}.torch.json.gz"
        assert files[f"{lane}/{name}"] == (folder / name).read_bytes()


def test_the_manifest_follows_the_documented_format(tmp_path: Path) -> None:
    """https://perfetto.dev/docs/reference/perfetto-manifest: first in the tar, version 1, known fields."""
    files, content = archive(build_step(tmp_path))
    assert next(iter(files)) == "perfetto_manifest.json"
    assert content.keys() == {"perfetto_manifest"}
    manifest = content["perfetto_manifest"]
    assert manifest.keys() == {"version", "files"}
    assert manifest["version"] == 1
    assert {entry["path"] for entry in manifest["files"]} == files.keys() - {"perfetto_manifest.json"}
    for entry in manifest["files"]:
        assert entry.keys() == {"path", "machine", "clocks"}
        assert entry["machine"].keys() == {"name"}
        assert entry["machine"]["name"]
        assert entry["clocks"].keys() == {"offset_ns"}
        assert 0 <= entry["clocks"]["offset_ns"] < 2**63


def test_offsets_put_all_files_on_one_clock(tmp_path: Path) -> None:
    """A host whose clock is ahead is shifted back, so equal instants are equal on the timeline."""
    folder = build_step(tmp_path, rank1_clock_ns=CLOCK_NS)
    _, content = archive(folder)
    offsets = {e["machine"]["name"]: e["clocks"]["offset_ns"] for e in content["perfetto_manifest"]["files"]}
    bases = {lane: json.loads(recordings()[lane].trace)["baseTimeNanoseconds"] for lane in WORKERS}
    begin_ns = json.loads((folder / "manifest.json").read_text())["begin_ns"]
    assert offsets["actor_rank1"] - offsets["actor_rank0"] == bases["actor_rank1"] - bases["actor_rank0"]
    assert offsets["controller"] - offsets["actor_rank0"] == begin_ns - bases["actor_rank0"]


def test_an_archive_of_nothing_is_refused(tmp_path: Path) -> None:
    """The error names the folder, and no file is left behind."""
    with pytest.raises(TraceFormatError, match="holds no trace"):
        write_archive(StepInputs(directory=tmp_path))
    assert list(tmp_path.iterdir()) == []
