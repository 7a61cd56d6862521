"""A rank waits in a collective until the last one comes,
and each instant of waiting counts once.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from drawn_steps import Drawn, Kernel, Worker, in_group, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.report.model import Report

REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum", "ncclDevKernel_AllGather"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def ranks(*kernels: list[Drawn]) -> list[Worker]:
    """Return actors with these kernels, each in its ``update_actor``,
    which ends with the last kernel.
    """
    end = max(stop for own in kernels for _, _, stop in own)
    return [
        Worker(
            "actor",
            rank,
            stages=[("update_actor", 0, end)],
            kernels=own,
            groups=[list(range(len(kernels)))],
        )
        for rank, own in enumerate(kernels)
    ]


def waiting(report: Report) -> dict[str, float]:
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


def test_the_only_call_of_a_collective_makes_ranks_wait_though_they_leave_apart(
    tmp_path: Path,
) -> None:
    """Ranks leave a barrier a moment after each other, as on any host."""
    workers = ranks([(REDUCE, 0.3, 2.1)], [(REDUCE, 0.7, 2.101)], [(REDUCE, 1.5, 2.102)])
    report = report_of(tmp_path, [("update_actor", 0, 3)], workers)
    assert waiting(report) == {
        "actor_rank0": pytest.approx(1.2, abs=0.01),
        "actor_rank1": pytest.approx(0.8, abs=0.01),
        "actor_rank2": 0.0,
    }


def test_calls_of_one_collective_count_once_where_they_match(tmp_path: Path) -> None:
    """Two that wait at the same time are one wait;
    a call that one rank did not record is left out.
    """
    early: list[Drawn] = [(REDUCE, 1, 4), (REDUCE, 2, 5), (GATHER, 0, 5)]
    late: list[Drawn] = [(REDUCE, 3, 4), (REDUCE, 4, 5), (GATHER, 4.5, 5)]
    report = report_of(tmp_path, [("update_actor", 0, 5)], ranks(early, late))
    assert waiting(report) == {"actor_rank0": 4.5, "actor_rank1": 0.0}
    rows = {row.name: row for row in report.collectives}
    assert rows[REDUCE].wait_us == 3e6
    assert rows[GATHER].wait_us == 4.5e6
    assert report.workers[0].communication_us == 5e6
    assert {row.slowest for row in report.stragglers} == {"actor_rank1"}
    workers = ranks([(REDUCE, 0, 2), (REDUCE, 2, 3)], [(REDUCE, 1, 2)])
    report = report_of(tmp_path, [("update_actor", 0, 3)], workers)
    assert waiting(report) == {"actor_rank0": 1.0, "actor_rank1": 0.0}
    assert any(note.startswith("1 of 3 runs of collectives fit no run") for note in report.notes)


def drawn_calls(
    drawn: random.Random,
) -> tuple[list[list[float]], list[Sequence[int]], list[list[Kernel]]]:
    """Return how early each rank enters each call (s), the calls that it recorded, and these."""
    size, count = drawn.randint(2, 4), drawn.randint(8, 30)
    lost = drawn.choice(("first", "last", "hole", "both", ""))
    period = drawn.choice((0.0, drawn.uniform(0.01, 0.05)))  # without: calls at irregular times
    ends = [at * period + 0.1 for at in range(count)]
    if not period:
        ends = [at * 0.05 + drawn.uniform(0, 0.01) + 0.1 for at in range(count)]
    late = [[drawn.uniform(0.001, 0.009) for _ in ends] for _ in range(size)]
    for at in range(count):
        late[drawn.randrange(size)][at] = 0.0005  # the last one to enter
    cut: dict[str, Sequence[int]] = {"first": range(1, count), "last": range(count - 2)}
    cut[""] = range(count)
    cut["hole"] = [*range(count // 3), *range(count // 2, count)]
    cut["both"] = range(later := drawn.randint(1, count * 3 // 4), count)
    rest = range(count - later) if lost == "both" else range(count)
    kept = [*[rest] * (size - 1), cut[lost]]
    group = list(range(size))
    kernels = [
        [in_group((REDUCE, ends[at] - own[at], ends[at]), group) for at in recorded]
        for recorded, own in zip(kept, late, strict=True)
    ]
    return late, kept, kernels


@pytest.mark.parametrize("seed", range(24))
def test_calls_match_by_order_and_end(tmp_path: Path, seed: int) -> None:
    """Ranks wait as long as drawn, though profilers begin late, end early or have holes."""
    drawn = random.Random(seed)
    late, kept, kernels = drawn_calls(drawn)
    workers = [
        Worker(role, rank, kernels=own)
        for role in ("actor", "critic")
        for rank, own in enumerate(kernels)
    ]
    report = report_of(tmp_path, [("rollout", 0, 3)], workers, end=3)
    common = set(kept[0]).intersection(*kept)
    waits = [sum(own[at] - min(other[at] for other in late) for at in common) for own in late]
    assert [row.waiting_us / 1e6 for row in report.workers] == pytest.approx(
        [*waits, *waits], abs=1e-6
    )
    missing = 2 * sum(len(own) - len(common) for own in kept)
    assert any(note.startswith(f"{missing} of ") for note in report.notes) == bool(missing)


@pytest.mark.parametrize("seed", range(24))
def test_hosts_whose_clocks_are_apart_wait_as_long(tmp_path: Path, seed: int) -> None:
    """Traces of two hosts: clocks apart by calls, or one profiler a call later;
    unknown with other counts.
    """
    drawn = random.Random(seed)
    kind = ("apart", "later", "fewer")[seed % 3]
    offset_us = drawn.uniform(5_000, 90_000) if kind == "apart" else drawn.uniform(0, 300)
    period, count = drawn.uniform(5_000, 20_000), drawn.randint(20, 60)
    begins = [at * period + drawn.uniform(0, 0.02 * period) for at in range(count + 1)]
    late = [
        [
            drawn.uniform(0.1, 0.5) * period if at // 2 % 2 == rank else 0.0
            for at in range(count + 1)
        ]
        for rank in (0, 1)
    ]
    kept = {"apart": (range(count), range(count)), "later": (range(count), range(1, count + 1))}
    kept["fewer"] = (range(count), range(1, count))
    for rank, at_calls in enumerate(kept[kind]):
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}}
        ]
        for at in at_calls:
            begin, end = begins[at] + late[rank][at], begins[at] + 0.6 * period
            place = {"pid": 0, "tid": 20, "ts": begin + rank * offset_us, "dur": end - begin}
            args = {
                "Collective name": "allreduce",
                "Process Group Ranks": "[0, 1]",
                "Group size": 2,
            }
            events.append({"ph": "X", "cat": "kernel", "name": REDUCE, "args": args, **place})
        about = {"host_name": f"node{rank}", "distributedInfo": {"rank": rank, "world_size": 2}}
        trace = json.dumps({**about, "traceEvents": events})
        (tmp_path / f"rank{rank}.json").write_text(trace)
    report = open_step(tmp_path).report()
    common = [] if kind == "fewer" else sorted(set(kept[kind][0]) & set(kept[kind][1]))
    waits = [sum(max(late[1 - rank][at] - late[rank][at], 0) for at in common) for rank in (0, 1)]
    assert [row.waiting_us for row in report.workers] == pytest.approx(waits, abs=1)


CALL = st.tuples(st.sampled_from((REDUCE, GATHER)), st.integers(0, 60), st.integers(0, 30))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(CALL, min_size=1, max_size=6), min_size=2, max_size=4))
def test_a_rank_waits_at_most_as_long_as_it_communicates(
    calls: list[list[tuple[str, int, int]]],
) -> None:
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


def steps(
    folder: Path, ranks: Sequence[Sequence[Kernel]], groups: list[list[int]] | None = None
) -> Report:
    """Return the report of ranks with these kernels,
    which are in ``update_actor`` for four seconds.
    """
    stage = ("update_actor", 0, 4)
    workers = [
        Worker("actor", rank, stages=[stage], kernels=own, groups=groups or [])
        for rank, own in enumerate(ranks)
    ]
    return report_of(folder, [stage], workers, end=4)


def nobody_is_blamed(report: Report) -> bool:
    """Return whether no rank is said to wait, or to be slow, anywhere."""
    waits = any(row.waiting_us or any(row.waiting_load) for row in report.workers)
    behind = any(row.behind_us for row in report.stragglers)
    return not waits and not behind and "straggler" not in {one.rule for one in report.findings}


def test_groups_of_unequal_speed_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Two tensor-parallel groups that were split from one, and have its name;
    in each all come at once.
    """
    slow = [("gemm", 0, 1), in_group((REDUCE, 1, 3), [0, 1]), ("gemm", 3, 4)]
    fast = [("gemm", 0, 1), in_group((REDUCE, 1, 1.1), [2, 3]), ("gemm", 1.1, 4)]
    report = steps(tmp_path, [slow, slow, fast, fast])
    assert waiting(report) == {f"actor_rank{rank}": 0.0 for rank in range(4)}
    assert report.working_share == 1.0
    assert not any(report.lost_s.values())
    assert [row.behind_us for row in report.stragglers] == [0.0]
    assert "straggler" not in {finding.rule for finding in report.findings}
    assert {(row.group, row.wait_us) for row in report.collectives} == {
        ("[0, 1]", 0.0),
        ("[2, 3]", 0.0),
    }


def test_each_wait_is_of_one_group(tmp_path: Path) -> None:
    """Tensor and data parallel groups."""

    def rank(tensor: list[int], data: list[int], ready: float, left: float) -> list[Kernel]:
        reduce = in_group((REDUCE, ready, left), tensor)
        return [("gemm", 0, ready), reduce, in_group((REDUCE, left, 4), data, name="2")]

    ranks = [
        rank([0, 1], [0, 2], 1, 1.2),
        rank([0, 1], [1, 3], 1, 1.2),
        rank([2, 3], [0, 2], 1, 3.2),
        rank([2, 3], [1, 3], 3, 3.2),
    ]
    report = steps(tmp_path, ranks)
    assert waiting(report) == {
        "actor_rank0": 2.0,
        "actor_rank1": 2.0,
        "actor_rank2": 2.0,
        "actor_rank3": 0.0,
    }
    (slow,) = report.stragglers
    assert (slow.slowest, slow.slowest_us, slow.behind_us) == (
        "actor_rank3",
        4e6,
        pytest.approx(6e6),
    )
    late = {row.group: row.late for row in report.collectives}
    assert late["[2, 3]"] == late["[1, 3]"] == "actor_rank3"
    assert late["[0, 2]"] == "actor_rank2"


@pytest.mark.parametrize("collective", ["send", "recv", "coalesced", ""])
def test_sends_and_receives_of_a_pipeline_make_nobody_wait_for_all(
    collective: str, tmp_path: Path
) -> None:
    """Stages of a pipeline send one another as often; which one waits for which is not known."""
    groups = [[0, 1]]
    first, last = (SEND, 1, 1.5), (SEND, 1, 3)
    if collective:
        sends = [in_group(first, [0, 1], collective), in_group(last, [0, 1], collective)]
        report = steps(tmp_path, [[("gemm", 0, 1), sends[0]], [("gemm", 0, 1), sends[1]]], groups)
    else:
        report = steps(tmp_path, [[("gemm", 0, 1), first], [("gemm", 0, 1), last]], groups)
    assert nobody_is_blamed(report)
    assert report.collectives == []
    assert [row.communication_us for row in report.workers] == [0.5e6, 2e6]


def test_ranks_wait_for_an_all_to_all_that_is_made_of_sends(tmp_path: Path) -> None:
    """The kernel is that of sends and receives; its arguments name the collective."""
    ranks = [[("gemm", 0, at), in_group((SEND, at, 3), [0, 1], "all_to_allv")] for at in (1, 2)]
    assert waiting(steps(tmp_path, ranks)) == {"actor_rank0": 1.0, "actor_rank1": 0.0}


def test_ranks_that_were_not_captured_may_be_the_last(tmp_path: Path) -> None:
    """One waited for the other at least, and who came last is not said."""
    world = [0, 1, 2, 3]
    ranks = [
        [("gemm", 0, 1), in_group((REDUCE, 1, 4), world)],
        [("gemm", 0, 2), in_group((REDUCE, 2, 4), world)],
    ]
    report = steps(tmp_path, ranks)
    assert waiting(report) == {"actor_rank0": 1.0, "actor_rank1": 0.0}
    assert [(row.late, row.late_share) for row in report.collectives] == [("", 0.0)]
    assert (
        report.stragglers == []
    )  # rank 1 may have waited for 2 s, so rank 0 may have worked as long
    ranks = [
        [("gemm", 0, 1), in_group((REDUCE, 1, 4), [0, 1])],
        [("gemm", 0, 2), in_group((REDUCE, 2, 4), [2, 3])],
        [("gemm", 0, 1), in_group((REDUCE, 1, 4), [2, 3])],
    ]
    report = steps(tmp_path, ranks)
    assert waiting(report) == {"actor_rank0": 0.0, "actor_rank1": 0.0, "actor_rank2": 1.0}
    (slow,) = report.stragglers
    assert (slow.slowest, slow.behind_us) == ("actor_rank1", 1e6)


@pytest.mark.parametrize("groups", [[], [[0, 1], [0, 1, 2, 3]]])
def test_a_collective_without_a_group_is_matched_with_none(
    groups: list[list[int]], tmp_path: Path
) -> None:
    """The header of a trace names no group, as in old ones, or several: with gloo,
    or in a CUDA graph.
    """
    ranks = [[("gemm", 0, 1 + rank / 2), (REDUCE, 1 + rank / 2, 4)] for rank in range(4)]
    assert nobody_is_blamed(steps(tmp_path, ranks, groups))


@pytest.mark.parametrize(("ends", "slow"), [((8.0, 8.1), []), ((8.0, 4.0), ["actor_rank0"])])
def test_of_spans_alone_who_ends_together_with_the_others_is_not_slow(
    ends: tuple[float, float], slow: list[str], tmp_path: Path
) -> None:
    """Rank 0 enters the stage 3 s before rank 1: in a stage with a collective it waited for it."""
    workers = [
        Worker("actor", rank, stages=[("update_actor", begin, end)])
        for rank, (begin, end) in enumerate(zip((0.0, 3.0), ends, strict=True))
    ]
    report_of(tmp_path, [("update_actor", 0, 9)], workers)
    for rank in (0, 1):
        rewrite_worker(tmp_path, f"actor_rank{rank}", artifacts=[])
    report = open_step(tmp_path).report()
    assert report.workers == []
    assert [row.slowest for row in report.stragglers] == slow
    assert {span.lane for span in report.gantt} == {"controller", "actor_rank0", "actor_rank1"}
