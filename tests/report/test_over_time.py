"""The curves of the page are the exact means of what ran in each part of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_steps import STAGES, Worker, report_of

from verl_profiling.report.anatomy import PARTS


def test_each_replica_has_a_curve_of_its_requests(tmp_path: Path) -> None:
    """And its place in the timeline."""
    engines = [
        Worker("rollout", replica=0, requests=[(3, 4, 1)]),
        Worker("rollout", replica=1, requests=[(0, 2, 1), (1, 2.5, 1)]),
    ]
    report = report_of(tmp_path, STAGES, engines, end=float(PARTS))
    first, second = report.running
    assert report.timeline_begin_ns == 3_600 * 10**9
    assert (first.worker, second.worker) == ("rollout0", "rollout1")
    assert len(first.requests) == PARTS
    assert first.requests[:5] == [0, 0, 0, 1, 0]
    assert second.requests[:4] == [1, 2, 0.5, 0]


def test_a_rank_that_waits_in_a_collective_is_told_from_one_that_computes(tmp_path: Path) -> None:
    """Both are busy; the curve says which of it is communication alone."""
    kernels = [("gemm", 5.0, 6.0), ("ncclDevKernel_AllReduce", 5.5, 8.0)]
    step = report_of(tmp_path, STAGES, [Worker("actor", stages=[("update_actor", 5, 8)], kernels=kernels)])
    (row,) = step.workers
    part = PARTS // 10  # parts of a second
    assert row.load[5 * part : 8 * part] == [100] * 3 * part
    assert row.communication_load[5 * part : 6 * part] == [0] * part
    assert row.communication_load[6 * part : 8 * part] == [100] * 2 * part
    assert sum(row.communication_load) == pytest.approx(100 * 2 * part, abs=1)
