"""The logs of trajectories of a step are found, read within limits, and what is wrong with one is said."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from drawn_logs import add_log
from step_folders import build_step

from verl_profiling.errors import ConfigError
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.slim import select_ranks
from verl_profiling.timeline.trajectory_inputs import read_logs
from verl_profiling.trajectory_log import SpanRecord, TrajectoryLog

SPANS = [SpanRecord(i, -1, -1, "tool:x", i, i + 1, 7, -1, False, "", {}) for i in range(20_000)]


def log_of(rank: int, **what: object) -> TrajectoryLog:
    return TrajectoryLog(lane=f"agent_loop_rank{rank}", begin_ns=1, end_ns=9, **what)


def test_the_logs_of_a_step_come_by_lane_with_the_offset_of_their_clock(tmp_path: Path) -> None:
    """They are no traces, and a selection of ranks holds for both."""
    folder = build_step(tmp_path)
    for rank in (1, 0):
        add_log(folder, log_of(rank, spans=SPANS[:2]), rank=rank, clock_ns=5_000 * rank)
    (inputs,) = find_steps(folder)
    found = list(read_logs(inputs))
    assert [(one.source.lane, one.source.worker, one.source.offset_ns) for one in found] == [
        ("agent_loop_rank0", "agent_loop_rank0", 0),
        ("agent_loop_rank1", "agent_loop_rank1", 5_000),
    ]
    assert all(one.log and one.log.spans == SPANS[:2] and not one.problems for one in found)
    assert len(inputs.sources) == 3
    assert [log.rank for log in select_ranks(inputs, "1").logs] == [1]
    with pytest.raises(ConfigError, match="selects nothing"):
        select_ranks(inputs, "7")


def test_what_is_wrong_with_a_log_is_a_sentence(tmp_path: Path) -> None:
    """One that is missing, is none, was cut or was full; the others are read."""
    folder = build_step(tmp_path)
    missing, none, cut = (add_log(folder, log_of(rank, spans=SPANS), rank=rank) for rank in (0, 1, 2))
    add_log(folder, log_of(3, spans_left_out=1_500, trajectories_left_out=2), rank=3)
    missing.unlink()
    none.write_bytes(gzip.compress(b"[1]\n"))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (inputs,) = find_steps(folder)
    assert any("agent_loop_rank0.trajectories.jsonl.gz is missing" in absent for absent in inputs.absent)
    first, second, third = read_logs(inputs)
    assert first.log is None
    assert "agent_loop_rank1.trajectories.jsonl.gz: is not a log of trajectories" in first.problems[0]
    assert second.log is not None
    assert 0 < len(second.log.spans) < 20_000
    assert second.problems == ["agent_loop_rank2.trajectories.jsonl.gz: was cut before its end"]
    assert third.problems == [
        "agent_loop_rank3.trajectories.jsonl.gz: 2 trajectories were not recorded, because the log was full",
        "agent_loop_rank3.trajectories.jsonl.gz: 1,500 spans were not recorded, because the log was full",
    ]


def test_reading_ends_at_a_limit(tmp_path: Path) -> None:
    """With what was read before it, and the option that raises it."""
    folder = build_step(tmp_path)
    add_log(folder, log_of(0, spans=SPANS))
    (inputs,) = find_steps(folder)
    inputs.limits = Limits(events=5_000)
    (read,) = read_logs(inputs)
    assert read.limited
    assert read.log is not None
    assert len(read.log.spans) == 4_999  # and the header
    assert "--max-events raises it" in read.problems[0]
