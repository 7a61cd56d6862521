"""Lost time has exactly one cause at each instant, and the right one in a step made to show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from drawn_steps import STAGES, Worker, engine, report_of
from step_folders import build_step, rewrite_worker
from step_outcome import csv_rows, printed

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.manifest import Device
from verl_profiling.numbers.idle_causes import CAUSES
from verl_profiling.numbers.report_columns import OTHER_RANKS
from verl_profiling.report.exports import scalars
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report


def seconds(report: Report, lane: str = "rollout0_rank0") -> dict[str, float]:
    """Return the idle seconds of a lane by cause, without the causes that it has none of."""
    (row,) = (row for row in report.workers if row.name == lane)
    return {cause: lost / 1e6 for cause, lost in row.lost_us.items() if lost}


@pytest.fixture
def drawn(tmp_path: Path) -> Report:
    """A step of 10 s: two ranks, of which one is slow, and two replicas, of which one is late."""
    return report_of(
        tmp_path,
        STAGES,
        [
            Worker("actor", 0, stages=[("update_actor", 5, 6)], kernels=[("gemm", 5, 5.75)]),
            Worker("actor", 1, stages=[("update_actor", 5, 8)], kernels=[("gemm", 5, 8)]),
            Worker(
                "rollout",
                replica=0,
                kernels=[("attention", 0.5, 1), ("attention", 1.5, 2)],
                iterations=[
                    ("execute_context_1(16)_generation_0(0)", 0.5, 1),
                    ("execute_context_0(0)_generation_4(4)", 1, 2),
                ],
            ),
            engine(1, (0, 4)),
        ],
    )


def test_a_fast_rank_waits_for_rollout_tail_reward_straggler_and_weights(drawn: Report) -> None:
    """Half of the replicas are done at 3 s (the median of 2 and 4),
    so the tail is from 3 s to 4 s.
    """
    assert seconds(drawn, "actor_rank0") == {
        "waiting_for_rollout": 3.0,
        "long_tail": 1.0,
        "other_stages": 1.0,
        "host_bound": 0.25,
        "straggler_wait": 2.0,
        "weight_sync": 1.0,
        "between_stages": 1.0,
    }


def test_an_engine_waits_for_requests_and_for_the_other_replica(drawn: Report) -> None:
    """Before its first iteration, between iterations, after its last,
    and outside of the rollout.
    """
    assert seconds(drawn) == {
        "waiting_for_rollout": 0.5,
        "host_bound": 0.5,
        "long_tail": 2.0,
        "other_stages": 4.0,
        "weight_sync": 1.0,
        "between_stages": 1.0,
    }


def test_what_follows_the_last_replica_is_not_its_tail(tmp_path: Path) -> None:
    """A rollout that goes on for 2 s after its only replica was done waits for no replica."""
    report = report_of(
        tmp_path,
        [("rollout", 0, 4), ("update_actor", 4, 10)],
        [
            Worker("actor", stages=[("update_actor", 4, 10)], kernels=[("gemm", 4, 10)]),
            engine(0, (0, 2)),
        ],
    )
    assert seconds(report, "actor_rank0") == {"waiting_for_rollout": 2.0, "after_generation": 2.0}
    assert seconds(report) == {"after_generation": 2.0, "other_stages": 6.0}
    assert "after_generation" in [finding.rule for finding in report.findings]


def test_engines_tell_prefill_decode_and_the_tail(drawn: Report) -> None:
    first, second = drawn.engines
    assert (first.iterations, first.prefill_us, first.decode_us) == (2, 0.5e6, 1e6)
    assert (first.prefill_tokens, first.decode_tokens) == (16, 4)
    assert (first.queueing_us, first.finish_us) == (0.5e6, 2e6)
    assert (second.queueing_us, second.finish_us) == (0.0, 4e6)
    tail = drawn.tail
    assert (tail.replicas, tail.median_finish_us, tail.last_finish_us) == (2, 3e6, 4e6)
    assert tail.ratio == pytest.approx(4 / 3)
    assert tail.tail_share == pytest.approx(0.1)
    assert tail.latency_s is None


def test_requests_decide_when_a_replica_is_done(tmp_path: Path) -> None:
    """Latency, length and tokens are theirs; a rank
    that works beside the rollout does not wait for it.
    """
    requests = [(0, 1, 10), (0, 2, 20), (1, 3, 30)]
    report = report_of(
        tmp_path, STAGES, [Worker("rollout", replica=0, kernels=[("k", 0, 1)], requests=requests)]
    )
    tail = report.tail
    assert (tail.requests, tail.last_finish_us) == (3, 3e6)
    assert (tail.latency_s.p50, tail.latency_s.max, tail.response_tokens.p50) == (2.0, 2.0, 20.0)
    assert (report.throughput.tokens, report.throughput.tokens_per_s) == (90.0, 9.0)
    [device] = report.devices
    assert device.lost_us.get("long_tail", 0.0) == 0  # the only replica waits for no other
    report = report_of(
        tmp_path,
        [("rollout", 0, 10), ("update_actor", 2, 6)],
        [Worker("actor", stages=[("update_actor", 2, 6)], kernels=[("gemm", 3, 6)])],
    )
    assert seconds(report, "actor_rank0") == {"waiting_for_rollout": 6.0, "host_bound": 1.0}


def test_a_host_in_a_blocking_call_does_not_fail_to_launch(tmp_path: Path) -> None:
    """By the names of three vendors: what waits, copies or allocates blocks,
    what launches does not.
    """
    blocking = [
        "cudaMemcpy",
        "cuMemcpyHtoD_v2",
        "cudaMalloc",
        "cuMemAlloc_v2",
        "cudaDeviceSynchronize",
    ]
    blocking += ["cuCtxSynchronize", "hipMemcpyWithStream", "hipDeviceSynchronize"]
    blocking += ["AscendCL@aclrtMemcpy", "AscendCL@aclrtSynchronizeStreamWithTimeout"]
    others = ["cudaMallocAsync", "cudaStreamWaitEvent", "cudaEventRecord", "hipGraphLaunch"]
    calls = [(name, at, at + 0.5) for at, name in enumerate([*blocking, *others])]
    calls += [("cudaMemcpyAsync", 14, 14.00001), ("cudaStreamSynchronize", 14.5, 15)]
    stage = ("update_actor", 0, 16)
    worker = Worker(
        "actor", stages=[stage], kernels=[("gemm", 15, 16)], calls=calls, recorded=(0, 16)
    )
    report = report_of(tmp_path, [stage], [worker], end=16)
    assert seconds(report, "actor_rank0") == {"host_blocked": 5.5, "host_bound": 9.5}


def test_a_pause_of_the_garbage_collector_has_the_time_in_which_the_device_waits(
    tmp_path: Path,
) -> None:
    """Not where the device has work, and not in a weight update; 4% of the time are a finding."""
    stages = [("update_actor", 0, 9), ("update_weights", 9, 10)]
    pauses = [(1, 1.5), (4, 4.4), (9.2, 9.4)]
    worker = Worker(
        "actor", stages=[stages[0]], kernels=[("gemm", 0, 4), ("gemm", 4.4, 9)], pauses=pauses
    )
    report = report_of(tmp_path, stages, [worker])
    assert seconds(report, "actor_rank0") == pytest.approx({"gc": 0.4, "weight_sync": 1.0})
    (finding,) = [one for one in report.findings if one.rule == "gc"]
    assert "Python's garbage collector" in finding.text
    assert finding.lanes == ["actor_rank0"]


def test_a_weight_update_is_divided_by_its_parts(tmp_path: Path) -> None:
    """The own process comes first, then the loop, then the process that the others wait for."""
    report = report_of(
        tmp_path,
        [
            ("update_actor", 0, 2),
            ("update_weights", 2, 10),
            ("abort", 2, 5, 1),
            ("resume", 9, 9.5, 1),
        ],
        [
            Worker(
                "actor",
                0,
                stages=[("update_weights", 5, 9), ("transfer", 5, 9, 1), ("gather", 5, 7, 2)],
                kernels=[("gemm", 0, 2)],
            ),
            engine(0, (0, 1), requests=[(0, 1, 4), (0, 4.5, 40)]),
        ],
    )
    (row,) = [row for row in report.lost if row.cause == "weight_sync"]
    both = {"abort": 6.0, "gather": 4.0, "transfer": 4.0, "resume": 1.0, "update_weights": 1.0}
    assert row.parts == pytest.approx(both)
    (finding,) = [one for one in report.findings if one.rule == "weight_sync"]
    assert "weights went to the engines (38% abort, 25% gather, 25% transfer)" in finding.text
    (note,) = [note for note in report.notes if note.startswith("abort ")]
    assert note == "abort took 3.00 s: its last request, 0-1 of rollout0, took 2.50 s"


def test_a_weight_update_without_parts_is_one_sentence(tmp_path: Path) -> None:
    """Stages elsewhere are no parts of it, however deep they are."""
    worker = Worker(
        "actor", stages=[("update_actor", 0, 5), ("mini_batch", 1, 2, 1)], kernels=[("gemm", 0, 5)]
    )
    report = report_of(tmp_path, [("update_actor", 0, 5), ("update_weights", 5, 10)], [worker])
    (row,) = [row for row in report.lost if row.cause == "weight_sync"]
    assert row.parts == {}


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
@pytest.mark.parametrize("shared", [False, True])
def test_causes_add_up_to_all_idle_time(tmp_path: Path, mode: str, shared: bool) -> None:
    """In a real capture no instant is lost and none counts twice,
    also where two lanes share a device.
    """
    folder = build_step(tmp_path, mode=mode, rank1_clock_ns=777)
    if shared:
        rewrite_worker(folder, "actor_rank0", "rollout0", devices=[Device(kind="cuda", uuid="one")])
    report = open_step(folder).report()
    assert len(report.devices) == (2 if shared else 3)
    for row in (*report.workers, *report.devices):
        assert list(row.lost_us) == [*CAUSES, OTHER_RANKS]
        assert sum(row.lost_us.values()) == pytest.approx(row.idle_us + row.waiting_us)
        assert row.busy_us + row.idle_us == pytest.approx(row.span_us)
    lost_us = sum(row.idle_us + row.waiting_us for row in report.devices)
    assert sum(row.seconds for row in report.lost) == pytest.approx(lost_us / 1e6)
    assert report.lost[-1].cause == "unexplained"


def test_lost_is_one_quantity_with_its_unit_everywhere(tmp_path: Path) -> None:
    """Lane-seconds that are idle or wait: of 4 s, rank 0 waits 1 s for rank 1,
    and both are idle for 1 s.
    """
    folder = tmp_path / "step_000001"
    folder.mkdir()
    workers = [
        Worker(
            "actor",
            rank,
            stages=[("train", 0, 3)],
            kernels=[("gemm", 0, at), ("nccl_AllReduce", at, 3)],
        )
        for rank, at in ((0, 1), (1, 2))
    ]
    report = report_of(folder, [("train", 0, 3)], workers, end=4.0)
    lost = {"waiting_for_other_ranks": 1.0, "between_stages": 2.0}
    assert {row.cause: row.seconds for row in report.lost if row.seconds} == lost
    assert {row.cause: row.share for row in report.lost}["waiting_for_other_ranks"] == 0.125
    of_lanes = [sum(row.lost_us.values()) for row in report.workers]
    assert of_lanes == [row.idle_us + row.waiting_us for row in report.workers] == [2e6, 1e6]
    assert main(["report", str(tmp_path), "--save"]) == 0
    page, run = (path.read_text() for path in (folder / "report.html", tmp_path / "index.html"))
    assert "<dt>Lost</dt><dd><strong>3.00 <small>lane-seconds</small></strong>" in page
    assert '<section id="lost">' in page
    assert "lost lane-seconds" in run


def idle_engine(
    folder: Path,
    requests: list[tuple[float, float, int]],
    *,
    stage: str = "rollout",
    logged: bool = True,
    pending: tuple[float, ...] = (),
) -> Report:
    """An engine that computes from 0 to 1, from 4 to 5 and from 9 to 10 s of a stage of 10 s."""
    works = [(0, 1), (4, 5), (9, 10)]
    worker = engine(0, *works, requests=requests, logged=logged, pending=list(pending))
    return report_of(folder, [(stage, 0, 10)] if stage else [], [worker])


@pytest.mark.parametrize("stage", ["rollout", "validate", ""])
def test_time_without_a_request_is_no_time_of_the_host(tmp_path: Path, stage: str) -> None:
    """Between turns of a tool it waits for requests, in a rollout, a validation,
    or a loop without stages.
    """
    report = idle_engine(tmp_path, [(0, 1, 4), (3, 6, 4), (9, 10, 4)], stage=stage)
    assert seconds(report) == {"no_requests": 5.0, "queued": 0.3, "host_bound": 1.7}


def test_a_finding_is_about_what_is_waited_for(tmp_path: Path) -> None:
    """Requests, or between iterations with requests the engine."""
    report = idle_engine(tmp_path, [(0, 1, 4), (4, 5, 4), (9, 10, 4)])
    [finding] = [finding for finding in report.findings if finding.rule == "no_requests"]
    assert "waited for requests" in finding.text
    assert "host_bound" not in {finding.rule for finding in report.findings}
    report = idle_engine(tmp_path, [(0, 10, 4)])
    [finding] = [finding for finding in report.findings if finding.rule == "host_bound"]
    assert "between iterations of engines that had requests" in finding.text


def test_requests_before_and_after_the_capture_are_on_their_way(tmp_path: Path) -> None:
    """One that did not end is known by its begin, one from before while iterations show it."""
    report = idle_engine(tmp_path, [(0, 1, 4)], pending=(4.0,))
    assert seconds(report) == {"no_requests": 3.0, "host_bound": 4.0}
    report = idle_engine(tmp_path, [(9, 10, 4)])
    assert seconds(report) == {"host_bound": 3.0, "no_requests": 4.0}


def test_an_engine_that_got_no_request_had_none(tmp_path: Path) -> None:
    """An empty log is knowledge, too; what its iterations did was for requests from before."""
    assert "no_requests" not in seconds(
        idle_engine(tmp_path, [])
    )  # the last iteration ends with the rollout
    idle = Worker("rollout", replica=0, kernels=[("dummy", 0, 1), ("dummy", 9, 10)], logged=True)
    [row] = report_of(tmp_path, [("rollout", 0, 10)], [idle]).workers
    assert row.lost_us["no_requests"] == 8e6


def test_without_a_log_it_is_not_known_and_said(tmp_path: Path) -> None:
    """The gaps are the host's then; an open request is in the log."""
    report = idle_engine(tmp_path, [], logged=False)
    assert seconds(report) == {"host_bound": 7.0}
    assert any("rollout0 were not logged" in note for note in report.notes)
    assert not any("not logged" in note for note in idle_engine(tmp_path, [(0, 9, 1)]).notes)
    assert not any(
        "not logged" in note for note in idle_engine(tmp_path, [], pending=(8.0, 9.0)).notes
    )


GPU = Device(kind="cuda", index=0, uuid="8932f937-d72c-4106-c12f-20bd9faed9f6", place="node7/0")
OTHER = Device(kind="cuda", index=0, uuid="0032f937-d72c-4106-c12f-20bd9faed9f6", place="node8/0")


def colocated(folder: Path, actor: Sequence[Device], server: Sequence[Device]) -> Report:
    """A step of 10 s: the engine computes 2 of the first 3 s,
    the actor 2 of the 3 of its update.
    """
    return report_of(
        folder,
        STAGES,
        [
            Worker(
                "actor",
                stages=[("update_actor", 5, 8)],
                kernels=[("gemm", 5, 7)],
                devices=list(actor),
            ),
            engine(0, (0, 1), (2, 3), requests=[(0, 3, 8)], logged=True, devices=list(server)),
        ],
    )


def test_a_shared_device_is_busy_while_any_of_its_lanes_is(tmp_path: Path) -> None:
    """10 s of one device, not 20 s of two lanes."""
    report = colocated(tmp_path, [GPU], [GPU])
    [row] = report.devices
    assert (row.lanes, row.roles) == (["actor_rank0", "rollout0_rank0"], ["actor", "rollout"])
    assert (row.span_us, row.busy_us, row.idle_us) == (10e6, 4e6, 6e6)
    assert {cause: us / 1e6 for cause, us in row.lost_us.items() if us} == {
        # between iterations, where the actor waits; in the update, where the engine does
        "host_bound": 2.0,
        "after_generation": 1.0,
        "other_stages": 1.0,
        "weight_sync": 1.0,
        "between_stages": 1.0,
    }
    assert sum(lost.seconds for lost in report.lost) == pytest.approx(6.0)
    assert report.working_share == pytest.approx(0.4)
    assert report.throughput.tokens_per_s_per_device == pytest.approx(
        report.throughput.tokens_per_s
    )
    assert {finding.rule for finding in report.findings} <= {
        "host_bound",
        "after_generation",
        "idle_stage",
    }
    finding = next(finding for finding in report.findings if finding.rule == "host_bound")
    assert finding.text.endswith("2.00 device-seconds (20% of the observed time).")
    assert finding.lanes == ["actor_rank0", "rollout0_rank0"]


def test_every_face_says_devices(tmp_path: Path) -> None:
    report = colocated(tmp_path, [GPU], [GPU])
    page = render_html(report)
    for text in (printed(report), page):
        assert "per second and GPU" in text
    assert "of 1 device (2 lanes)" in page
    [row] = csv_rows(tmp_path / "csv", report, table="devices")
    assert (row["lanes"], row["busy_us"]) == ("actor_rank0; rollout0_rank0", "4000000.0")
    numbers = dict(scalars(report))
    assert (numbers["busy_share"], numbers["lost/host_bound_s"]) == (0.4, 2.0)


@pytest.mark.parametrize(
    ("actor", "server", "count"),
    [
        ([GPU], [GPU], 1),
        ([GPU], [OTHER], 2),
        ([GPU], [Device(kind="cuda", place="node7/0")], 1),  # an engine knows no UUID
        (
            [GPU],
            [Device(kind="cuda", uuid=OTHER.uuid, place="node7/0")],
            2,
        ),  # two containers, both of GPU 0
        ([GPU], [], 2),
        ([Device(kind="cuda")], [Device(kind="cuda")], 2),
    ],
)
def test_what_says_that_two_lanes_are_one_device(
    tmp_path: Path, actor: list[Device], server: list[Device], count: int
) -> None:
    """The UUID, else the place; what is not known is not made up."""
    assert len(colocated(tmp_path, actor, server).devices) == count


def test_ranks_of_a_replica_have_the_devices_in_their_order(tmp_path: Path) -> None:
    """The rank inside the replica is the place in the list."""
    report = report_of(
        tmp_path,
        STAGES,
        [
            Worker("actor", 0, kernels=[("gemm", 5, 7)], devices=[OTHER]),
            Worker("rollout", replica=0, kernels=[("k", 0, 1)], devices=[OTHER, GPU]),
        ],
    )
    assert [row.lanes for row in report.devices] == [["actor_rank0", "rollout0_rank0"]]
