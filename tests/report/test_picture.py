"""The data of the picture: every lane and stage of the report, by role,
in rows that do not overlap.
"""

from __future__ import annotations

import re
from importlib import resources
from itertools import zip_longest
from pathlib import Path

import pytest
from drawn_steps import STAGES, Worker, report_of, whole_step

from verl_profiling.numbers.idle_causes import CAUSES
from verl_profiling.numbers.report_columns import OTHER_RANKS
from verl_profiling.numbers.stage_rows import PARTS
from verl_profiling.report.colours import stage_class
from verl_profiling.report.picture import picture


def test_a_late_replica_stands_out(tmp_path: Path) -> None:
    """Its last request is done long after the others'."""
    late = whole_step(tmp_path, ranks=16, replicas=4, fault="long tail")
    groups = picture(late)["groups"]
    assert [(g["role"], len(g["lanes"])) for g in groups] == [
        ("critical path", 1),
        ("controller", 1),
        ("actor", 16),
        ("rollout", 4),
    ]
    lanes = [lane for group in groups for lane in group["lanes"] if lane["stands_out"]]
    assert [lane["name"] for lane in lanes] == ["rollout3_rank0"]
    assert lanes[0]["stands_out"] == "last in the rollout"


def test_a_role_shows_from_when_to_when_all_lanes_were_in_a_stage(tmp_path: Path) -> None:
    """The first and the last begin and end of each run."""
    workers = [
        Worker(
            "actor", rank, stages=[("update_actor", 5 + rank / 10, 7 + rank)], kernels=[("k", 5, 6)]
        )
        for rank in range(2)
    ]
    (envelope,) = picture(report_of(tmp_path, STAGES, workers))["groups"][2]["envelope"]
    edges = [envelope[key] / 1e6 for key in ("begin", "all_in", "first_out", "end")]
    assert edges == pytest.approx([5, 5.1, 7, 8])
    assert envelope["lanes"] == 2


def test_lanes_are_marked_where_they_are_on_the_critical_path(tmp_path: Path) -> None:
    """The path is a lane of its own, in the colours of the outermost stages."""
    workers = [
        Worker("actor", rank, stages=[("update_actor", 5, end)], kernels=[("k", 5, 6)])
        for rank, end in enumerate((7, 8))
    ]
    drawn = picture(report_of(tmp_path, STAGES, workers))
    path, _, actors = drawn["groups"]
    said = {
        span["said"]: drawn["stages"][span["stage"]]["name"] for span in path["lanes"][0]["spans"]
    }
    assert said["actor_rank1: work"] == "update_actor"
    assert [lane["critical"] for lane in actors["lanes"]] == [[], [{"begin": 5e6, "end": 8e6}]]
    assert actors["critical"] == [{"begin": 5e6, "end": 8e6}]


def test_each_replica_has_a_curve_of_its_requests(tmp_path: Path) -> None:
    """And its place in the timeline."""
    engines = [
        Worker("rollout", replica=0, requests=[(3, 4, 1)]),
        Worker("rollout", replica=1, requests=[(0, 2, 1), (1, 2.5, 1)]),
    ]
    report = report_of(tmp_path, STAGES, engines, end=float(PARTS))
    first, second = report.services
    assert report.timeline_begin_ns == 3_600 * 10**9
    assert (first.name, second.name) == ("rollout0", "rollout1")
    assert len(first.running) == PARTS
    unfinished = [
        [round(sum(both), 1) for both in zip_longest(row.running, row.waiting, fillvalue=0)]
        for row in (first, second)
    ]
    assert unfinished[0][:5] == [0, 0, 0, 1, 0]
    assert unfinished[1][:4] == [1, 2, 0.5, 0]


def test_a_rank_that_waits_in_a_collective_is_told_from_one_that_computes(tmp_path: Path) -> None:
    """Both are busy; the curve says which of it is communication alone."""
    kernels = [("gemm", 5.0, 6.0), ("ncclDevKernel_AllReduce", 5.5, 8.0)]
    step = report_of(
        tmp_path, STAGES, [Worker("actor", stages=[("update_actor", 5, 8)], kernels=kernels)]
    )
    (row,) = step.workers
    part = PARTS // 10  # parts of a second
    assert row.load[5 * part : 8 * part] == [100] * 3 * part
    assert row.communication_load[5 * part : 6 * part] == [0] * part
    assert row.communication_load[6 * part : 8 * part] == [100] * 2 * part
    assert sum(row.communication_load) == pytest.approx(100 * 2 * part, abs=1)


STYLE = (resources.files("verl_profiling.report") / "page" / "page.css").read_text(encoding="utf-8")


def test_stages_lost_time_and_load_share_no_colour() -> None:
    """A known stage has a colour of its own; all other names share six."""
    light = dict(re.findall(r"--([\w-]+): (#\w{6})", STYLE.partition("}")[0]))
    light |= dict(re.findall(r"\.(s\d+|k-\w+) \{ --key: (#\w{6})", STYLE))
    causes = [f"k-{cause}" for cause in (*CAUSES, OTHER_RANKS)]
    drawn = [
        light[name] for name in (*(f"s{i}" for i in range(16)), *causes, "compute", "communication")
    ]
    assert len(set(drawn)) == len(drawn)
    known = [stage_class(name) for name in ("rollout", "reward", "update_actor", "validate")]
    assert known == ["s0", "s1", "s7", "s9"]
    assert {stage_class(f"mine {i}") for i in range(100)} == {f"s{i}" for i in range(10, 16)}
