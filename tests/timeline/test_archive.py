"""The archive holds the traces byte for byte, and a manifest by Perfetto's documented rules."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest
from step_folders import WORKERS, build_step, recordings

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.archive import write_archive
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.step_inputs import StepInputs

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
    """Nothing is parsed, so nothing can change; what was compressed is unpacked."""
    folder = build_step(tmp_path)
    files, _ = archive(folder)
    for lane in WORKERS:
        content = gzip.decompress((folder / f"{lane}.torch.json.gz").read_bytes())
        assert files[f"{lane}/{lane}.torch.json"] == content


def test_the_manifest_follows_the_documented_format(tmp_path: Path) -> None:
    """https://perfetto.dev/docs/reference/perfetto-manifest, with what it says is an error."""
    files, content = archive(build_step(tmp_path))
    assert files["perfetto_manifest.json"].split()[1].startswith(b'"perfetto_manifest"'), "how it is detected"
    assert content.keys() == {"perfetto_manifest"}
    manifest = content["perfetto_manifest"]
    assert manifest.keys() == {"version", "files"}
    assert manifest["version"] == 1
    paths = [entry["path"] for entry in manifest["files"]]
    assert sorted(paths) == sorted(files.keys() - {"perfetto_manifest.json"})
    for entry in manifest["files"]:
        assert entry.keys() <= {"path", "machine", "clocks"}
        assert entry["machine"].keys() == {"name"}
        assert entry["machine"]["name"]
        assert files[entry["path"]].lstrip()[:1] in (b"{", b"["), "no override on a file that is an archive"
    related = [entry["clocks"] for entry in manifest["files"] if "clocks" in entry]
    assert len(related) == len(paths) - 1, "one file is the reference"
    for clocks in related:
        assert clocks.keys() == {"sync_to", "offset_ns"}
        assert clocks["sync_to"].keys() == {"file"}
        assert clocks["sync_to"]["file"] in paths
        assert 0 <= clocks["offset_ns"] < 2**63, "nothing is moved before the begin of the timeline"


def test_offsets_put_all_files_on_one_clock(tmp_path: Path) -> None:
    """A host whose clock is ahead is shifted back, so equal instants are equal on the timeline."""
    folder = build_step(tmp_path, rank1_clock_ns=CLOCK_NS)
    _, content = archive(folder)
    entries = content["perfetto_manifest"]["files"]
    offsets = {e["machine"]["name"]: e.get("clocks", {"offset_ns": 0})["offset_ns"] for e in entries}
    (reference,) = {e["clocks"]["sync_to"]["file"] for e in entries if "clocks" in e}
    assert offsets[reference.partition("/")[0]] == 0
    bases = {lane: json.loads(recordings()[lane].trace)["baseTimeNanoseconds"] for lane in WORKERS}
    assert offsets["actor_rank1"] - offsets["actor_rank0"] == bases["actor_rank1"] - bases["actor_rank0"]
    assert offsets["rollout0_rank0"] - offsets["actor_rank0"] == (
        bases["rollout0_rank0"] - bases["actor_rank0"]
    )


def test_a_truncated_trace_is_packed_as_far_as_it_goes(tmp_path: Path) -> None:
    """The archive stays readable, and the damage is said."""
    folder = build_step(tmp_path)
    damaged = folder / "actor_rank0.torch.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:-500])
    (inputs,) = find_steps(folder)
    path, problems = write_archive(inputs)
    assert problems == ["actor_rank0.torch.json.gz: the gzip stream is cut off"]
    with tarfile.open(path) as tar:
        sizes = {member.name: member.size for member in tar.getmembers()}
    assert len(sizes) == len(WORKERS) + 1
    assert sizes["actor_rank0/actor_rank0.torch.json"] > 1000


def test_an_archive_of_nothing_is_refused(tmp_path: Path) -> None:
    """The error names the folder, and no file is left behind."""
    with pytest.raises(TraceFormatError, match="holds no trace"):
        write_archive(StepInputs(directory=tmp_path))
    assert list(tmp_path.iterdir()) == []
