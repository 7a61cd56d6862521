"""What trajectories share is in the picture: tools, reward processes, limits and engines, each with
what runs and what waits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_logs import DrawnLog
from drawn_steps import whole_step

from verl_profiling.analysis import open_step
from verl_profiling.numbers.report_columns import ServiceRow
from verl_profiling.report.model import Report
from verl_profiling.report.picture import picture

SLOTS = 2


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Six trajectories that wait for a tool with two slots, which takes half a second; then a
    process scores each for a tenth of a second, one after the other.
    """
    folder = tmp_path / "step_000001"
    whole_step(folder, ranks=1, replicas=1)
    log = DrawnLog(end=13)
    scorer = DrawnLog(1, end=13)
    for number in range(6):
        free = 0.5 * (number // SLOTS)
        spans = (("wait:search", 0, free), ("tool:search", free, free + 0.5))
        log.trajectory(0, 3, *spans, ("reward", 1.5, 2.1))
        scorer.span("reward", 1.5 + number / 10, 1.6 + number / 10)
    log.add_to(folder)
    scorer.add_to(folder)
    return open_step(folder).report()


def at(row: ServiceRow, report: Report, second: float) -> tuple[float, float]:
    """Return what runs and what waits in the part of the step in which an instant is."""
    part = int(second * 1e6 / report.span_us * len(row.running))
    return row.running[part], row.waiting[part]


def test_a_limit_has_its_slots_and_what_waits_for_them(report: Report) -> None:
    [limit] = [row for row in report.services if row.slots]
    assert (limit.name, limit.slots) == ("search", SLOTS)
    assert at(limit, report, 0.25) == (2, 4)
    assert at(limit, report, 0.75) == (2, 2)
    assert at(limit, report, 1.25) == (2, 0)


def test_calls_wait_while_the_process_that_serves_them_runs_others(report: Report) -> None:
    """Six trajectories are in a span that one process has one after the other."""
    [reward] = [row for row in report.services if row.name == "reward"]
    assert at(reward, report, 1.75) == pytest.approx((1, 5), abs=0.1)


def test_the_waits_of_a_tool_without_a_limit_are_unknown(report: Report) -> None:
    """They are not zero."""
    [tool] = [row for row in report.services if row.name == "tool:search"]
    assert max(tool.running) == 2
    assert tool.waiting == []


def test_the_picture_has_a_row_for_each(report: Report) -> None:
    """Replicas have theirs below their lanes."""
    drawn = picture(report)
    [services] = [group for group in drawn["groups"] if group["role"] == "services"]
    assert [lane["name"] for lane in services["lanes"]] == ["search", "reward", "tool:search"]
    assert services["lanes"][0]["queue"]["slots"] == SLOTS
    assert set(drawn["running"]) == {"rollout0"}
