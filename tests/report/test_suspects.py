"""What a capture that was asked for says: who asked, why,
and what sets the suspect apart from its peer.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_steps import Drawn, Worker, drawn_inputs
from drawn_summaries import summary
from step_folders import rewrite, rewrite_worker
from step_outcome import printed

from verl_profiling.analysis import open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.cli import main
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.watch.log_writer import WatchLog

SLOW_STAGE = Trigger(
    kind="anomaly",
    reason="step 41: update_actor took 6.00 s, 2.00 times the median of 20 steps",
    sign="slow_stage",
    noticed=41,
    stage="update_actor",
    suspects=["actor_rank1"],
    peers=["actor_rank0"],
    value=6.0,
    median=3.0,
    history=[3.0, 3.1, 2.9, 3.0, 6.0],
)
STAGES = [("rollout", 0.0, 2.0), ("update_actor", 2.0, 8.0)]


def rank(index: int, kernels: list[Drawn], stages: list[Drawn] | None = None) -> Worker:
    """Return a rank of the actor that is in ``update_actor`` from 2 to 8 s."""
    return Worker("actor", rank=index, stages=stages or [("update_actor", 2, 8)], kernels=kernels)


def asked_by(
    trigger: Trigger,
    folder: Path,
    workers: list[Worker],
    stages: list[Drawn] = STAGES,
    end: float = 8.0,
) -> Report:
    """Return the report of a drawn step that this asked for."""
    drawn_inputs(folder, stages, workers, end)
    return reported(folder, trigger)


def two_ranks(folder: Path, trigger: Trigger, slow: float = 3.0) -> Report:
    """Rank 1 multiplies for some seconds longer than rank 0,
    which then waits for it in a collective.
    """
    workers = [
        rank(0, [("gemm", 2, 4), ("ncclDevKernel_AllReduce", 4, 5 + slow)]),
        rank(1, [("gemm", 2, 4 + slow), ("ncclDevKernel_AllReduce", 4 + slow, 5 + slow)]),
    ]
    return asked_by(trigger, folder, workers)


def reported(folder: Path, trigger: Trigger, **changes: Any) -> Report:
    """Return the report of a step folder, captured for this reason with some changes."""
    rewrite(folder, trigger=msgspec.structs.replace(trigger, **changes))
    return open_step(folder).report()


def test_a_capture_of_a_fault_that_lasts_is_not_said_to_be_without_it(tmp_path: Path) -> None:
    """Usual are 3 s; the median is of faulty steps, 6 s as the captured one,
    and 8.5 s were noticed.
    """
    two_ranks(tmp_path, SLOW_STAGE)
    lasting = {"value": 8.5, "median": 6.0, "history": [6.0, 6.0, 6.0, 8.5]}
    report = reported(tmp_path, SLOW_STAGE, **lasting)
    assert [row.kind for row in report.suspects][:2] == ["stage", "time"]
    assert "actor_rank1 is the last" in report.findings[0].text
    shown = printed(report)
    assert "▆▆▆█ 8.50 s, median before 6.00 s" in shown
    assert not any(word in shown for word in ("not slow", "gone", "as usual"))


def test_the_suspect_is_told_from_the_peer_that_waits_for_it(tmp_path: Path) -> None:
    """What the peer waits in a collective is no work of its own."""
    report = two_ranks(tmp_path, SLOW_STAGE)
    rows = {(row.kind, row.name): row for row in report.suspects}
    stage = rows["stage", "update_actor"]
    assert (stage.value, stage.peer_value, stage.difference) == pytest.approx((6.0, 3.0, 3.0))
    assert rows["time", "computing and copying"].difference == pytest.approx(3.0)
    assert rows["time", "waiting for other ranks"].difference == pytest.approx(-3.0)
    assert rows["kernel", "gemm"].difference == pytest.approx(3.0)
    workers = [rank(0, [("gemm", 2, 3)]), rank(1, [("gemm", 2, 4), ("copy", 5, 6)])]
    report = asked_by(SLOW_STAGE, tmp_path, workers)
    parts = [row for row in report.suspects if row.kind == "time"]
    assert sum(row.value for row in parts) == pytest.approx(6.0)
    assert sum(row.peer_value or 0.0 for row in parts) == pytest.approx(6.0)


@pytest.mark.parametrize(
    "change",
    [
        {"suspects": ["actor_rank7"]},
        {"suspects": ["actor_rank2"]},
        {"suspects": ["critic_rank0"], "peers": []},
        {"suspects": [], "sign": "leader", "history": []},
    ],
)
def test_what_cannot_be_compared_has_no_row(tmp_path: Path, change: dict[str, object]) -> None:
    """A lane that nobody knows, and a process without a recording or a peer, end no report."""
    workers = [rank(0, [("gemm", 2, 4)]), rank(1, [("gemm", 2, 7)]), rank(2, []), Worker("critic")]
    workers[3].kernels.append(("gemm", 2.0, 3.0))
    drawn_inputs(tmp_path, STAGES, workers, 8.0)
    rewrite_worker(tmp_path, "actor_rank2", stages=[], artifacts=[])
    (tmp_path / "actor_rank2.torch.json.gz").unlink()
    assert reported(tmp_path, SLOW_STAGE, **change).suspects == []


def test_an_engine_is_compared_by_what_its_lane_was_busy(tmp_path: Path) -> None:
    """The loop's stage is the window; without a named peer the others of the role are the peers."""
    workers = [
        Worker(
            "rollout", replica=index, kernels=[("attention", 0, end)], requests=[(0.0, end, tokens)]
        )
        for index, (end, tokens) in enumerate([(0.5, 9), (1.9, 39)])
    ]
    trigger = msgspec.structs.replace(
        SLOW_STAGE,
        sign="leader",
        stage="rollout",
        suspects=["rollout1_rank0"],
        peers=["rollout0_rank0"],
    )
    report = asked_by(trigger, tmp_path, workers)
    stage = next(row for row in report.suspects if row.kind == "stage")
    assert (stage.value, stage.peer_value) == pytest.approx((1.9, 0.5))
    requests = {
        row.name: (row.value, row.peer_value) for row in report.suspects if row.kind == "request"
    }
    assert requests == {
        "a request": pytest.approx((1.9, 0.5)),
        "a token": pytest.approx((0.04, 0.05)),
    }
    workers = [rank(index, [("gemm", 2, 7 if index == 1 else 4)]) for index in range(4)]
    trigger = msgspec.structs.replace(SLOW_STAGE, peers=["actor_rank9"])
    report = asked_by(trigger, tmp_path, workers)
    assert report.capture_request.peers == ["actor_rank0", "actor_rank2", "actor_rank3"]
    assert {row.peers for row in report.suspects} == {"median of 3"}


def test_kernels_of_a_suspect_and_its_peer_are_of_one_range(tmp_path: Path) -> None:
    """One ran no operator in the stage: what it ran elsewhere is
    not set against the other's stage.
    """
    rows = {}
    more: list[Drawn] = [("aten::mm", 2, 7), ("aten::add_", 7.1, 7.17), ("aten::copy_", 7.8, 8)]
    for stage in ("update_actor", ""):
        own: list[Drawn] = [("sync", 0, 2), ("update_actor", 2, 7.5)]
        reduce: Drawn = ("gloo:all_reduce", 1.0, 1.244)
        workers = [
            Worker("actor", 0, stages=own, operators=[reduce]),
            Worker("actor", 1, stages=own, operators=[reduce, *more]),
        ]
        drawn_inputs(tmp_path, own, workers, 8.0)
        kernels = [
            row
            for row in reported(tmp_path, SLOW_STAGE, stage=stage).suspects
            if row.kind == "kernel"
        ]
        rows[stage] = {row.name: (row.value, row.peer_value) for row in kernels}
    assert rows["update_actor"] == {"aten::mm": (pytest.approx(5.0), 0)}
    assert rows[""] == {"aten::mm": (pytest.approx(5.0), 0), "aten::copy_": (pytest.approx(0.2), 0)}


def test_the_loops_time_in_no_stage_comes_first_where_the_watch_asked_for_it(
    tmp_path: Path,
) -> None:
    """However small its share is, and although it says no more of who lost what."""
    trigger = msgspec.structs.replace(
        SLOW_STAGE, stage="", suspects=["controller"], peers=[], median=0.25
    )
    workers = [rank(0, [("gemm", 3, 8)], [("update_actor", 3, 8)])]
    report = asked_by(
        trigger, tmp_path, workers, [("rollout", 0.0, 2.0), ("update_actor", 3.0, 8.0)]
    )
    said = "The loop was in no stage for 1.00 s (12% of the step); the median before was 250 ms."
    assert report.findings[0].text == said


def test_who_asked_is_the_first_line(tmp_path: Path) -> None:
    """Of a capture on demand the person is named and when;
    of a scheduled one there is nothing to say.
    """
    demand = Trigger(kind="demand", by="root@node1", request="ab12", reason="looks slow")
    report = two_ranks(tmp_path, demand)
    line = printed(report).splitlines()[1]
    assert line.startswith("captured 20")
    assert line.endswith(" by demand of root@node1 (request ab12): looks slow")
    assert "by demand of root@node1" in render_html(report)
    assert two_ranks(tmp_path, Trigger()).capture_request is None
    both = msgspec.structs.replace(
        SLOW_STAGE, kind="schedule", reason="schedule.every=10; it is slow"
    )
    scheduled = two_ranks(tmp_path, both)
    assert (
        " by schedule, slow_stage in step 41: schedule.every=10; it"
        in printed(scheduled).splitlines()[1]
    )
    assert scheduled.suspects, "they are in the manifest all the same"
    shown = printed(two_ranks(tmp_path, SLOW_STAGE)).splitlines()
    assert " by anomaly, slow_stage in step 41: update_actor" in shown[1]
    assert "▅▅▄▅█ 6.00 s, median before 3.00 s" in shown


def waited_for(folder: Path, late: list[Drawn], other: list[Drawn]) -> Report:
    """Return the report of a loop that waits for 6 s of 8;
    what replicas run at its end is cut off there.
    """
    workers = [
        Worker("rollout", replica=index, stages=stages)
        for index, stages in enumerate((late, other))
    ]
    stages = [("wait_rollout", 0.0, 6.0), ("update_actor", 6.0, 8.0)]
    manifest = drawn_inputs(folder, stages, workers, 8.0).manifest
    for worker in manifest.workers:
        spans = [
            msgspec.structs.replace(span, failed=span.end_ns > manifest.end_ns)
            for span in worker.stages
        ]
        rewrite_worker(folder, worker.name, stages=spans)
    suspects = {"suspects": ["rollout0_rank0"], "peers": ["rollout1_rank0"]}
    return reported(folder, SLOW_STAGE, stage="wait_rollout", **suspects)


SYNC = ("update_weights", 7.0, 7.3)


@pytest.mark.parametrize(
    ("late", "other"),
    [
        ([SYNC, ("rollout", 6.1, 8.1)], [SYNC, ("rollout", 6.2, 8.9)]),
        ([("update_weights", 5.0, 5.3), ("rollout", 6.1, 8.1)], [SYNC]),
        ([("rollout", 0.1, 5.9)], [SYNC, ("rollout", 4.0, 8.9)]),
    ],
    ids=["before", "little of it", "that of the peer"],
)
def test_what_the_capture_cut_off_is_compared_with_nothing(
    tmp_path: Path, late: list[Drawn], other: list[Drawn]
) -> None:
    """A stage that goes on behind the capture is as long as that was, and nobody's work."""
    report = waited_for(tmp_path, late, other)
    assert "straggler" not in {finding.rule for finding in report.findings}
    assert "rollout" not in {row.stage for row in report.stragglers}
    assert all(row.peer_value is None for row in report.suspects if row.name == "rollout")


def test_a_process_without_stages_has_its_memory(tmp_path: Path) -> None:
    """What both measured is compared."""
    trigger = msgspec.structs.replace(
        SLOW_STAGE, sign="memory", stage="", value=428e6, median=340e6
    )
    asked_by(trigger, tmp_path, [rank(0, [("gemm", 2, 4)]), rank(1, [("gemm", 2, 4)])])
    for name, value in (("actor_rank0", 379e6), ("actor_rank1", 572e6)):
        rewrite_worker(tmp_path, name, metrics={"stage/update_actor/process_peak_rss_bytes": value})
    report = open_step(tmp_path).report()
    (row,) = (row for row in report.suspects if row.kind == "memory")
    assert (row.name, row.value, row.peer_value) == ("process_peak_rss_bytes", 572e6, 379e6)


def test_a_median_counts_the_peers_that_have_the_number(tmp_path: Path) -> None:
    """A peer without a reading is unknown, and not 0."""
    trigger = msgspec.structs.replace(SLOW_STAGE, sign="memory", stage="", value=428e6, peers=[])
    asked_by(trigger, tmp_path, [rank(number, [("gemm", 2, 4)]) for number in range(4)])
    for number, value in ((0, 300e6), (1, 572e6), (2, 400e6)):
        metrics = {"stage/update_actor/process_peak_rss_bytes": value}
        rewrite_worker(tmp_path, f"actor_rank{number}", metrics=metrics)
    report = open_step(tmp_path).report()
    (row,) = (row for row in report.suspects if row.kind == "memory")
    assert (row.peers, row.peer_value) == ("median of 2", 350e6)
    assert {row.peers for row in report.suspects if row.kind == "time"} == {"median of 3"}


def test_what_is_of_the_suspect_alone_is_the_first_finding(tmp_path: Path) -> None:
    """A general one follows, though more seconds are at stake; on a schedule these come first."""
    own: list[Drawn] = [("rollout", 0, 1), ("update_actor", 2, 8)]
    calls: list[Drawn] = [("cudaStreamSynchronize", 2, 8)]
    workers = [
        Worker(
            "actor", 0, stages=[("update_actor", 2, 6)], kernels=[("gemm", 2, 2.1)], calls=calls
        ),
        Worker(
            "actor", 1, stages=[("update_actor", 2, 8)], kernels=[("gemm", 2, 2.1)], calls=calls
        ),
    ]
    drawn_inputs(tmp_path, own, workers, 8.0)
    found = reported(tmp_path, Trigger()).findings
    assert [finding.rule for finding in found][:2] == ["host_blocked", "straggler"]
    first, second, *_ = reported(tmp_path, SLOW_STAGE).findings
    assert (first.rule, first.lanes, second.rule) == ("straggler", ["actor_rank1"], "host_blocked")
    assert second.seconds > first.seconds


LEADER = msgspec.structs.replace(SLOW_STAGE, sign="leader", value=0.2, median=0.0)


def write_log(run: Path, trigger: Trigger, captured_s: float) -> Path:
    """Write the log of a run whose step 41 is noticed and whose step 1 is captured; return the
    folder of that step.
    """
    log = WatchLog(run)
    noticed = summary(41, {"update_actor": 9500})
    log(msgspec.structs.replace(noticed, noticed=trigger))
    log(summary(1, {"update_actor": 1000 * captured_s}, leader="", captured="step_000001"))
    folder = run / "step_000001"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("trigger", [LEADER, msgspec.structs.replace(LEADER, suspects=[])])
def test_the_rank_that_started_to_record_last_is_not_blamed_for_it(
    trigger: Trigger, tmp_path: Path
) -> None:
    """Of ranks with a loop each, as no rank waits for another one's start before it works."""
    reduce = "ncclDevKernel_AllReduce"
    late: list[Drawn] = [("rollout", 0, 2), ("update_actor", 2, 4.5)]
    early: list[Drawn] = [("rollout", -2, -1.9), ("update_actor", -1.9, 4.5)]
    workers = [
        rank(0, [("gemm", 0, 4), (reduce, 4, 4.5)], late),
        rank(1, [("gemm", -1.9, 2), (reduce, 2, 4.5)], early),
    ]
    workers[0].tool = [("start", -2, 0, None)]
    workers[1].tool = [("start", -2.1, -2, None)]
    workers[1].recorded = (-2, 10)
    folder = write_log(tmp_path, trigger, 2.5)
    report = asked_by(trigger, folder, workers, late, 4.5)
    texts = [finding.text for finding in report.findings]
    told = (
        "actor_rank0 still started to record while the others worked (2.00 s). So the 2.00 s for "
        "which they waited for it in update_actor are of the capture."
    )
    blamed = [finding.lanes for finding in report.findings if finding.rule == "straggler"]
    assert blamed == [trigger.suspects] * bool(trigger.suspects)
    if blamed:
        slow = "is slow in update_actor, as noticed: it took 4.40 s without waits, actor_rank0 2.50"
        assert slow in texts.pop(0)
    assert texts[0] == told
    rewrite_worker(folder, "actor_rank0", tool_spans=[])
    assert "actor_rank0 is the last to enter" in open_step(folder).report().findings[0].text


@pytest.mark.parametrize(
    ("trigger", "captured_s", "slow", "told"),
    [
        (SLOW_STAGE, 4.4, 3.0, "the stage update_actor took 4.40 s here, 6.00 s then, and 3.00 s"),
        (SLOW_STAGE, 4.6, 3.0, ""),
        (LEADER, 6.0, 0.8, "the lead of actor_rank1 in update_actor is 800 ms here, 2.00"),
        (LEADER, 6.0, 1.2, ""),
    ],
)
def test_a_capture_without_what_was_noticed_says_so_first(
    trigger: Trigger, captured_s: float, slow: float, told: str, tmp_path: Path
) -> None:
    """The length of a lead is known from the traces, where the watch saw no leader."""
    folder = write_log(tmp_path, trigger, captured_s)
    first = two_ranks(folder, trigger, slow).findings[0]
    if told:
        assert (first.rule, first.lanes) == ("fault_gone", [])
        assert f"What was noticed in step 41 is not in this step: {told}" in first.text
    else:
        assert "actor_rank1 is the last" in first.text


def test_a_process_that_ran_no_operator_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trace is whole, as ``check`` says; the report has a note, and no finding of it."""
    workers = [Worker("rollout", replica=index, stages=[("rollout", 0, 2)]) for index in range(2)]
    for worker in workers:
        worker.iterations.append(("rollout", 0.0, 2.0))
    drawn_inputs(tmp_path, STAGES, workers, 8.0)
    for path in tmp_path.glob("rollout*.torch.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        recording = {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "P",
        }
        trace["traceEvents"].append({**recording, "ts": 0.0, "dur": 8e6})
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    report = open_step(tmp_path).report()
    assert (report.coverage.missing, report.coverage.lanes, report.coverage.read) == ([], [], 2)
    assert "coverage" not in {finding.rule for finding in report.findings}
    noted = [note for note in report.notes if "ran no operator during the recording" in note]
    assert [note.partition(":")[0] for note in noted] == [
        f"rollout{index}_rank0.torch.json.gz" for index in range(2)
    ]
    assert main(["check", str(tmp_path)]) == 0
    assert "all ok" in capsys.readouterr().out


def test_a_rank_is_compared_by_its_own_stages(tmp_path: Path) -> None:
    """One that begins the step later, and in discrete mode without starts and stops of the tool."""
    workers = [rank(0, [], [("rollout", 0.0, 0.2)]), rank(1, [], [("rollout", 0.3, 2.3)])]
    stages = [("rollout", 0.0, 0.2), ("update_actor", 0.2, 3.0)]
    trigger = msgspec.structs.replace(SLOW_STAGE, stage="rollout", median=0.2, value=2.0)
    (row,) = (
        row
        for row in asked_by(trigger, tmp_path, workers, stages, 3.0).suspects
        if (row.kind, row.name) == ("stage", "rollout")
    )
    assert (row.value, row.peer_value) == pytest.approx((2.0, 0.2))
    tool = [("start", 2.0, 4.0, "update_actor"), ("stop", 7.0, 8.0, "update_actor")]
    workers = [rank(0, [("gemm", 4, 7)]), rank(1, [("gemm", 4, 7)])]
    for worker in workers:
        worker.tool, worker.mode, worker.recorded = list(tool), "discrete", (4.0, 7.0)
    report = asked_by(SLOW_STAGE, tmp_path, workers)
    stage = next(row for row in report.suspects if row.kind == "stage")
    assert (stage.value, stage.peer_value) == pytest.approx((3.0, 3.0))
