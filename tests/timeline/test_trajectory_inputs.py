"""The logs of trajectories of a step are found, read within limits, and what is wrong with one is said."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from drawn_logs import add_log
from step_folders import build_step

from verl_profiling.cli import main
from verl_profiling.report.check import check
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import merge
from verl_profiling.trajectory_log import LOG_SUFFIX, SpanRecord, TrajectoryLog, write_log

SPANS = [SpanRecord(i, -1, -1, "tool:x", i, i + 1, 7, -1, False, "", {}) for i in range(20_000)]


def log_of(rank: int, **what: object) -> TrajectoryLog:
    return TrajectoryLog(lane=f"agent_loop_rank{rank}", begin_ns=1, end_ns=9, **what)


def span(number: int, owner: int, parent: int, begin: int, end: int) -> SpanRecord:
    return SpanRecord(number, owner, parent, "tool:x", begin, end, 7, -1, False, "", {})


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


def test_logs_without_a_manifest_are_found_by_name(tmp_path: Path) -> None:
    """Beside traces, or alone; those of the same lane from two processes have lanes of their own."""
    hour = 3_600 * 10**9
    for place, begin in (("a", hour), ("b", hour + 5)):
        (tmp_path / place).mkdir()
        spans = [span(number, -1, -1, begin + number, begin + 9) for number in range(2)]
        log = TrajectoryLog(lane="agent_loop_rank3", begin_ns=begin, end_ns=begin + 9, spans=spans)
        write_log(tmp_path / place / "x.trajectories.jsonl.gz", log)
    (found,) = find_steps(tmp_path)
    assert [(log.lane, log.role, log.rank) for log in found.logs] == [
        ("agent_loop_rank3", "agent_loop", 3),
        ("agent_loop_rank3.2", "agent_loop", 3),
    ]
    assert not found.sources
    (alone,) = find_steps(tmp_path / "a" / "x.trajectories.jsonl.gz")
    result = merge(alone)
    assert result.events == 2
    assert result.path.name == "timeline.x.trajectories.json.gz"
    assert checked(tmp_path) == {f"{place}/x.trajectories.jsonl.gz": ("ok", "") for place in ("a", "b")}
