"""The picture of a step with agents: a row per trajectory, or per group of many."""

from __future__ import annotations

import tarfile
from itertools import pairwise
from pathlib import Path

import pytest

from verl_profiling.analysis import open_step
from verl_profiling.numbers import capture_rows
from verl_profiling.numbers.report_columns import GanttSpan
from verl_profiling.report.picture import picture

DEMOS = Path(__file__).parents[1] / "data" / "demo_steps.tar.gz"


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """A recorded step of the recipe of an agent, of 32 trajectories in eight groups."""
    with tarfile.open(DEMOS) as steps:
        steps.extractall(tmp_path, filter="data")
    return tmp_path / "agent"


def test_each_trajectory_has_a_row_that_adds_up(agent: Path) -> None:
    """Its causes, without overlap; their sums are those of the table."""
    report = open_step(agent).report()
    lanes: dict[str, list[GanttSpan]] = {}
    seconds: dict[str, float] = {}
    for span in sorted(report.trajectory_gantt, key=lambda span: span.begin_us):
        lanes.setdefault(span.lane, []).append(span)
        seconds[span.name] = seconds.get(span.name, 0.0) + (span.end_us - span.begin_us) / 1e6
    assert report.rollout is not None
    assert len(lanes) == report.rollout.trajectories == 32
    for spans in lanes.values():
        for before, after in pairwise(spans):
            assert before.end_us <= after.begin_us + 1e-3
    causes = {row.cause: row.seconds for row in report.rollout.causes}
    assert {name: seconds[name] for name in causes} == pytest.approx(causes, rel=1e-3, abs=1e-3)
    [group] = [each for each in picture(report)["groups"] if each["role"] == "trajectories"]
    assert len(group["lanes"]) == 32


def test_of_many_each_group_has_the_row_of_its_last(
    agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_rows, "MOST_ROWS", 8)
    report = open_step(agent).report()
    ends: dict[str, float] = {}
    for span in report.trajectory_gantt:
        ends[span.lane] = max(ends.get(span.lane, 0.0), span.end_us)
    assert len({name.split("/")[0] for name in ends}) == len(ends) == 8
    assert all(name.endswith(", last of its group") for name in ends)
    assert max(ends.values()) == pytest.approx(4.79e6, rel=0.01)
