"""Bytes and bandwidth of collectives and links: held against counts, nccl-tests' formulas and the
files of torch_npu.
"""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_steps import Drawn, Kernel, Worker, drawn_inputs, in_group, ns, report_of
from step_folders import rewrite, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.report.model import Report

DATA = Path(__file__).parents[1] / "data"
REDUCE, SEND = "ncclDevKernel_AllReduce_Sum", "ncclDevKernel_SendRecv"
RESNET_50 = 25_557_032  # parameters, of torchvision; the trace has three steps of data parallelism


def moved(kernel: Drawn, ranks: list[int], collective: str, **said: Any) -> Kernel:
    """Return a kernel that moves 2 MB in and out of its rank, unless it is said otherwise."""
    *drawn, group = in_group(kernel, ranks, collective, name=str(ranks))
    facts = {"In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "dtype": "BFloat16"}
    facts |= {key.replace("_", " "): value for key, value in said.items()}
    return (*drawn, {**group, **facts})


def report_on(folder: Path, *of_ranks: list[Kernel], hosts: str = "") -> Report:
    """Return the report of ranks with these kernels, each on the host of its letter."""
    stages = [("update_actor", 0, 10)]
    workers = [
        Worker("actor", rank, stages=stages, kernels=kernels)
        for rank, kernels in enumerate(of_ranks)
    ]
    report = report_of(folder, stages, workers)
    for worker, host in zip(read_manifest(folder).workers, hosts, strict=False):
        identity = msgspec.structs.replace(worker.identity, host=f"node{host}")
        rewrite_worker(folder, worker.name, identity=identity)
    return open_step(folder).report() if hosts else report


def test_the_last_rank_gives_the_bandwidth(tmp_path: Path) -> None:
    """Waiting is no bandwidth; the factors are those of nccl-tests, and all bytes of gathering are
    what comes out.
    """
    ranks = [0, 1, 2, 3]
    early = [
        moved((REDUCE, 1, 4), ranks, "allreduce"),
        moved((REDUCE, 5, 7), ranks, "_allgather_base", In_msg_nelems=250_000),
    ]
    late = [
        moved((REDUCE, 3.5, 4), ranks, "allreduce"),
        moved((REDUCE, 6, 7), ranks, "_allgather_base", In_msg_nelems=250_000),
    ]
    rows = report_on(tmp_path, early, late, early, early, hosts="AABB").links
    shown = {row.name: row for row in rows}
    reduce, gather = shown["all_reduce"], shown["all_gather"]
    assert (reduce.bytes, reduce.algorithm_bytes_per_s, reduce.bus_bytes_per_s) == (2e6, 4e6, 6e6)
    assert (gather.bytes, gather.algorithm_bytes_per_s, gather.bus_bytes_per_s) == (2e6, 2e6, 1.5e6)
    assert {(row.reach, row.pair) for row in rows} == {("over nodes", "nodeA-nodeB")}


@pytest.mark.parametrize(
    ("collective", "said", "missing"),
    [
        ("allreduce", {"dtype": ""}, "elements or type"),
        ("allreduce", {"In_msg_nelems": 0, "Out_msg_nelems": 0}, "elements or type"),
        ("allreduce", {"In_msg_nelems": -5, "Out_msg_nelems": 10**30}, "elements or type"),
        ("allreduce", {"In_msg_nelems": 1.5, "Out_msg_nelems": None}, "elements or type"),
        ("broadcast", {}, "a collective that all ranks leave together"),
        ("coalesced", {}, "a collective that all ranks leave together"),
        ("all_to_allv", {"In_msg_nelems": 3_000_000}, "equal bytes of all ranks"),
    ],
)
def test_a_missing_fact_is_named(
    tmp_path: Path, collective: str, said: dict[str, Any], missing: str
) -> None:
    """No bandwidth is claimed without it."""
    name = REDUCE if collective == "allreduce" else SEND
    first = moved((name, 1, 4), [0, 1], collective, **said)
    second = moved((name, 2, 4), [0, 1], collective, **({} if "equal" in missing else said))
    (row,) = report_on(tmp_path, [first], [second]).links
    assert (row.missing, row.bus_bytes_per_s) == (missing, None)
    assert row.group == ("" if name == SEND and collective != "all_to_allv" else "[0, 1]")
    (row,) = report_on(tmp_path, [moved((REDUCE, 1, 4), [0, 1], "allreduce")]).links
    assert (row.bytes, row.missing) == (2e6, "calls of all ranks")


def test_a_call_without_a_duration_has_no_bandwidth(tmp_path: Path) -> None:
    """Not a quadrillion bytes per second."""
    call = moved((REDUCE, 2, 2), [0, 1], "allreduce")
    (row,) = report_on(tmp_path, [call], [call]).links
    assert (row.missing, row.bus_bytes_per_s) == ("durations", None)


@pytest.mark.parametrize(
    ("ranks", "sizes", "shown"),
    [
        ([], [[10]], ("all", 40.0, "")),  # a group of all ranks lists none
        ([0, 1, 2], [[2**62], [2**61]], ("all", None, "elements or type")),
        ([0, 1, 2], [[-4]], ("all", None, "elements or type")),
        (3, [[10]], ("", None, "elements or type")),  # no list: nothing is known
    ],
)
def test_the_records_of_gloo_in_a_header(
    tmp_path: Path, ranks: Any, sizes: list[list[int]], shown: tuple[Any, ...]
) -> None:
    """Numbers that cannot be cost their own row alone."""
    call = ("gloo:all_reduce", 2.0, 3.0)
    drawn_inputs(tmp_path, [], [Worker("actor", rank, operators=[call]) for rank in range(3)])
    record = {
        "time_created_ns": ns(1.999),
        "profiling_name": call[0],
        "process_group": ["0", "all of them"],
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": ["Float"],
    }
    groups = [{"pg_name": "0", "ranks": ranks}, {"pg_name": "1", "ranks": [0, 1]}]
    for path in tmp_path.glob("*.torch.json.gz"):
        content = json.loads(gzip.decompress(path.read_bytes()))
        content["distributedInfo"] = {"world_size": 3, "pg_config": groups}
        content = {"collectives": {"entries": [record]}, **content}
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    [row] = open_step(tmp_path).report().links
    assert (row.group, row.bytes, row.missing) == shown
    assert (row.bus_bytes_per_s is None) == (row.bytes is None)


def calls_in(pair: list[int], begin: float, lasts: float) -> list[Kernel]:
    return [moved((REDUCE, begin + n, begin + n + lasts), pair, "allreduce") for n in range(2)]


@pytest.mark.parametrize(("lasts", "named"), [(0.9, True), (0.3, False)])
def test_a_slow_pair_of_hosts_is_named(tmp_path: Path, lasts: float, named: bool) -> None:
    """And the bandwidth in a node and over nodes, in the finding on communication."""
    slow, usual = calls_in([0, 2], 4, lasts), calls_in([0, 1], 1, 0.2)
    other = calls_in([1, 2], 7, 0.2)
    inside = calls_in([2, 3], 0, 0.1)
    kernels = [[*usual, *slow], [*usual, *other], [*inside, *slow, *other], inside]
    report = report_on(tmp_path, *kernels, hosts="ABCC")
    found = {finding.rule: finding.text for finding in report.findings}
    assert ("slow_link" in found) == named
    if named:
        assert found["slow_link"].startswith(
            "The link nodeA-nodeC is slow: all_reduce runs over it with 2.22 MB/s, over the other "
            "pairs with 10 MB/s, which is 2.80 lane-seconds"
        )
        assert (
            "all_reduce is in-node 20 MB/s; over nodes 2.22 MB/s" in found["exposed_communication"]
        )


def test_a_slow_link_of_groups_of_three_hosts_is_named_by_their_hosts(tmp_path: Path) -> None:
    """Three groups over three hosts each, of which one takes five times as long."""
    usual = [calls_in([2, 3, 4], 1, 0.2), calls_in([0, 1, 3], 2, 0.2)]
    slow = calls_in([0, 1, 2], 5, 1.0)
    kernels = [[*usual[1], *slow], [*usual[1], *slow], [*usual[0], *slow], [*usual[0], *usual[1]]]
    report = report_on(tmp_path, *kernels, usual[0], hosts="ABCDE")
    [finding] = [finding for finding in report.findings if finding.rule == "slow_link"]
    assert finding.text.startswith("A link of nodeA-nodeB-nodeC is slow: all_reduce")
    assert "over the other groups with" in finding.text


def test_data_parallel_engines_that_name_their_groups_alike_have_rows_of_their_own(
    tmp_path: Path,
) -> None:
    """Two groups of two ranks in a replica, each called [0, 1]; one is three times as fast."""
    workers = [
        Worker("rollout", replica=rank, kernels=calls_in([0, 1], 1, (0.9, 0.3)[rank // 2]))
        for rank in range(4)
    ]
    drawn_inputs(tmp_path, [("rollout", 0, 10)], workers)
    artifacts = []
    for rank, worker in enumerate(read_manifest(tmp_path).workers):
        [artifact] = worker.artifacts
        name = f"rollout0_rank{rank}.torch.json.gz"
        (tmp_path / artifact.path).rename(tmp_path / name)
        artifacts.append(msgspec.structs.replace(artifact, path=name, lane=f"rollout0_rank{rank}"))
    rewrite(tmp_path, workers=read_manifest(tmp_path).workers[:1])
    rewrite_worker(tmp_path, "rollout0", artifacts=artifacts)
    rows = open_step(tmp_path).report().links
    assert sorted(row.algorithm_bytes_per_s or 0 for row in rows) == pytest.approx(
        [2e6 / 0.9, 2e6 / 0.3]
    )
    assert [row.calls for row in rows] == [2, 2]


def test_buckets_of_weights_have_a_row_and_end_the_finding(tmp_path: Path) -> None:
    """Of each worker: bytes, number, time, and the median bandwidth."""
    stages = [("update_weights", 0, 8), ("transfer", 0, 8, 1)]
    stages += [("bucket", 1, 2, 2), ("bucket", 3, 5, 2)]
    kernels: list[Kernel] = [("gemm", 8, 10)]
    report_of(
        tmp_path, [("update_weights", 0, 8)], [Worker("actor", stages=stages, kernels=kernels)]
    )
    [actor] = read_manifest(tmp_path).workers
    sized = [
        msgspec.structs.replace(span, bytes=1_000_000 if span.name == "bucket" else 0)
        for span in actor.stages
    ]
    rewrite_worker(tmp_path, actor.name, stages=sized)
    report = open_step(tmp_path).report()
    [row] = report.links
    assert (row.name, row.group, row.calls, row.bytes) == ("weight bucket", actor.name, 2, 2e6)
    assert row.duration_us == 3e6
    assert row.algorithm_bytes_per_s == pytest.approx(0.75e6)
    [finding] = [finding for finding in report.findings if finding.rule == "weight_sync"]
    assert finding.text.endswith(" actor_rank0 sent 2 MB in 2 buckets, at 750 kB/s.")


def test_the_bytes_of_a_real_trace_of_nccl(tmp_path: Path) -> None:
    """Gradients of a ResNet-50 in each of three steps, exactly."""
    links = open_step(DATA / "nccl_data.json.gz").report().links
    assert sum(row.bytes or 0 for row in links if row.name == "all_reduce") == 3 * 4 * RESNET_50


def test_links_of_npus_are_those_of_torch_npu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes, bandwidth and pairs of ranks of real captures, from text and database; a damaged file
    costs these alone.
    """
    with tarfile.open(DATA / "ascend_level1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    output = "rank{}_ascend_pt/ASCEND_PROFILER_OUTPUT"
    theirs = set()
    for rank in (0, 1):
        matrix = tmp_path / "text" / output.format(rank) / "communication_matrix.json"
        [step] = json.loads(matrix.read_bytes()).values()
        [pairs] = [step["collective"][name] for name in step["collective"] if "-total@" in name]
        theirs |= {
            (ranks, round(pair["Transit Size(MB)"], 9), pair["Bandwidth(GB/s)"])
            for ranks, pair in pairs.items()
            if pair["Transport Type"] != "LOCAL"
        }
    assert len(theirs) == 14
    assert rows_of(tmp_path / "text") == theirs
    query = (
        "SELECT src_rank || '-' || dst_rank, transit_size, bandwidth FROM CommAnalyzerMatrix "
        "WHERE hccl_op_name = 'allreduce-total' AND transport_type = 'HCCS'"
    )
    theirs = set()
    for rank in (0, 1):
        with sqlite3.connect(tmp_path / "db" / output.format(rank) / "analysis.db") as database:
            theirs |= {
                (pair, round(size, 9), speed) for pair, size, speed in database.execute(query)
            }
        database.close()
    assert len(theirs) == 14
    assert rows_of(tmp_path / "db") == theirs
    matrix.write_text('{"step50": {"collective": {"allreduce-total@1": {"0-1": {}}}}}')
    assert main(["report", str(tmp_path / "text"), "--csv", str(tmp_path / "csv")]) == 0
    assert "the bandwidth between NPUs is unknown" in capsys.readouterr().out
    with (tmp_path / "csv" / "links.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["pair"]]) == 7


def rows_of(folder: Path) -> set[tuple[str, float, float]]:
    """Return the links between NPUs in a report: ranks, MB and GB/s."""
    rows = open_step(folder).report().links
    return {
        (row.pair, round((row.bytes or 0) / 1e6, 9), round((row.bus_bytes_per_s or 0) / 1e9, 9))
        for row in rows
        if row.pair
    }
