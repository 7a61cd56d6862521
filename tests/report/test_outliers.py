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


def test_the_last_at_a_collective_stands_out(tmp_path: Path) -> None:
    """Where stages say nothing, as in plain traces."""
    report = whole_step(tmp_path, ranks=16, replicas=4, fault="slow rank")
    found = outliers(msgspec.structs.replace(report, stragglers=[]))
    assert found["actor_rank10"] == "last at 100% of 6 ncclDevKernel_AllReduce_Sum_f32"


def test_a_late_replica_stands_out(tmp_path: Path) -> None:
    """Its last request is done long after those of the others, as the finding says."""
    found = outliers(whole_step(tmp_path, ranks=2, replicas=4, fault="long tail"))
    assert found == {"rollout3_rank0": "last in the rollout: 8.95 s, median 4.03 s"}


def test_of_two_ranks_the_other_one_is_named(healthy: Report) -> None:
    """Their median is nobody's time."""
    row = msgspec.structs.replace(
        healthy.stragglers[0],
        stage="update_actor",
        slowest="actor_rank1",
        workers=2,
        slowest_us=3e6,
        median_us=2e6,
    )
    found = outliers(msgspec.structs.replace(healthy, stragglers=[row]))
    assert found == {"actor_rank1": "slowest in update_actor: 3.00 s, the other one 1.00 s"}


@pytest.mark.parametrize(
    ("slowest_s", "median_s"), [(1.25, 1.0), (4.5, 4.0)], ids=["little of the step", "little of itself"]
)
def test_a_little_slower_is_not_standing_out(healthy: Report, slowest_s: float, median_s: float) -> None:
    """A fifth longer than its peers, and by 3 % of the step, which takes nine seconds: both must hold."""
    row = msgspec.structs.replace(
        healthy.stragglers[0],
        stage="update_actor",
        slowest="rollout1",
        slowest_us=slowest_s * 1e6,
        median_us=median_s * 1e6,
    )
    assert outliers(msgspec.structs.replace(healthy, stragglers=[row])) == {}


def test_an_idle_lane_stands_out(healthy: Report) -> None:
    """Its busy share is far from the median of its role, on either side."""
    first, *others = healthy.workers
    idle = msgspec.structs.replace(first, busy_us=first.span_us * 0.01)
    found = outliers(msgspec.structs.replace(healthy, workers=[idle, *others]))
    assert list(found) == ["actor_rank0"]
    assert found["actor_rank0"].startswith("busy 1%, median ")


def test_two_lanes_have_no_median_to_differ_from(healthy: Report) -> None:
    """Nor has a lane that was never observed."""
    one, two = healthy.workers[:2]
    apart = [msgspec.structs.replace(one, busy_us=0.0), msgspec.structs.replace(two, span_us=0.0)]
    assert outliers(msgspec.structs.replace(healthy, workers=apart, collectives=[])) == {}
