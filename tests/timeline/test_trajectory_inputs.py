"""The logs of trajectories of a step are found, read within limits, and what is wrong with one is said."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from drawn_logs import add_log
from step_folders import build_step

from verl_profiling.cli import main
from verl_profiling.report.check import check
from verl_profiling.trajectory_log import LOG_SUFFIX, SpanRecord, TrajectoryLog

SPANS = [SpanRecord(i, -1, -1, "tool:x", i, i + 1, 7, -1, False, "", {}) for i in range(20_000)]


def log_of(rank: int, **what: object) -> TrajectoryLog:
    return TrajectoryLog(lane=f"agent_loop_rank{rank}", begin_ns=1, end_ns=9, **what)


def checked(folder: Path) -> dict[str, tuple[str, str]]:
    found = check(folder).artifacts
    return {entry.path: (entry.status, entry.reason) for entry in found if entry.path.endswith(LOG_SUFFIX)}


def test_a_log_without_end_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may unpack to any size."""
    folder = build_step(tmp_path)
    add_log(folder, log_of(0, spans=SPANS[:50]))
    monkeypatch.setattr("verl_profiling.trajectory_log.MAX_BYTES", 1_000)
    assert main(["report", str(folder)]) == 1
    [(status, reason)] = checked(folder).values()
    assert (status, "more than 1,000 bytes" in reason) == ("unreadable", True)


def test_check_reads_logs_to_their_end(tmp_path: Path) -> None:
    """Whole, full, without a record, cut, of another kind or version, with a line of any length, missing."""
    folder = build_step(tmp_path)
    paths = [add_log(folder, log_of(rank, spans=SPANS[:9_000]), rank=rank) for rank in range(6)]
    add_log(folder, log_of(6, spans=SPANS[:3], spans_left_out=5), rank=6)
    paths += [add_log(folder, log_of(rank), rank=rank) for rank in (7, 8, 9, 10)]
    paths[7].write_bytes(gzip.compress(b'["log",99,"lane",0]\n'))
    paths[8].write_bytes(gzip.compress(b'["log",1,"' + b"x" * 2_000_000 + b'",0]\n'))
    paths[9].write_bytes(gzip.compress(b'["t",0,"g",0,1,2,"done",0,"",{}]\n'))
    paths[1].write_bytes(paths[1].read_bytes()[: paths[1].stat().st_size // 2])
    lines = gzip.decompress(paths[2].read_bytes()).splitlines(keepends=True)
    paths[2].write_bytes(gzip.compress(b"".join([*lines[:5], b"[]\n", *lines[5:]])))
    paths[3].write_bytes(b"plain")
    paths[4].unlink()
    paths[5].write_bytes(b"")
    found = checked(folder)
    statuses = {
        int(path.split(".")[0][len("agent_loop_rank") :]): status for path, (status, _) in found.items()
    }
    assert statuses == {
        0: "ok",
        1: "truncated",
        2: "unreadable",
        3: "unreadable",
        4: "missing",
        5: "empty",
        6: "ok",
        7: "empty",
        **dict.fromkeys((8, 9, 10), "unreadable"),
    }
    reasons = {path: reason for path, (_, reason) in found.items()}
    assert reasons[paths[0].name] == ""
    assert "line 6: is not a log" in reasons[paths[2].name]
    assert "spans that were not recorded" in reasons["agent_loop_rank6.trajectories.jsonl.gz"]
    for path, problem in zip(paths[7:], ("version 99", "a line of over", "with a header"), strict=True):
        assert problem in reasons[path.name]
