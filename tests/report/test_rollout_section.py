"""The section "Rollout" of a step: what trajectories waited for, who was last, groups,
versions, statuses.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_logs import DrawnLog
from drawn_steps import Worker, drawn_inputs, engine, ns, report_of
from step_folders import read_events, rewrite, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.cli import EXIT_OK, main
from verl_profiling.files.trajectory_log import Counted, StatusChange
from verl_profiling.manifest import POLLING, Request
from verl_profiling.numbers.report_columns import CounterRow, Polling
from verl_profiling.report.colours import cause_key
from verl_profiling.report.diff import compare
from verl_profiling.report.exports import scalars
from verl_profiling.report.findings import find
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.summary_text import rollout_sentences
from verl_profiling.report.tables import TABLES
from verl_profiling.steps.trajectory_columns import OTHERS


def report_with(
    folder: Path, *logs: DrawnLog, stages: object = (("rollout", 0, 10),), **manifest: object
) -> Report:
    """Return the report of a step with one engine and these logs."""
    report_of(folder, list(stages), [engine(0, (1, 3), (5, 6), requests=[(1, 3, 10), (5, 6, 10)])])
    for log in logs:
        log.add_to(folder)
    rewrite(folder, **manifest)
    return open_step(folder).report()


def seconds(rows: object) -> dict[str, float]:
    return {row.cause: pytest.approx(row.seconds) for row in rows}


def test_a_step_without_logs_has_no_section(tmp_path: Path) -> None:
    assert report_with(tmp_path).rollout is None
    assert report_with(tmp_path, DrawnLog()).rollout is None


def test_causes_add_up_to_trajectory_time_and_the_rollout_to_its_wall_clock(tmp_path: Path) -> None:
    """Training and validation apart; behind the last trajectory,
    a span of the process and a stage go on.
    """
    log = DrawnLog()
    log.trajectory(0, 4, ("tool:search", 1, 3))
    log.trajectory(0, 6, ("tool:sandbox", 2, 6))
    log.trajectory(1, 2, ("tool:search", 1, 2), validate=True)
    log.span("wait:put_response", 6, 7)
    stages = [("rollout", 0, 10), ("wait:replay_buffer", 7, 9.5, 1)]
    rollout = report_with(tmp_path, log, stages=stages).rollout
    assert (rollout.trajectories, rollout.validation, rollout.seconds) == (2, 1, pytest.approx(10))
    training = [row for row in rollout.causes if not row.validate]
    assert seconds(training) == {"tool:sandbox": 4, "own code": 4, "tool:search": 2}
    assert {row.cause: row.trajectories for row in training}["own code"] == 2
    assert seconds(row for row in rollout.causes if row.validate) == {"tool:search": 1}
    assert sum(row.seconds for row in rollout.time) == pytest.approx(10)
    found = seconds(rollout.time)
    assert (
        found["wait:put_response"],
        found["controller: wait:replay_buffer"],
        found["unexplained"],
    ) == (
        1,
        2.5,
        0.5,
    )
    assert rollout.explained == pytest.approx(0.95)


def test_idle_time_behind_the_last_replica_has_names(tmp_path: Path) -> None:
    """What trajectories, processes and the loop did, in lane-seconds that add up to the cause's."""
    log = DrawnLog()
    log.trajectory(0, 8, ("tool:sandbox", 3, 5), ("reward", 6, 8))
    stages = [("rollout", 0, 10), ("wait:replay_buffer", 8, 10, 1)]
    report = report_with(tmp_path, log, stages=stages)
    lost = {row.cause: row for row in report.lost}
    assert lost["after_generation"].parts == {
        "reward": pytest.approx(2),
        "controller: wait:replay_buffer": pytest.approx(2),
    }
    assert lost["no_requests"].parts == {"tool:sandbox": pytest.approx(2)}
    assert "host_bound" not in lost
    for row in report.lost:
        assert sum(row.parts.values()) == pytest.approx(row.seconds if row.parts else 0)


def test_a_request_that_ends_during_a_look_makes_the_rollout(tmp_path: Path) -> None:
    """The look that began before its end, at 6 s, found it."""
    looks = [(POLLING, 1, 3.4, 1), (POLLING, 3.5, 5.9, 1), ("list", 5.95, 6.1, 1)]
    report = report_with(tmp_path, DrawnLog(), stages=[("rollout", 0, 7), *looks])
    decode_us = sum(row.duration_us for row in report.critical_path if row.kind == "decode")
    assert decode_us == pytest.approx(2_400_000)


def test_polling_costs_what_the_trainer_sleeps_after_the_last_response(tmp_path: Path) -> None:
    """Before that it waits for trajectories; a part of validation, outside of the rollout,
    is none of it.
    """
    log = DrawnLog()
    log.trajectory(0, 2, ("decode", 0, 2))
    log.trajectory(0, 6.5, ("decode", 0, 6.5))
    log.trajectory(0, 8.8, validate=True)
    sleeps = [(POLLING, begin, begin + 2, 1) for begin in (1, 3.2, 5.4)]
    stages = [("rollout", 0, 8), *sleeps, ("validate", 8, 10), (POLLING, 8.5, 9.5, 1)]
    report = report_with(tmp_path, log, stages=stages)
    assert report.rollout.polling == Polling(
        pauses=3,
        interval_s=pytest.approx(2),
        seconds=pytest.approx(6),
        late_s=pytest.approx(0.9),
        late_share=pytest.approx(0.09),
    )
    alone = find(msgspec.structs.replace(report, devices=[]))  # without findings on its devices
    [finding] = [found for found in alone.findings if found.rule == "polling"]
    assert finding.text == (
        "The trainer slept 900 ms (9% of the step) after the last response was there: "
        "it polls its replay buffer every 2.00 s."
    )
    assert "poll_interval" in finding.advice
    assert (
        "polling the replay buffer: 3 times, every 2.00 s; the trainer slept 900 ms (9.0% of "
        "the step) after "
        "the last response was there"
    ) in rollout_sentences(report.rollout)
    assert [(row.name, row.depth) for row in report.stages][:2] == [("rollout", 0), (POLLING, 1)]


def test_a_finding_on_polling_stands_for_the_idle_time_behind_it(tmp_path: Path) -> None:
    """What lanes wait for after the generation is said once;
    of another stage it is said as before.
    """
    log = DrawnLog()
    log.trajectory(0, 6, ("reward", 0, 6))
    rules = {}
    for name in (POLLING, "other"):
        (tmp_path / name).mkdir()
        report = report_with(tmp_path / name, log, stages=[("rollout", 0, 10), (name, 6, 10, 1)])
        rules[name] = {finding.rule for finding in report.findings} & {
            "polling",
            "after_generation",
        }
    assert rules == {POLLING: {"polling"}, "other": {"after_generation"}}


def test_a_block_that_no_sample_saw_has_no_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is anything to be run in a thread: in the table,
    the finding and on the timeline it is unknown.
    """
    log = DrawnLog()
    asking = log.trajectory(0, 5, ("tokenize", 1, 4))
    log.trajectory(0, 5, ("tool:search", 1, 4))
    log.block(1, 4)
    log.block(4.5, 4.7, asking)
    report = report_with(tmp_path, log)
    [row] = report.rollout.blocks
    assert (row.what, row.function, row.blocks, row.trajectories) == ("unknown", "", 2, 2)
    [said] = [finding for finding in report.findings if finding.rule == "loop_blocked"]
    assert said.text.startswith(
        "Something unknown blocked the event loop of agent_loop_rank0 for 3.20 s, 2 t"
    )
    assert "in a thread" not in said.advice
    assert main(["merge", str(tmp_path)]) == 0
    shown = read_events(Path(capsys.readouterr().out.split()[0]))
    assert {event["name"] for event in shown if event.get("cat") == "block"} == {"unknown"}


@pytest.mark.parametrize(
    ("sleeps", "polling"),
    [
        ([], None),
        ([(POLLING, 9, 10, 1)], None),  # outside of the rollout
        (
            [(POLLING, 1, 2, 1), (POLLING, 6, 7, 1)],
            (2, 0),
        ),  # two rollouts, each with its own last one
        ([(POLLING, 2, 3.5, 1), (POLLING, 7, 8, 1)], (2, 1.0)),
    ],
)
def test_each_rollout_of_a_step_has_its_last_response(
    tmp_path: Path, sleeps: list[object], polling: tuple[int, float] | None
) -> None:
    """A trainer that looks in time lost nothing, and one that does not poll has no row."""
    log = DrawnLog()
    log.trajectory(0, 3)
    log.trajectory(5, 7.5)
    report = report_with(tmp_path, log, stages=[("rollout", 0, 4), ("rollout", 5, 8), *sleeps])
    found = report.rollout.polling
    assert (found and (found.pauses, pytest.approx(found.late_s))) == polling


def test_tools_have_percentiles_and_the_last_are_behind_the_bend(tmp_path: Path) -> None:
    """Of 40 trajectories one takes six seconds longer; spans count by role and name."""
    log = DrawnLog()
    for number in range(10):
        mine = log.trajectory(0, 10)
        log.span("tool:search", 1, 2 + number / 10, trajectory=mine, failed=number == 0)
    log.span("tool:search", 5, 6)
    calls = {row.name: row for row in report_with(tmp_path, log).rollout.calls}
    row = calls["tool:search"]
    assert (row.role, row.calls, row.failed) == ("agent_loop", 11, 1)
    assert (row.p50_s, row.longest_s) == (pytest.approx(1.4), pytest.approx(1.9))
    log = DrawnLog()
    for number in range(39):
        log.trajectory(0, 3 + number / 39, ("tool:search", 0, 2))
    log.trajectory(0, 10, ("tool:search", 0, 5), ("tool:sandbox", 5, 10))
    last = report_with(tmp_path, log).rollout.last
    assert (last.trajectories, last.of) == (1, 40)
    assert last.share == pytest.approx((10 - 3 - 38 / 39) / 10)
    assert seconds(last.parts) == {"tool:sandbox": 5, "tool:search": pytest.approx(1 + 1 / 39)}
    assert sum(part.share for part in last.parts) == pytest.approx(1)


def test_the_next_batch_is_no_peer_of_the_last_one_from_before(tmp_path: Path) -> None:
    """And the tail of a batch that the end of the step cuts is not over."""
    log = DrawnLog()
    log.trajectory(-3, 2, ("generate", -3, 2))
    for _ in range(15):
        log.trajectory(3, 4, ("generate", 3, 4))
    log.trajectory(3, 30, ("generate", 3, 30), status="running")
    report = report_with(tmp_path, log)
    last = report.rollout.last
    assert (last.trajectories, last.of, last.seconds, last.is_over) == (1, 16, 6, False)
    [finding] = [row for row in report.findings if row.rule == "last_trajectories"]
    assert finding.text.startswith("In the last recorded 6.00 s, 60% of the 10.0 s")
    assert "only 1 of 16 trajectories still run" in finding.text
    assert finding.text.endswith("The recording ends before they do.")


def test_what_blocks_a_loop_is_named_with_those_that_stood_still(tmp_path: Path) -> None:
    """Two of three trajectories stand still; trackers and comparisons have it too."""
    log = DrawnLog()
    mine = log.trajectory(0, 6)
    number = log.span("tool:search", 2, 5, trajectory=mine)
    log.trajectory(0, 6, ("tool:http", 1, 5.01))
    log.trajectory(0, 5, ("tool:http", 1, 1.5))
    log.block(2, 5, number, "tools.search (tools.py:3)")
    report = report_with(tmp_path, log)
    rollout = report.rollout
    (row,) = rollout.blocks
    assert (row.lane, row.what, row.function) == (
        "agent_loop_rank0",
        "tool:search",
        "tools.search (tools.py:3)",
    )
    assert (row.blocks, row.seconds, row.longest_s) == (1, 3, 3)
    assert (row.trajectories, row.stood_still_s) == (2, pytest.approx(6))
    assert seconds(rollout.causes)["loop lag"] == 6
    found = dict(scalars(report))
    assert (found["trajectories/count"], found["trajectories/loop_lag_s"]) == (3, pytest.approx(6))
    changes = {(change.kind, change.name): change for change in compare([report], [report]).changes}
    assert changes["trajectory", "loop lag"].before_s == pytest.approx(6)


def test_requests_with_and_without_times_of_the_engine_are_compared_as_one(tmp_path: Path) -> None:
    """Where both sides have the times, the parts of a request stay apart."""
    log = DrawnLog()
    log.trajectory(0, 4, ("generate", 0, 4))
    joined = report_with(tmp_path, log)
    (row,) = joined.rollout.causes
    times = {"queued": 0.5, "prefill": 0.5, "decode": 3.0}
    parts = [msgspec.structs.replace(row, cause=name, seconds=took) for name, took in times.items()]
    apart = msgspec.structs.replace(
        joined, rollout=msgspec.structs.replace(joined.rollout, causes=parts)
    )
    for before, after in ((joined, apart), (apart, joined)):
        (change,) = (one for one in compare([before], [after]).changes if one.kind == "trajectory")
        assert (change.name, change.before_s, change.after_s) == ("generate", 4.0, 4.0)
    found = {
        one.name: one.after_s
        for one in compare([apart], [apart]).changes
        if one.kind == "trajectory"
    }
    assert found == times


def test_a_group_is_done_with_its_last_member(tmp_path: Path) -> None:
    """Members may be in several processes; validation and single trajectories are in none."""
    first, second = DrawnLog(0), DrawnLog(1)
    first.trajectory(0, 2, group="a")
    first.trajectory(0, 3, group="a")
    second.trajectory(0, 8, ("tool:sandbox", 3, 8), group="a")
    second.trajectory(0, 1, group="b")
    second.trajectory(0, 4, group="b", status="running")
    second.trajectory(0, 4, group="alone")
    second.trajectory(0, 4, group="v", validate=True)
    second.trajectory(0, 5, group="v", validate=True)
    rollout = report_with(tmp_path, first, second).rollout
    assert [(row.group, row.members, row.last_cause, row.whole) for row in rollout.groups] == [
        ("a", 3, "tool:sandbox", True),
        ("b", 2, "own code", False),
    ]
    row = rollout.groups[0]
    assert (row.first_s, row.last_s, row.waited_s) == (2, 8, pytest.approx(11))
    assert (rollout.groups_seen, rollout.group_waited_s) == (2, pytest.approx(14))
    assert (rollout.group_spread_p50_s, rollout.group_spread_max_s) == (4.5, 6)


def test_versions_are_those_that_the_loop_says_or_else_those_of_the_requests(
    tmp_path: Path,
) -> None:
    """Against the version that the step trains; a trajectory of several is partial."""
    log = DrawnLog()
    log.trajectory(0, 4, min_version=5, max_version=6)
    log.trajectory(0, 4, min_version=6, max_version=6)
    third = log.trajectory(0, 4)
    log.span("generate", 1, 2, trajectory=third, request="old")
    log.span("generate", 2, 3, trajectory=third, request="new")
    log.trajectory(0, 4)
    log.trajectory(0, 4, min_version=1, max_version=1, validate=True)
    report_with(tmp_path, log, policy_version=6)
    facts = {"replica": 0, "prompt_tokens": 1, "response_tokens": 7}
    requests = [
        Request(id=id, begin_ns=ns(at), end_ns=ns(at + 1), policy_version=version, **facts)
        for id, at, version in (("old", 1, 4), ("new", 2, 6))
    ]
    rewrite_worker(tmp_path, "rollout0", requests=requests)
    rollout = open_step(tmp_path).report().rollout
    found = [
        (r.version, r.behind, r.oldest, r.newest, r.segments, r.segment_tokens)
        for r in rollout.versions
    ]
    assert found == [(6, 0, 1, 3, 1, 7), (5, 1, 1, 0, 0, 0), (4, 2, 1, 0, 1, 7)]
    assert (rollout.versioned, rollout.partial) == (3, 2)


def test_what_became_of_trajectories_has_its_cost(tmp_path: Path) -> None:
    """By status, also where it was said later; validation apart."""
    log = DrawnLog()
    log.trajectory(0, 4, ("tool:a", 0, 1), ("tool:b", 1, 2), group="kept")
    log.trajectory(0, 3, group="boring")
    log.trajectory(0, 1, group="x", status="failed")
    log.trajectory(0, 5, group="v", validate=True)
    log.log.statuses = [StatusChange("boring", None, "filtered", ns(9))]
    rows = report_with(tmp_path, log).rollout.statuses
    assert [(row.validate, row.status, row.trajectories, row.seconds) for row in rows] == [
        (False, "done", 1, 4),
        (False, "filtered", 1, 3),
        (False, "failed", 1, 1),
        (True, "done", 1, 5),
    ]
    assert [row.share for row in rows] == [0.5, 0.375, 0.125, 1]


def test_the_queue_for_a_sandbox_is_a_cause(tmp_path: Path) -> None:
    """Its start, commands and stop are causes too, of one colour."""
    log = DrawnLog(0)
    number = log.trajectory(0, 10)
    for name, begin, end in (
        ("queue", 0, 7),
        ("start", 7, 8),
        ("command", 8, 9.5),
        ("stop", 9.5, 10),
    ):
        log.span(f"sandbox:{name}", begin, end, trajectory=number)
    report = report_with(tmp_path, log)
    shares = {row.cause: row.share for row in report.rollout.causes}
    expected = {
        "sandbox:queue": 0.7,
        "sandbox:command": 0.15,
        "sandbox:start": 0.1,
        "sandbox:stop": 0.05,
    }
    assert shares == pytest.approx(expected)
    assert {cause_key(cause) for cause in shares} == {"s8"}
    (finding,) = [one for one in report.findings if one.rule == "trajectory_cause"]
    assert "sandbox:queue" in finding.text


def test_the_usual_time_of_a_tool_fails_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed, as the engine is busy meanwhile."""
    report_of(tmp_path, [("rollout", 0, 10)], [engine(0, (0, 10), requests=[(0, 10, 10)])])
    log = DrawnLog(0)
    log.trajectory(0, 10, ("tool:search", 1, 9))
    log.trajectory(0, 10, ("generate", 0, 10))
    log.add_to(tmp_path)
    assert main(["report", "--verdict", str(tmp_path)]) == EXIT_OK
    assert "40% of the trajectories' time (8.00 s) is tool `search`" in capsys.readouterr().out


def test_failed_trajectories_have_their_error_and_the_span_they_were_in(tmp_path: Path) -> None:
    """On one line, counted over processes, with an example; validation is last."""
    logs = [DrawnLog(0), DrawnLog(1)]
    for log in logs:
        error = "ValueError: no\nsuch   row " + "x" * 500
        number = log.trajectory(1, 4, group="g7", status="failed", error=error)
        log.span("environment:step", 1, 4, trajectory=number, failed=True)
        log.span("tool:<b>", 2, 4, trajectory=number, failed=True)
        log.span("tool:fine", 3, 3.5, trajectory=number)
        log.span("tool:background", 3.6, 4, trajectory=number, still_open=True)
        log.trajectory(1, 4, status="failed")
    number = logs[0].trajectory(1, 4, status="cancelled", error="E0", sample=None)
    logs[0].span("tool:slow", 2, 4, trajectory=number, still_open=True)
    logs[0].trajectory(1, 4, status="cancelled", error="E2", validate=True)
    logs[0].trajectory(20, 21, group="g7", status="failed", error=error)
    report = report_with(tmp_path, *logs)
    first, second, validation = report.rollout.failures
    assert (first.trajectories, first.status, first.span, first.example) == (
        2,
        "failed",
        "tool:<b>",
        "g7/0",
    )
    assert first.error.startswith("ValueError: no such row xxx")
    assert len(first.error) == 120
    assert (second.span, second.example, second.status) == ("tool:slow", "g", "cancelled")
    assert (validation.error, validation.span, validation.validate) == ("E2", "", True)


def test_a_log_that_cannot_be_read_is_missing_and_the_others_count(tmp_path: Path) -> None:
    first, second = DrawnLog(0), DrawnLog(1)
    first.trajectory(0, 4)
    second.trajectory(0, 4)
    report_with(tmp_path, first, second)
    (tmp_path / "agent_loop_rank1.trajectories.jsonl.gz").write_bytes(b"no gzip")
    report = open_step(tmp_path).report()
    assert report.rollout.trajectories == 1
    assert (report.coverage.read, report.coverage.expected) == (2, 3)
    assert any("agent_loop_rank1" in sentence for sentence in report.coverage.missing)
    assert "agent_loop_rank1" in report.coverage.lanes
    assert "agent_loop_rank0" not in report.coverage.lanes


def test_what_blocks_many_processes_is_one_finding(tmp_path: Path) -> None:
    """With all of them, their time added up; what blocked is not named twice,
    nor lost behind other names.
    """
    loops = "loops of agent_loop_rank0, agent_loop_rank1, agent_loop_rank2 and 27 more"
    logs = [DrawnLog(rank) for rank in range(30)]
    for log in logs:
        mine = log.trajectory(0, 4)
        number = log.span("tool:lookup", 1, 2, trajectory=mine)
        log.trajectory(0, 4, ("tool:http", 0.5, 2.001), ("tool:http", 2.2, 3.001))
        log.block(1, 2, number, "tool:lookup")
        log.block(2.5, 3, function="json.loads (json.py:3)")
    report = report_with(tmp_path, *logs)
    said = [finding for finding in report.findings if finding.rule == "loop_blocked"]
    first, second = said
    assert first.text == (
        f"Tool `lookup` blocked the event {loops} for 30.0 s together, 30 times: 30 "
        "trajectories stood "
        "still, for 30.0 s in total."
    )
    assert f"son.loads (json.py:3) blocked the event {loops} for " in second.text
    assert "(in " not in second.text
    assert sorted(first.lanes) == sorted(log.log.lane for log in logs)
    assert first.seconds == pytest.approx(len(report.workers))
    causes = [row.cause for row in TABLES["trajectory_causes"].rows_shown(report)]
    assert "loop lag: tool:lookup" in causes


def test_loop_lag_has_no_name_where_no_blocker_made_up_most_of_it(tmp_path: Path) -> None:
    log = DrawnLog()
    mine = log.trajectory(0, 4)
    number = log.span("tool:lookup", 1, 2, trajectory=mine)
    log.trajectory(0, 4, ("tool:http", 0.5, 2.001), ("tool:http", 2.2, 3.501))
    log.block(1, 2, number, "tool:lookup")
    log.block(2.5, 3.5, function="json.loads (json.py:3)")
    causes = [
        row.cause for row in TABLES["trajectory_causes"].rows_shown(report_with(tmp_path, log))
    ]
    assert [cause for cause in causes if cause.startswith("loop lag")] == ["loop lag"]


def test_thousands_of_names_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    """Of tools, groups, statuses and functions; of tools,
    the first have rows and the others one.
    """
    log = DrawnLog()
    for number in range(1_500):
        begin = number / 200
        mine = log.trajectory(
            begin,
            begin + 2,
            (f"tool:{number}" + "x" * 500, begin, begin + 1),
            group="g" * number,
            status=f"status {number}",
        )
        log.block(begin, begin + 0.004, mine, "f" * 1_000)
    report = report_with(tmp_path, log)
    rollout = report.rollout
    assert OTHERS in {row.cause for row in rollout.causes} & {row.name for row in rollout.calls}
    assert len(rollout.causes) < 110
    assert sum(row.seconds for row in rollout.causes) == pytest.approx(rollout.seconds)
    assert sum(row.trajectories for row in rollout.statuses) == 1_500
    assert len(render_html(report)) < 610_000


def counted(folder: Path, *counts: tuple[str, float, float], clock_ns: int = 0) -> Report:
    """Return the report of a step of 10 s in which a process counted, at these seconds."""
    drawn_inputs(folder, [("rollout", 0, 10)], [Worker("actor")])
    log = DrawnLog(clock_ns=clock_ns)
    log.log.counts += [Counted(name, log.ns(at), value) for name, at, value in counts]
    log.add_to(folder)
    return open_step(folder).report()


def row(name: str, samples: int, last: float, mean: float, most: float) -> CounterRow:
    return CounterRow(
        lane="agent_loop_rank0",
        name=name,
        samples=samples,
        last=last,
        mean=mean,
        max=pytest.approx(most),
    )


def test_a_count_holds_until_the_next(tmp_path: Path) -> None:
    """On the controller's clock; the mean is over time."""
    report = counted(
        tmp_path, ("queue", -4, 99), ("queue", -1, 2), ("queue", 5, 6), ("queue", 10.5, 500)
    )
    assert report.counters == [row("queue", 1, 6.0, 4.0, 6.0)]
    report = counted(tmp_path, ("queue", 5, 6), ("in flight", 6, 3), clock_ns=3600 * 10**9)
    assert [(one.name, one.samples, one.mean) for one in report.counters] == [
        ("queue", 1, 6.0),
        ("in flight", 1, 3.0),
    ]


def test_the_finding_on_a_tool_that_the_watch_suspects_comes_first(tmp_path: Path) -> None:
    """Though another tool took longer, and all trajectories taught nothing."""
    log = DrawnLog()
    for _ in range(4):
        log.trajectory(0, 10, ("tool:search", 1, 4), ("tool:run", 4, 9), status="timeout")
    report = report_with(tmp_path, log)
    assert report.findings[0].rule == "trajectories_for_nothing"
    for suspect in ({"suspects": ["tool:search"]}, {"span": "tool:search", "suspects": []}):
        trigger = Trigger(kind="anomaly", sign="slow_span", **suspect)
        rewrite(tmp_path, trigger=trigger)
        first = open_step(tmp_path).report().findings[0]
        assert (first.rule, first.text[:4]) == ("trajectory_cause", "30% ")
        assert "is tool `search`" in first.text
