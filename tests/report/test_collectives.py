"""A rank waits in a collective until the last one comes, and each instant of waiting counts once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from drawn_steps import Drawn, Worker, report_of
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.report.model import Report

REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum", "ncclDevKernel_AllGather"


def ranks(*kernels: list[Drawn]) -> list[Worker]:
    """Return actors with these kernels, each in its ``update_actor``, which ends with the last kernel."""
    end = max(stop for own in kernels for _, _, stop in own)
    return [
        Worker("actor", rank, stages=[("update_actor", 0, end)], kernels=own)
        for rank, own in enumerate(kernels)
    ]


def waiting(report: Report) -> dict[str, float]:
    """Return the seconds that each lane waited."""
    return {row.name: round(row.waiting_us / 1e6, 6) for row in report.workers}


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """The last rank waits for nobody; the others wait until it comes."""
    workers = ranks([(REDUCE, 0.3, 2.1)], [(REDUCE, 0.7, 2.1)], [(REDUCE, 1.5, 2.1)])
    report = report_of(tmp_path, [("update_actor", 0, 3)], workers)
    assert waiting(report) == {"actor_rank0": 1.2, "actor_rank1": 0.8, "actor_rank2": 0.0}
    (row,) = report.collectives
    assert (row.calls, row.median_us, row.late, row.late_share) == (1, 0.6e6, "actor_rank2", 1.0)
    assert row.wait_us == pytest.approx(2e6)
    (slow,) = report.stragglers
    assert (slow.stage, slow.slowest, slow.slowest_us) == ("update_actor", "actor_rank2", 2.1e6)
    assert slow.median_us == pytest.approx(1.3e6)
    assert (slow.wait_us, slow.behind_us) == (pytest.approx(2e6), pytest.approx(2e6))


def test_calls_that_overlap_count_once(tmp_path: Path) -> None:
    """Two calls that wait at the same time are one wait, of one name or of two."""
    early: list[Drawn] = [(REDUCE, 1, 4), (REDUCE, 2, 5), (GATHER, 0, 5)]
    late: list[Drawn] = [(REDUCE, 3, 4), (REDUCE, 4, 5), (GATHER, 4.5, 5)]
    report = report_of(tmp_path, [("update_actor", 0, 5)], ranks(early, late))
    assert waiting(report) == {"actor_rank0": 4.5, "actor_rank1": 0.0}
    rows = {row.name: row for row in report.collectives}
    assert rows[REDUCE].wait_us == 3e6
    assert rows[GATHER].wait_us == 4.5e6
    assert report.workers[0].communication_us == 5e6
    assert {row.slowest for row in report.stragglers} == {"actor_rank1"}


def test_waiting_beside_computation_is_not_on_the_curve(tmp_path: Path) -> None:
    """The curve of waiting is a part of that of exposed communication."""
    workers = ranks([("gemm", 0, 2), (REDUCE, 0, 5)], [("gemm", 0, 4), (REDUCE, 4, 5)])
    first, second = report_of(tmp_path, [("update_actor", 0, 5)], workers, end=5).workers
    assert first.waiting_us == 4e6
    assert sum(first.waiting_load) == pytest.approx(sum(first.load) * 0.4, rel=0.01)
    assert all(
        w <= c <= b for w, c, b in zip(first.waiting_load, first.communication_load, first.load, strict=True)
    )
    assert not any(second.waiting_load)


def test_calls_that_cannot_be_matched_are_left_out(tmp_path: Path) -> None:
    """Where one rank called it more often, nobody knows which runs belong together."""
    workers = ranks([(REDUCE, 0, 2), (REDUCE, 2, 3)], [(REDUCE, 1, 2)])
    report = report_of(tmp_path, [("update_actor", 0, 3)], workers)
    assert report.collectives == []
    assert waiting(report) == {"actor_rank0": 0.0, "actor_rank1": 0.0}


CALL = st.tuples(st.sampled_from((REDUCE, GATHER)), st.integers(0, 60), st.integers(0, 30))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(CALL, min_size=1, max_size=6), min_size=2, max_size=4))
def test_a_rank_waits_at_most_as_long_as_it_communicates(calls: list[list[tuple[str, int, int]]]) -> None:
    """Whatever overlaps; and a stage is divided into work and waiting."""
    end = max(a + b for own in calls for _, a, b in own) / 10
    drawn = [[(name, a / 10, (a + b) / 10) for name, a, b in own] for own in calls]
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(Path(folder), [("update_actor", 0, 10)], ranks(*drawn))
    for row in report.workers:
        assert 0 <= row.waiting_us <= row.communication_us
    for row in report.collectives:
        assert row.wait_us <= sum(worker.communication_us for worker in report.workers)
    for slow in report.stragglers:
        assert 0 <= slow.median_us <= slow.slowest_us <= end * 1e6 + 1
        assert slow.behind_us >= 0
