"""The anatomy adds up to the step, whatever runs side by side, and starts and stops of tools are no stage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from drawn_steps import Worker, report_of
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.report.anatomy import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.report.model import Report


def durations(report: Report) -> dict[str, float]:
    return {row.name: round(row.duration_us / 1e6, 9) for row in report.stages}


def shares(report: Report) -> dict[str, float]:
    """Return the share of the step of each row."""
    return {row.name: round(row.share, 9) for row in report.stages}


def test_a_tools_start_and_stop_are_not_the_stage(tmp_path: Path) -> None:
    """A stage of 140 ms that takes 525 with its tool is one of 140."""
    tool = [("start", 1.0, 1.2, "update_actor"), ("stop", 1.34, 1.525, "update_actor")]
    stages = [("update_actor", 1.2, 1.34)]
    workers = [Worker("actor", rank, stages=stages, tool=tool, mode="discrete") for rank in range(2)]
    report = report_of(tmp_path, [("update_actor", 1.0, 1.525), ("reward", 2, 3)], workers)
    assert durations(report) == {
        "update_actor": 0.14,
        "reward": 1.0,
        CAPTURE_CALLS: 0.385,
        OUTSIDE_STAGES: 8.475,
    }
    engine = Worker("rollout", replica=0, tool=[("stop", 4, 6, "rollout")], mode="discrete")
    report = report_of(tmp_path, [("rollout", 0, 4.5), ("update_actor", 4, 8)], [engine])
    assert durations(report) == {
        "rollout": 4.0,
        "update_actor": 3.5,
        CAPTURE_CALLS: 0.5,
        OUTSIDE_STAGES: 2.0,
    }


def test_stages_side_by_side_share_their_time(tmp_path: Path) -> None:
    """Half of a second belongs to each of two; a nested stage is in the row of the one around it."""
    stages = [("rollout", 0, 6), ("update_actor", 4, 9), ("mini_batch", 5, 6, 1)]
    report = report_of(tmp_path, stages, [])
    assert durations(report) == {"rollout": 6.0, "update_actor": 5.0, "mini_batch": 1.0, OUTSIDE_STAGES: 1.0}
    assert shares(report) == {"rollout": 0.5, "update_actor": 0.4, "mini_batch": 0.1, OUTSIDE_STAGES: 0.1}
    stages = [("rollout", 0, 4), ("update_actor", 3, 9), ("mini_batch", 5, 6, 1), ("reward", 9, 10)]
    report = report_of(tmp_path, stages, [])
    assert [(span.name, span.row, span.depth) for span in report.gantt] == [
        ("rollout", 0, 0),
        ("update_actor", 1, 0),
        ("mini_batch", 1, 1),
        ("reward", 0, 0),
    ]


SPANS = st.tuples(st.sampled_from("abcd"), st.integers(-2, 12), st.integers(0, 6), st.sampled_from((0, 0, 1)))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(SPANS, min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 4), st.sampled_from("abx")), max_size=4),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 4)), max_size=3),
)
def test_outermost_rows_add_up_to_the_step(
    stages: list[tuple[str, int, int, int]],
    tool: list[tuple[int, int, str]],
    calls: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker("actor", tool=[("stop", a, a + b, stage) for a, b, stage in tool], mode="discrete")
        report = report_of(
            Path(folder),
            [(name, a, a + b, depth) for name, a, b, depth in stages],
            [worker],
            calls=[("stop_capture", a, a + b) for a, b in calls],
        )
    assert sum(row.share for row in report.stages if row.depth == 0) == pytest.approx(1.0)
    assert all(0 <= row.share * report.span_us <= row.duration_us + 1e-3 for row in report.stages)


def test_a_stage_of_the_worker_alone_counts_where_it_must_be_waited_for(tmp_path: Path) -> None:
    actor = Worker(
        "actor", tool=[("start", 0, 1, "compute_ref"), ("stop", 6, 7, "compute_ref")], mode="discrete"
    )
    report = report_of(tmp_path, [("ref_log_prob", 0, 4), ("update_actor", 5, 8), ("rollout", 5, 9)], [actor])
    assert durations(report)["ref_log_prob"] == 3.0
    assert durations(report)[CAPTURE_CALLS] == 1.0
