"""Of many lanes those that differ from their peers are named, and no others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_steps import whole_step

from verl_profiling.report.model import Report
from verl_profiling.report.outliers import outliers


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A step in which all ranks do the same."""
    return whole_step(tmp_path_factory.mktemp("healthy"), ranks=16, replicas=4)


def test_nobody_stands_out_in_a_healthy_step(healthy: Report) -> None:
    """Small differences are none."""
    assert outliers(healthy) == {}


def test_a_slow_rank_stands_out(tmp_path: Path) -> None:
    """It works longer than the others, which wait for it in a collective."""
    found = outliers(whole_step(tmp_path, ranks=16, replicas=4, fault="slow rank"))
    assert list(found) == ["actor_rank10"]
    assert found["actor_rank10"] == "slowest in update_actor: 6.60 s, median 3.29 s"


def test_a_late_replica_stands_out(tmp_path: Path) -> None:
    """Its last request is done long after those of the others, as the finding says."""
    found = outliers(whole_step(tmp_path, ranks=2, replicas=4, fault="long tail"))
    assert found == {"rollout3_rank0": "last in the rollout: 8.95 s, median 4.03 s"}


def test_an_idle_lane_stands_out(healthy: Report) -> None:
    """Its busy share is far from the median of its role, on either side."""
    first, *others = healthy.workers
    idle = msgspec.structs.replace(first, busy_us=first.span_us * 0.01)
    found = outliers(msgspec.structs.replace(healthy, workers=[idle, *others]))
    assert list(found) == ["actor_rank0"]
    assert found["actor_rank0"].startswith("busy 1%, median ")
