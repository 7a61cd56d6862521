"""The picture's data: rows that do not collide, and tools where they started and stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path

from drawn_steps import Worker, report_of
from hypothesis import given, settings
from hypothesis import strategies as st


def test_stages_side_by_side_are_in_rows(tmp_path: Path) -> None:
    """A nested stage is in the row of the one around it, though the first row is free."""
    stages = [("rollout", 0, 4), ("update_actor", 3, 9), ("mini_batch", 5, 6, 1), ("reward", 9, 10)]
    report = report_of(tmp_path, stages, [])
    assert [(span.name, span.row, span.depth) for span in report.gantt] == [
        ("rollout", 0, 0),
        ("update_actor", 1, 0),
        ("mini_batch", 1, 1),
        ("reward", 0, 0),
    ]


def test_a_tool_is_shown_where_it_started_and_stopped(tmp_path: Path) -> None:
    """Inside of the step: in e2e mode a tool starts before it and stops after it."""
    tool = [("start", 1.0, 1.2, "update_actor"), ("stop", 9.5, 12.0, "update_actor"), ("stop", 20, 21, None)]
    worker = Worker("actor", stages=[("update_actor", 1.2, 9.5)], tool=tool, mode="discrete")
    report = report_of(tmp_path, [], [worker])
    assert [(span.lane, span.name, span.kind, span.begin_us, span.end_us) for span in report.gantt] == [
        ("actor_rank0", "update_actor", "stage", 1.2e6, 9.5e6),
        ("actor_rank0", "update_actor", "start", 1.0e6, 1.2e6),
        ("actor_rank0", "update_actor", "stop", 9.5e6, 10e6),
    ]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(0, 2)), min_size=1, max_size=12)
)
def test_spans_of_one_depth_in_one_row_follow_each_other(drawn: list[tuple[int, int, int]]) -> None:
    """However stages overlap, no bar lies on another."""
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(Path(folder), [("s", a, a + b, depth) for a, b, depth in drawn], [], end=50)
    assert len(report.gantt) == len(drawn)
    places: dict[tuple[int, int], float] = {}
    for span in sorted(report.gantt, key=lambda span: span.begin_us):
        assert places.get((span.row, span.depth), 0.0) <= span.begin_us
        places[span.row, span.depth] = span.end_us
