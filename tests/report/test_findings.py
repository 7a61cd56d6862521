"""Findings name the problem, its lanes and its seconds, in words that fit what was read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from drawn_steps import STAGES, Drawn, Worker, engine, ns, report_of
from drawn_summaries import summary
from msgspec.structs import replace as replace_struct
from step_folders import rewrite, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.cli import EXIT_FINDING, EXIT_OK, main
from verl_profiling.files.process_record import ProcessRecord
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import ExposedStage, StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import Request, RunInfo
from verl_profiling.report.findings import LIMIT, find
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.summary_text import late_response
from verl_profiling.watch.log_writer import WatchLog

WHOLE: list[Drawn] = [("update_actor", 0, 10)]
REDUCE = "ncclDevKernel_AllReduce_Sum"


def rules(report: Report) -> list[str]:
    """Return the names of the rules that spoke, in order."""
    return [finding.rule for finding in report.findings]


def said(report: Report, rule: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.rule == rule)
    return found


def without_manifest(folder: Path) -> Report:
    """Return the report of the same traces, as any profiler leaves them."""
    (folder / "manifest.json").unlink()
    return open_step(folder).report()


def test_a_synchronous_loop_is_no_finding(tmp_path: Path) -> None:
    """Most of a healthy step is waiting; communication of lanes
    that are hardly busy is none either.
    """
    stages = [("rollout", 0, 6), ("update_actor", 6, 10)]
    actors = [
        Worker("actor", rank, stages=[("update_actor", 6, 10)], kernels=[("gemm", 6, 10)])
        for rank in (0, 1)
    ]
    report = report_of(tmp_path, stages, [*actors, engine(0, (0, 6))])
    assert {row.cause: row.seconds for row in report.lost}["waiting_for_rollout"] == 12
    assert report.findings == []
    kernels: list[Drawn] = [("k", 1, 1.01), (REDUCE, 1.01, 1.1)]
    actors = [
        Worker("actor", rank, stages=[("update_actor", 0, 9)], kernels=kernels) for rank in (0, 1)
    ]
    report = report_of(tmp_path, [("update_actor", 0, 9)], actors)
    assert "exposed_communication" not in rules(report)


def test_the_verdict_is_a_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow rank is named, though it is idle and the other one busy from begin to end."""
    fast = Worker("actor", 0, stages=WHOLE, kernels=[("gemm", 0, 10)])
    report_of(tmp_path, WHOLE, [fast, replace(fast, rank=1)])
    assert main(["report", "--verdict", str(tmp_path)]) == EXIT_OK
    assert capsys.readouterr().out == "1 step: nothing stands out\n"
    slow = replace(fast, rank=1, kernels=[("gemm", 0, 4), (REDUCE, 9, 10)])
    report = report_of(
        tmp_path, WHOLE, [replace(fast, kernels=[("gemm", 0, 4), (REDUCE, 4, 10)]), slow]
    )
    assert (said(report, "straggler").seconds, "host_bound" in rules(report)) == (
        pytest.approx(5),
        False,
    )
    assert main(["report", "--verdict", "--json", str(tmp_path)]) == EXIT_FINDING
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    slow_rank = (
        "step 1: actor_rank1 is slow in update_actor: it took 10.0 s without waits, "
        "the other worker"
    )
    assert line.startswith(f"{slow_rank} 5.00 s")
    assert "given(lengths=lengths). Would help most: update_actor balanced (--balance" in line
    assert json.loads(printed.out)["findings"][0]["lanes"] == ["actor_rank1"]


@pytest.mark.parametrize(("value", "is_gone"), [(9.0, False), (30.0, True)])
def test_the_verdict_is_on_what_the_watch_noticed_if_its_capture_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, is_gone: bool
) -> None:
    """A step that a person asked for may have lost more, once."""
    trigger = Trigger(kind="anomaly", sign="slow_stage", stage="reward", value=value, median=3.0)
    log = WatchLog(tmp_path)
    for name, idle, asked in (("step_000001", 9, trigger), ("step_000002", 90, Trigger())):
        folder = tmp_path / name
        folder.mkdir()
        end = idle + 1
        worker = Worker("actor", kernels=[("gemm", idle, end)], recorded=(0, end))
        report_of(folder, [("reward", 0, idle), ("update_actor", idle, end)], [worker], end)
        rewrite(folder, trigger=asked)
        exposed = [ExposedStage(name="reward", exposed_ns=ns(idle) - ns(0), role="controller")]
        log(StepSummary(step=1, begin_ns=1, end_ns=2, captured=name, exposed=exposed))
    assert main(["report", "--verdict", str(tmp_path)]) == EXIT_FINDING
    printed = capsys.readouterr().out
    assert (" for 90.0 s" if is_gone else "The stage reward took 9.00 s") in printed


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_verdict_has_who_went_first_and_what_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_killed: bool
) -> None:
    """Also where nothing stands out in the captured steps."""
    folder = tmp_path / "step_000001"
    folder.mkdir()
    report_of(folder, WHOLE, [Worker("actor", 0, stages=WHOLE, kernels=[("gemm", 0, 10)])])
    log = WatchLog(tmp_path)
    for step in range(1, 6):
        made = summary(step)
        if step == 2:
            made.noticed = Trigger(
                kind="anomaly",
                sign="memory",
                noticed=2,
                suspects=["actor_rank3"],
                value=3e9,
                median=1e9,
                memory="held",
                reason="step 2: memory of actor_rank3 has grown by 2 GB",
            )
        log(made)
    loop = replace_struct(ProcessId.current(), pid=2**40)
    run = RunInfo(
        run_id="run", begin_ns=1, process=loop, config={"watch": {"enable": True}}, versions={}
    )
    if not is_killed:
        run = replace_struct(run, end_ns=made.end_ns, last_step=5)
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    (tmp_path / "processes").mkdir()
    record = ProcessRecord(lane="controller", role="controller", process=loop, step=5)
    (tmp_path / "processes" / record.file).write_bytes(msgspec.json.encode(record))
    assert main(["report", "--verdict", str(tmp_path)]) == EXIT_FINDING
    [line] = capsys.readouterr().out.splitlines()
    assert ("controller went first" in line) == is_killed
    assert line.endswith("actor_rank3 has grown by 2 GB. Still 3 GB, before 1 GB.")


def test_a_run_without_captures_beside_another_fails_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known of its steps, so that nothing can stand out."""
    captured, run = tmp_path / "captured", tmp_path / "uncaptured"
    captured.mkdir()
    run.mkdir()
    WatchLog(run)(StepSummary(step=1, begin_ns=1, end_ns=2))
    report_of(captured, WHOLE, [Worker("actor", 0, stages=WHOLE, kernels=[("gemm", 0, 10)])])
    assert main(["report", "--verdict", str(captured), str(run)]) == EXIT_FINDING
    printed = capsys.readouterr()
    assert printed.out == "1 step: nothing stands out\n"
    assert printed.err.startswith(
        f"warning: {run}: No step was captured. schedule.steps lists steps"
    )


def small_straggler(folder: Path, trigger: Trigger, marked: bool, late: float = 99.5) -> Report:
    """Return a step of 100 s in which rank 1 keeps rank 0 waiting for 0.4 s,
    and much else is wrong.
    """
    stages = [("rollout", 0, 99), ("update_actor", 99, 100)]
    workers = []
    for rank, ready in ((0, 99.1), (1, late)):
        own = (
            [("compute", 99, ready), ("update_actor", ready, 100)]
            if marked
            else [("update_actor", 99, 100)]
        )
        kernels = [("gemm", 99, ready), (REDUCE, ready, 99.6), ("gemm", 99.6, 100)]
        workers.append(Worker("actor", rank, stages=own, kernels=kernels, recorded=(0, 100)))
    report_of(folder, stages, workers, 100)
    rewrite(folder, trigger=trigger)
    return open_step(folder).report()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("kind", ["anomaly", "demand"])
def test_the_last_to_the_collectives_of_the_stage_that_was_asked_for_comes_first(
    kind: str, marked: bool, tmp_path: Path
) -> None:
    """Whatever its share of the step, and also where what made it late has a stage of its own."""
    sign = "slow_stage" if kind == "anomaly" else ""
    report = small_straggler(tmp_path, Trigger(kind=kind, sign=sign, stage="update_actor"), marked)
    first = report.findings[0]
    assert (first.rule, first.lanes, first.seconds) == (
        "straggler",
        ["actor_rank1"],
        pytest.approx(0.4),
    )
    assert first.text == (
        "Of the captured ranks, actor_rank1 is the last to enter the collectives of "
        "update_actor: the "
        "others waited 400 ms for it."
    )


@pytest.mark.parametrize("suspects", [[], ["actor_rank1"]])
def test_a_rank_that_is_a_little_later_is_no_cause_where_all_are_slow(
    suspects: list[str], tmp_path: Path
) -> None:
    """By a tenth of the stage; where the watch suspects it, it is."""
    trigger = Trigger(kind="anomaly", sign="slow_stage", stage="update_actor", suspects=suspects)
    texts = [finding.text for finding in small_straggler(tmp_path, trigger, False, 99.2).findings]
    assert ("Of the captured ranks, actor_rank1 is the last" in "".join(texts[:1])) == bool(
        suspects
    )


def test_nobody_comes_last_without_a_stage_or_in_turn(tmp_path: Path) -> None:
    """The rollout has no collectives; and of ranks each keeps the other waiting once."""
    report = small_straggler(tmp_path, Trigger(kind="demand", stage="rollout"), False)
    assert "is the last to enter" not in " ".join(one.text for one in report.findings)
    begins = {0: (1.0, 3.4), 1: (1.4, 3.0)}
    workers = [
        Worker(
            "actor", rank, stages=[("update_actor", 0, 4)], kernels=[(REDUCE, a, 2), (REDUCE, b, 4)]
        )
        for rank, (a, b) in begins.items()
    ]
    report_of(tmp_path, [("update_actor", 0, 4)], workers, 4)
    rewrite(tmp_path, trigger=Trigger(kind="anomaly", sign="slow_stage", stage="update_actor"))
    assert "straggler" not in rules(open_step(tmp_path).report())


def test_the_outermost_stage_of_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Though a part of it may be behind by more."""
    own: list[Drawn] = [("update_actor", 0, 10)]
    workers = [
        Worker("actor", 0, stages=own, kernels=[("gemm", 0, 10)]),
        Worker("actor", 1, stages=[("update_actor", 0, 4)], kernels=[("gemm", 0, 4)]),
    ]
    report_of(tmp_path, WHOLE, workers)
    for worker, end in zip(read_manifest(tmp_path).workers, (10, 1), strict=True):
        part = msgspec.structs.replace(worker.stages[0], name="mini_batch", depth=1, end_ns=ns(end))
        rewrite_worker(tmp_path, worker.name, stages=[*worker.stages, part])
    report = open_step(tmp_path).report()
    assert [(row.stage, row.behind_us) for row in report.stragglers] == [
        ("mini_batch", 9e6),
        ("update_actor", 6e6),
    ]
    assert said(report, "straggler").text.startswith("actor_rank0 is slow in update_actor: ")


def test_a_stage_in_which_nothing_works_is_named(tmp_path: Path) -> None:
    """In seconds of all accelerators; or calling its workers took the loop that long."""
    stages = [("reward", 0, 4), ("update_actor", 4, 10)]
    own = [("update_actor", 4.0, 10.0)]
    workers = [Worker("actor", rank, stages=own, kernels=[("gemm", 4, 10)]) for rank in (0, 1)]
    report = report_of(tmp_path, stages, workers)
    finding = said(report, "idle_stage")
    assert finding.text == "In reward, all recorded lanes were idle for 4.00 s (40% of the step)."
    assert (finding.seconds, finding.lanes) == (8.0, ["actor_rank0", "actor_rank1"])
    workers[0].kernels.append(("gemm", 0, 4))
    assert "idle_stage" not in rules(report_of(tmp_path, stages, workers))
    worker = Worker("actor", stages=[("update_actor", 4, 10)], kernels=[("gemm", 4, 10)])
    finding = said(report_of(tmp_path, WHOLE, [worker]), "idle_stage")
    assert "for 4.00 s (40% of the step), while the loop called workers" in finding.text


def test_a_late_replica_is_named(tmp_path: Path) -> None:
    """In the rollout by the tail, outside of it as a straggler; lanes are those of its ranks."""
    engines = [
        engine(replica, (0, end), stages=[("rollout", 0.0, end), ("load", 5.0, 5 + end)])
        for replica, end in ((0, 1.0), (1, 4.0))
    ]
    finding = said(report_of(tmp_path, [("rollout", 0, 4), ("load", 5, 9)], engines), "straggler")
    assert finding.lanes == ["rollout1_rank0"]
    assert finding.text.startswith("rollout1 is slow in load: ")
    ends = {0: 1.0, 1: 1.2, 2: 4.0}
    engines = [engine(replica, (0, end)) for replica, end in ends.items()]
    finding = said(report_of(tmp_path, STAGES, engines), "long_tail")
    assert finding.lanes == ["rollout2_rank0"]
    late = "rollout2 was done after 4.00 s, the median is 1.20 s; with 4 tokens, the median is 4"
    assert late in finding.text


def test_a_slow_host_is_named(tmp_path: Path) -> None:
    kernels: list[Drawn] = [("k", second, second + 0.2) for second in range(10)]
    calls: list[Drawn] = [("cudaLaunchKernel", second, second + 0.1) for second in range(10)]
    report = report_of(
        tmp_path, WHOLE, [Worker("actor", stages=WHOLE, kernels=kernels, calls=calls)]
    )
    assert "while their hosts were at work" in said(report, "host_bound").text


def test_on_cpus_a_finding_speaks_of_cpus(tmp_path: Path) -> None:
    """Nothing is launched there."""
    operators: list[Drawn] = [("aten::mm", second, second + 0.5) for second in range(10)]
    workers = [Worker("actor", rank, stages=WHOLE, operators=operators) for rank in range(3)]
    report = report_of(tmp_path, WHOLE, workers)
    finding = said(report, "host_bound")
    assert "ran no operator while their hosts were at work" in finding.text
    assert not {"CUDA", "launch", "device"} & set(finding.text.replace(".", " ").split())


@pytest.mark.parametrize("on_device", [True, False])
def test_plain_traces_have_no_stages_to_speak_of(on_device: bool, tmp_path: Path) -> None:
    """Without a manifest nothing is said of stages, of the loop or of the capture."""
    busy: list[Drawn] = [("k", 0, 1), ("k", 9, 10)]
    operators: list[Drawn] = [("aten::mm", 0, 5)] if on_device else busy
    report_of(
        tmp_path, [], [Worker("actor", kernels=busy if on_device else [], operators=operators)]
    )
    report = without_manifest(tmp_path)
    assert not report.captured
    assert rules(report) == (["host_bound", "unexplained"] if on_device else ["unexplained"])
    for finding in report.findings:
        words = f"{finding.text} {finding.advice}"
        assert "stage" not in words
        assert "the capture" not in words


def test_a_loop_without_stages_is_asked_for_them(tmp_path: Path) -> None:
    """Time in no stage is what stage() names;
    a synchronising copy has words and advice of its own.
    """
    report = report_of(tmp_path, [], [Worker("actor", kernels=[("k", 0, 4)])])
    assert rules(report) == ["between_stages"]
    assert "stage()" in report.findings[0].advice
    calls: list[Drawn] = [("cudaMemcpyAsync", 0, 6)]
    report = report_of(
        tmp_path, WHOLE, [Worker("actor", stages=WHOLE, kernels=[("k", 6, 10)], calls=calls)]
    )
    assert rules(report) == ["host_blocked"]
    assert "launch" not in report.findings[0].text
    assert "pinned" in report.findings[0].advice


def test_what_is_missing_comes_first_and_the_captures_cost_last(tmp_path: Path) -> None:
    """With the lanes that are not there, however small the step."""
    calls: list[Drawn] = [("stop_capture", 8, 10)]
    actors = [
        Worker("actor", 0, stages=[("update_actor", 0, 8)], kernels=[("k", 0, 1)]),
        Worker("actor", 1, stages=[("update_actor", 0, 8)], kernels=[("k", 0, 1)]),
    ]
    report_of(tmp_path, [("update_actor", 0, 8)], actors, calls=calls)
    (tmp_path / "actor_rank1.torch.json.gz").unlink()
    report = open_step(tmp_path).report()
    assert (rules(report)[0], rules(report)[-1]) == ("coverage", "capture")
    assert report.findings[0].lanes == report.coverage.lanes == ["actor_rank1"]
    assert report.findings[0].seconds == 10.0
    assert "2.00 s of the step (20%)" in report.findings[-1].text


def test_there_are_at_most_five_and_each_has_seconds_and_lanes(tmp_path: Path) -> None:
    """Ordered by what is at stake, on a step in which much is wrong."""
    stages = [("rollout", 0, 3), ("reward", 3, 5), ("update_actor", 5, 8), ("update_weights", 8, 9)]
    own = [("update_actor", 5.0, 8.0)]
    report = report_of(
        tmp_path,
        stages,
        [
            Worker("actor", 0, stages=own, kernels=[("k", 5, 5.2), (REDUCE, 5.3, 8)]),
            Worker("actor", 1, stages=own, kernels=[("k", 5, 5.2), (REDUCE, 7, 8)]),
            engine(0, (0, 1)),
        ],
        calls=[("stop_capture", 9, 10)],
    )
    assert len(report.findings) == LIMIT
    middle = report.findings[:-1]
    assert [f.seconds for f in middle] == sorted((f.seconds for f in middle), reverse=True)
    names = {row.name for row in report.workers}
    for finding in middle:
        assert finding.seconds > 0
        assert finding.lanes
        assert set(finding.lanes) <= names


def test_advice_to_record_more_stands_behind_a_culprit(tmp_path: Path) -> None:
    """Most seconds are in no stage, or of CPU lanes without an operator;
    the slow rank comes first.
    """
    firsts = {}
    for kind in ("device", "cpu"):
        folder = tmp_path / kind
        folder.mkdir()
        own = [[("train", 0.0, end)] for end in (1.0, 2.0)]
        works = [
            {"kernels": [("gemm", *own[rank][0][1:])]}
            if kind == "device"
            else {"operators": [("aten::mm", 0.0, 0.2)]}
            for rank in range(2)
        ]
        workers = [Worker("actor", rank, stages=own[rank], **works[rank]) for rank in range(2)]
        report = report_of(
            folder, [("train", 0, 2)], workers, end=10.0 if kind == "device" else 2.1
        )
        assert report.findings[1].seconds > report.findings[0].seconds
        firsts[kind] = rules(report)
    assert firsts == {"device": ["straggler", "between_stages"], "cpu": ["straggler", "host_bound"]}


def test_a_replica_that_is_slow_at_each_token_is_advised_on_its_host(tmp_path: Path) -> None:
    """Not one whose responses are longer than the others', or that is slow but not the last."""
    advice = {}
    for case, tokens, first in (("slow", 100, 100), ("long", 200, 100), ("other", 200, 20)):
        folder = tmp_path / case
        folder.mkdir()
        engines = [
            engine(replica, (0, end), requests=[(0, end, made)])
            for replica, end, made in ((0, 2.0, first), (1, 2.0, 100), (2, 4.0, tokens))
        ]
        advice[case] = said(
            report_of(folder, [("rollout", 0, 4)], engines, end=4.5), "long_tail"
        ).advice
    assert advice["slow"].startswith(
        "compare host and device of rollout2 with those of the other replicas: "
    )
    assert advice["long"] == advice["other"] == ""


def test_a_capture_of_the_watch_names_the_replica_that_is_slow_at_each_token(
    tmp_path: Path,
) -> None:
    """Also if no other replica waits for it; without such a request, it is no finding."""
    engines = [
        engine(replica, (0, 4), requests=[(0, 4, 50 if replica == 2 else 100)])
        for replica in range(3)
    ]
    assert "slow_replica" not in rules(report_of(tmp_path, [("rollout", 0, 4)], engines))
    rewrite(tmp_path, trigger=Trigger(kind="anomaly", sign="slow_stage", stage="rollout"))
    report = open_step(tmp_path).report()
    found = said(report, "slow_replica")
    assert found.text.startswith("rollout2 takes 65.3 ms a token, the other replicas 32.3 ms")
    assert (found.lanes, round(found.seconds, 1)) == (["rollout2_rank0"], 2.0)
    (row,) = (row for row in report.workers if row.replica == 2)
    more = [*report.workers, msgspec.structs.replace(row, name="rollout2_rank1")]
    found = said(find(msgspec.structs.replace(report, workers=more)), "slow_replica")
    assert (found.lanes, round(found.seconds, 1)) == (["rollout2_rank0", "rollout2_rank1"], 4.0)


LATE = {  # begin, arrival, scheduling, first token and end of the last response (s), and its facts
    "more tokens (600 instead of 200)": ((0, 0, 0, 0.5, 3.5), {"response_tokens": 600}),
    "slower tokens (preempted 2 times)": ((0, 0, 0, 0.5, 3.5), {"preemptions": 2}),
    "queued": ((0, 0, 2.0, 2.5, 3.5), {}),
    "prefill (0 of 80 tokens cached)": ((0, 0, 0, 2.5, 3.5), {"cached_tokens": 0}),
    "sent later": ((2.0, 2.0, 2.0, 2.5, 3.5), {}),
}


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("reason", LATE)
def test_the_last_response_is_late_for_a_reason(tmp_path: Path, reason: str, replicas: int) -> None:
    """Others end after 1.5 s with 200 tokens; the parts of the delay add up to it."""
    ends = [1.5] * (replicas - 1) + [3.5]
    engines = [
        engine(replica, (0, end), requests=[(0, end, 200)]) for replica, end in enumerate(ends)
    ]
    report_of(tmp_path, [("rollout", 0, 4)], engines, end=4.5)
    for replica in range(replicas):
        times, facts = (0, 0, 0, 0.5, 1.5), {}
        if replica == replicas - 1:
            times, facts = LATE[reason]
        begin, arrival, scheduled, first, end = map(ns, times)
        facts = {"response_tokens": 200, "prompt_tokens": 80, "cached_tokens": 64, **facts}
        request = Request(
            replica=replica,
            begin_ns=begin,
            arrival_ns=arrival,
            scheduled_ns=scheduled,
            first_token_ns=first,
            last_token_ns=end,
            end_ns=end,
            **facts,
        )
        rewrite_worker(tmp_path, f"rollout{replica}", requests=[request])
    report = open_step(tmp_path).report()
    others = "the last ones of other replicas"
    text = f"; the last response ended 2.00 s later than {others}: 2.00 s {reason})"
    assert text in said(report, "long_tail").text
    assert sum(part.seconds for part in report.tail.late.parts) == pytest.approx(2.0)


def test_the_last_response_of_one_replica_is_compared_with_all_others(tmp_path: Path) -> None:
    requests = [(0, 1, 200), (0, 2, 200), (0, 3.5, 600)]
    only = engine(0, (0, 3.5), requests=requests)
    text = late_response(report_of(tmp_path, [("rollout", 0, 4)], [only], end=4.5))
    assert text.startswith(
        "; the last response ended 2.00 s later than the other responses did on average: "
    )


@pytest.mark.parametrize("stage", ["update_actor", "rollout", "reward"])
def test_the_capture_of_a_stage_has_findings_on_that_stage_only(tmp_path: Path, stage: str) -> None:
    """What else is wrong in the step was not asked for, and was recorded in part."""
    stages = [("rollout", 0, 3), ("reward", 3, 5), ("update_actor", 5, 8)]
    actors = [
        Worker("actor", rank, stages=[("update_actor", 5, end)], kernels=[("k", 5, end)])
        for rank, end in ((0, 5.5), (1, 8.0))
    ]
    engines = [engine(replica, (0, end)) for replica, end in ((0, 1.0), (1, 3.0))]
    of_stage = {
        "update_actor": {"straggler"},
        "reward": {"idle_stage"},
        "rollout": {"long_tail", "no_requests"},
    }
    everything = report_of(tmp_path, stages, [*actors, *engines], end=12)
    rewrite(tmp_path, trigger=Trigger(kind="anomaly", sign="slow_stage", stage=stage))
    of_all = {
        *of_stage["update_actor"],
        *of_stage["reward"],
        *of_stage["rollout"],
        "between_stages",
    }
    assert len({*rules(everything)} & of_all) > 2
    artifacts = [
        msgspec.structs.replace(one, stage=stage)
        for one in read_manifest(tmp_path).workers[0].artifacts
    ]
    rewrite_worker(tmp_path, "actor_rank0", artifacts=artifacts)
    said_of = {*rules(open_step(tmp_path).report())} & of_all
    assert said_of <= of_stage[stage]
    assert said_of
