"""The curves of the page are the exact means of what ran in each part of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_steps import STAGES, Worker, report_of
from step_folders import build_step, with_facts

from verl_profiling.analysis import open_step
from verl_profiling.report.over_time import PARTS, requests_running
from verl_profiling.report.rows import RequestRow

SECOND = 1_000_000_000


def request(begin_s: float, end_s: float, replica: int = 0, **engine: float) -> RequestRow:
    """Return a request of a replica."""
    return RequestRow(
        worker=f"rollout{replica}",
        replica=replica,
        begin_us=begin_s * 1e6,
        first_token_us=None,
        end_us=end_s * 1e6,
        latency_us=(end_s - begin_s) * 1e6,
        prompt_tokens=1,
        response_tokens=1,
        policy_version=None,
        failed=False,
        **engine,  # type: ignore[arg-type]
    )


def test_each_replica_has_a_curve_of_its_requests() -> None:
    """Two requests at once are 2, half a part of one is 0.5; replicas come in order."""
    rows = requests_running(
        [request(0, 2, replica=1), request(1, 2.5, replica=1), request(3, 4)], PARTS * 1e6
    )
    assert [row.worker for row in rows] == ["rollout0", "rollout1"]
    assert rows[0].requests[:5] == [0, 0, 0, 1, 0]
    assert rows[1].requests[:4] == [1, 2, 0.5, 0]
    assert {len(row.requests) for row in rows} == {PARTS}


def test_the_queue_is_told_from_what_the_engine_has_scheduled() -> None:
    """From the engine getting a request, or else from its begin; unknown where no request tells."""
    known = {"arrival_us": 1e6, "scheduled_us": 3e6}
    backwards = {"arrival_us": 2e6, "scheduled_us": 1e6}
    rows = requests_running(
        [
            request(0, 5, **known),
            request(2, 6, scheduled_us=2.5e6),
            request(2, 6, **backwards),
            request(3, 4),
            request(0, 5, replica=1),
        ],
        PARTS * 1e6,
    )
    assert rows[0].queued[:5] == [0, 1, 1.5, 0, 0]
    assert rows[0].requests[:5] == [1, 1, 3, 4, 3]
    assert rows[1].queued == []


def test_a_rank_that_waits_in_a_collective_is_told_from_one_that_computes(tmp_path: Path) -> None:
    """Both are busy; the curve and the stage say which of it is communication alone."""
    kernels = [("gemm", 5.0, 6.0), ("ncclDevKernel_AllReduce", 5.5, 8.0)]
    step = report_of(tmp_path, STAGES, [Worker("actor", stages=[("update_actor", 5, 8)], kernels=kernels)])
    (row,) = step.workers
    part = PARTS // 10  # parts of a second
    assert row.load[5 * part : 8 * part] == [100] * 3 * part
    assert row.communication_load[5 * part : 6 * part] == [0] * part
    assert row.communication_load[6 * part : 8 * part] == [100] * 2 * part
    assert sum(row.communication_load) == pytest.approx(100 * 2 * part, abs=1)
    spans = {(span.lane, span.name): span for span in step.gantt}
    own = spans["actor_rank0", "update_actor"]
    assert (own.busy_us, own.communication_us) == (3e6, 2e6)
    assert spans["controller", "update_actor"].busy_us is None


def test_a_step_has_its_curves_and_its_place_in_the_timeline(tmp_path: Path) -> None:
    """The requests of the engine, and nanoseconds from the timeline's first to the step's begin."""
    report = open_step(with_facts(build_step(tmp_path))).report()
    (row,) = report.running
    assert row.worker == "rollout0"
    assert sum(row.requests) / PARTS * report.span_us == pytest.approx(300, rel=0.05)
    assert report.timeline_begin_ns is not None
    assert 3_600 * SECOND <= report.timeline_begin_ns < 3_601 * SECOND
