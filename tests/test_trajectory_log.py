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
    """Every kind of line, and the number of bytes."""
    path = tmp_path / "a.trajectories.jsonl.gz"
    assert write_log(path, LOG) == path.stat().st_size
    found = read_log(path)
    assert msgspec.structs.replace(found, problems=[]) == LOG
    assert found.problems[1] == "spans that were not recorded, because the log was full: 5"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_log_that_was_cut_gives_its_whole_lines(tmp_path: Path) -> None:
    """It is said to be cut, and ends at the last time found."""
    many = TrajectoryLog(
        lane="a",
        begin_ns=1,
        end_ns=10**6,
        spans=[SpanRecord(i, -1, -1, "s", i, i + 1, 0, -1, False, "", {}) for i in range(20_000)],
    )
    path = tmp_path / "a.trajectories.jsonl.gz"
    write_log(path, many)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = read_log(path)
    assert found.cut
    assert 1_000 < len(found.spans) < 20_000
    assert found.end_ns == found.spans[-1].end_ns


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


@pytest.mark.parametrize(
    "line", [b'["s",0]', b'["what",0]', b'["lag",0,99999999999999999999,1]', b'["lag",0,1,-5]']
)
def test_reading_ends_at_a_line_that_is_none(tmp_path: Path, line: bytes) -> None:
    """The log has the lines before it, and a sentence names the line."""
    found = read_log(written(tmp_path, b'["log",1,"lane",0]\n["lag",0,1,2]\n' + line + b"\n"))
    assert (found.damaged, found.cut, len(found.lags)) == (True, True, 1)
    assert found.problems[0].startswith("line 3: is not a log of trajectories")


def test_a_file_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    """Whatever its name says."""
    with pytest.raises(TraceFormatError, match="not a gzip file"):
        read_log(written(tmp_path, b"plain text\n", compressed=False))


def test_a_log_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """No half file, and the error of the system."""
    bad = TrajectoryLog(lane="a", begin_ns=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_log(tmp_path / "a.trajectories.jsonl.gz", bad)
    with pytest.raises(OSError, match="nowhere"):
        write_log(tmp_path / "nowhere" / "a.trajectories.jsonl.gz", LOG)
    assert list(tmp_path.iterdir()) == []
