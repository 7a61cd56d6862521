"""The data of the picture: every lane and stage of the report, by role, in rows that do not overlap."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_steps import STAGES, Worker, report_of, whole_step

from verl_profiling.report.html import picture
from verl_profiling.report.model import GanttSpan, Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A step of twelve ranks, of which one is slow, and two replicas."""
    return whole_step(tmp_path_factory.mktemp("step"), ranks=12, replicas=2, fault="slow rank")


def test_lanes_are_grouped_by_role_the_controller_first(report: Report) -> None:
    """With their number and the mean of their lanes, and nobody left out."""
    groups = {group["role"]: group for group in picture(report)["groups"]}
    assert {role: len(group["lanes"]) for role, group in groups.items()} == {
        "controller": 1,
        "actor": 12,
        "rollout": 2,
    }
    (lane,) = (lane for lane in groups["actor"]["lanes"] if lane["stands_out"])
    assert lane["name"] == "actor_rank7"
    assert lane["stands_out"] == "slower than the others"
    actor = picture(report)["groups"][1]
    loads = [lane["load"] for lane in actor["lanes"]]
    assert actor["load"][100] == pytest.approx(sum(load[100] for load in loads) / 12, abs=0.05)
    assert len(actor["load"]) == len(actor["communication"]) == len(loads[0])


def test_a_late_replica_stands_out(tmp_path: Path) -> None:
    """Its last request is done long after the others'."""
    late = whole_step(tmp_path, ranks=16, replicas=4, fault="long tail")
    lanes = [lane for group in picture(late)["groups"] for lane in group["lanes"] if lane["stands_out"]]
    assert [lane["name"] for lane in lanes] == ["rollout3_rank0"]
    assert lanes[0]["stands_out"] == "last in the rollout"


def test_a_role_shows_from_when_to_when_all_lanes_were_in_a_stage(tmp_path: Path) -> None:
    """The first and the last begin and end of each run."""
    workers = [
        Worker("actor", rank, stages=[("update_actor", 5 + rank / 10, 7 + rank)], kernels=[("k", 5, 6)])
        for rank in range(2)
    ]
    (envelope,) = picture(report_of(tmp_path, STAGES, workers))["groups"][1]["envelope"]
    edges = [envelope[key] / 1e6 for key in ("begin", "all_in", "first_out", "end")]
    assert edges == pytest.approx([5, 5.1, 7, 8])
    assert envelope["lanes"] == 2


def span(name: str, begin: float, end: float, depth: int = 0, lane: str = "controller") -> GanttSpan:
    return GanttSpan(lane=lane, name=name, begin_us=begin, end_us=end, depth=depth)


def test_starts_and_stops_of_a_tool_are_no_stages(report: Report) -> None:
    """They are in the lane and the row of their worker, under a name and a colour of their own."""
    spans = [
        span("update_actor", 5, 15),
        msgspec.structs.replace(span("update_actor", 3, 5), kind="start", row=1),
    ]
    found = picture(msgspec.structs.replace(report, gantt=spans, workers=[]))
    assert found["stages"] == [
        {"name": "update_actor", "colour": "s7"},
        {"name": "(tool starts)", "colour": "tool"},
    ]
    (controller,) = found["groups"]
    assert [(one["stage"], one["row"]) for one in controller["lanes"][0]["spans"]] == [(0, 0), (1, 1)]
