"""The file of trajectories: what was written is read again, whatever became of the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from verl_profiling.errors import TraceFormatError
from verl_profiling.trajectory_log import (
    Block,
    Lag,
    LoopRecord,
    SpanRecord,
    StatusChange,
    TrajectoryLog,
    TrajectoryRecord,
    read_log,
    write_log,
)

LOG = TrajectoryLog(
    lane="agent_loop_rank0",
    begin_ns=1_000,
    end_ns=9_000,
    loops=[LoopRecord(0, 77, "AsyncIO")],
    trajectories=[TrajectoryRecord(0, "g1", 3, 1_500, 8_000, "done", 0, "", {"turns": 2, "validate": False})],
    spans=[SpanRecord(0, 0, -1, "tool:search", 2_000, 3_000, 77, 0, True, "", {"query": "x"})],
    lags=[Lag(0, 2_500, 400)],
    blocks=[Block(0, 2_100, 2_500, 0, "Task-1", "tools.search (tools.py:3)")],
    statuses=[StatusChange("g1", None, "filtered", 8_500)],
    spans_left_out=5,
    trajectories_left_out=1,
)


def written(folder: Path, content: bytes, *, compressed: bool = True) -> Path:
    path = folder / "a.trajectories.jsonl.gz"
    path.write_bytes(gzip.compress(content) if compressed else content)
    return path


def test_a_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.trajectories.jsonl.gz"
    assert write_log(path, LOG) == path.stat().st_size
    found = read_log(path)
    assert msgspec.structs.replace(found, problems=[]) == LOG
    assert found.problems[1] == "spans that were not recorded, because the log was full: 5"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"{}\n", "is not a log"),
        (b'["t",0,"g",0,1,2,"done",0,"",{}]\n', "does not begin with a header"),
        (b'["log",99,"lane",0]\n', "version 99"),
        (b'["log",1,"\xff",0]\n', "is not a log"),
        (b'["log",1,"' + b"x" * 2_000_000 + b'",0]\n', "a line of over"),
    ],
)
def test_what_is_no_log_is_refused_by_name(tmp_path: Path, content: bytes, problem: str) -> None:
    """The error names the file and what is wrong with it."""
    path = written(tmp_path, content)
    with pytest.raises(TraceFormatError, match=problem) as error:
        read_log(path)
    assert error.value.path == str(path)
