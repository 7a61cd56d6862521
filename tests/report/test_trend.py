"""Which of the captured steps differs from those before it, and in what."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_steps import whole_step

from verl_profiling.report.model import Report
from verl_profiling.report.trend import excess, first_change, slowest, stage_seconds


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A step in which nothing is wrong."""
    return whole_step(tmp_path_factory.mktemp("healthy"), ranks=2, replicas=2)


def with_times(report: Report, **seconds: float) -> Report:
    """Return the report with other times for some stages."""
    rows = [
        msgspec.structs.replace(row, duration_us=seconds.get(row.name, row.duration_us / 1e6) * 1e6)
        for row in report.stages
    ]
    span_us = sum(row.duration_us for row in rows if row.depth == 0)
    return msgspec.structs.replace(report, stages=rows, span_us=span_us)


def with_lost(report: Report, **seconds: float) -> Report:
    """Return the report with other lost times for some causes."""
    rows = [msgspec.structs.replace(row, seconds=seconds.get(row.cause, row.seconds)) for row in report.lost]
    return msgspec.structs.replace(report, lost=rows)


def test_equal_steps_have_no_change(healthy: Report) -> None:
    """Nor have those that stay in their range, or leave it by little."""
    assert first_change([healthy]) is None
    assert first_change([healthy] * 5) is None
    around = [with_times(healthy, rollout=took) for took in (4.0, 6.0, 5.9, 4.1, 6.9, 3.1)]
    assert first_change(around) is None  # 2 s apart, so 1 s more on either side says nothing
    change = first_change([*around, with_times(healthy, rollout=11.0)])
    assert change is not None
    assert change.index == 6


def test_the_first_step_that_differs_is_named_with_its_largest_stage(healthy: Report) -> None:
    """What came later, or changed less, is not it; shorter is a change too."""
    slow = with_times(healthy, rollout=9.0, reward=1.2)
    change = first_change([healthy, healthy, slow, with_times(healthy, update_actor=99.0)])
    assert change is not None
    assert (change.index, change.kind, change.name) == (2, "stage", "rollout")
    assert (change.seconds, change.before, change.steps_before) == (9.0, pytest.approx(4.4), 2)
    faster = first_change([slow, slow, healthy])
    assert faster is not None
    assert (faster.name, faster.seconds) == ("rollout", pytest.approx(4.4))


def test_lost_time_counts_where_no_stage_changed(healthy: Report) -> None:
    """A share of the time of all lanes."""
    change = first_change([healthy, healthy, with_lost(healthy, waiting_for_rollout=30.0)])
    assert change is not None
    assert (change.kind, change.name, change.seconds) == ("cause", "waiting_for_rollout", 30.0)


def test_the_slowest_step_and_what_made_it_slow(tmp_path: Path, healthy: Report) -> None:
    """The stage with the most time over its median."""
    late = whole_step(tmp_path, ranks=2, replicas=2, fault="long tail")
    reports = [healthy, late, healthy, healthy]
    assert slowest([report.span_us for report in reports]) == 1
    assert excess([stage_seconds(report) for report in reports], 1) == ("rollout", pytest.approx(4.8))
    assert excess([stage_seconds(healthy)] * 2, 0) is None
    assert excess([{}], 0) is None
