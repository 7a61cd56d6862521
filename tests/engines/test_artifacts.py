"""A file that an engine wrote is looked at before it becomes an artifact."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from verl_profiling.manifest import Artifact
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool


def finished(raw: Path, folder: Path) -> Artifact:
    folder.mkdir()
    expected = Artifact(
        path="rollout0_rank0.torch.json.gz", lane="rollout0_rank0", tool="torch", status="missing"
    )
    output = TorchTool(TorchOptions()).engine_output(raw, folder / expected.path, expected, "cpu")
    assert not raw.exists()
    assert output.artifact.status == "pending"
    return output.finish()


def kineto(events: int, *, spans: bool = True) -> bytes:
    phase = "X" if spans else "i"
    return json.dumps(
        {"traceEvents": [{"ph": phase, "name": f"op {n}", "ts": n} for n in range(events)]}
    ).encode()


@pytest.mark.parametrize("compressed", [True, False], ids=["by the engine", "by us"])
def test_events_that_lie_across_pieces_count_once(compressed: bool, tmp_path: Path) -> None:
    """Whoever compresses it: a trace is read in pieces of 4 MiB,
    and here one ends inside a ``"ph"``.
    """
    before, after = b'{"traceEvents": [{"ph": "X", "name": "', b'"}, {'
    name = b"a" * ((4 << 20) - len(before) - len(after) - 3)
    data = before + name + after + b'"ph": "X"}]}'
    raw = tmp_path / ("raw.json.gz" if compressed else "raw.json")
    raw.write_bytes(gzip.compress(data, 1) if compressed else data)
    artifact = finished(raw, tmp_path / "step")
    assert (artifact.status, artifact.events) == ("ok", 2)


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (gzip.compress(kineto(100_000), 1)[:-2000], "truncated", "did not write the end"),
        (kineto(100), "truncated", "did not write the end"),
        (gzip.compress(kineto(100, spans=False)), "empty", "holds no spans"),
    ],
    ids=["cut while compressing", "not compressed", "no spans"],
)
def test_damage_is_named(content: bytes, status: str, reason: str, tmp_path: Path) -> None:
    raw = tmp_path / "raw.json.gz"
    raw.write_bytes(content)
    artifact = finished(raw, tmp_path / "step")
    assert artifact.status == status
    assert reason in artifact.reason
