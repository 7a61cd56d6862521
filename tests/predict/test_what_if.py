"""Critical paths and predictions of steps that are drawn by hand,
through the API and the command.
"""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn_logs import DrawnLog
from drawn_steps import STAGES, Drawn, Worker, drawn_inputs, engine, in_group, ns
from quiet_steps import with_stages
from step_folders import read_events, rewrite, rewrite_worker
from step_outcome import printed

from verl_profiling.analysis import CapturedStep, open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import RankUse, Saving, StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import POLLING
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS
from verl_profiling.predict.changes import ChangeKeywords, Changes
from verl_profiling.predict.prediction import Prediction
from verl_profiling.report.tables import TABLES
from verl_profiling.watch.log_writer import WatchLog
from verl_profiling.watch.stage_numbers import exposed

WORKS = [("gemm", 5.2, 5.4)]

PACED = (
    "how long the loop then waits for the rollout in the background is not recorded, so a "
    "prediction is an interval, and nothing is offered; the watch has the waits of all steps"
)


def path_of(found: Prediction) -> list[tuple[str, str, str, float]]:
    """Return stage, process, kind and seconds of the path; the parts follow each other."""
    begin_us = 0.0
    for row in found.path:
        assert row.begin_us == pytest.approx(begin_us)
        begin_us += row.duration_us
    assert begin_us == pytest.approx(found.predicted_us)
    return [
        (row.stage, row.who, row.kind, pytest.approx(row.duration_us / 1e6)) for row in found.path
    ]


def predicted_s(step: CapturedStep, **changes: Any) -> float:
    """Return how long a step is predicted to take (s), for comparisons."""
    return pytest.approx(step.what_if(**changes).predicted_us / 1e6)


def test_type_checkers_know_the_keywords_of_a_change() -> None:
    """A wrong name or type is an error before the program runs."""
    assert CapturedStep.what_if.__annotations__["changes"] == "Unpack[ChangeKeywords]"
    assert [*ChangeKeywords.__annotations__] == [*Changes.__struct_fields__]


def slack_of(found: Prediction) -> dict[tuple[str, str], float]:
    return {(row.stage, row.who): pytest.approx(row.slack_us / 1e6) for row in found.slack}


def drawn(
    folder: Path, log: DrawnLog, stages: Sequence[Any], *more: Any, **end: Any
) -> CapturedStep:
    """Draw a step with trajectories."""
    drawn_inputs(folder, stages, *(more or [[]]), **end)
    log.add_to(folder)
    return open_step(folder)


def synchronous(folder: Path) -> None:
    """Draw a step of two engines and two ranks, each pair called by a stage of the loop."""
    workers = [
        engine(0, (0.2, 3.8), stages=[("rollout", 0.1, 3.9)]),
        engine(1, (0.2, 1.9), stages=[("rollout", 0.1, 2.0)]),
        Worker("actor", 0, stages=[("update_actor", 5.1, 7.9)], kernels=WORKS),
        Worker("actor", 1, stages=[("update_actor", 5.1, 7.0)], kernels=WORKS),
    ]
    drawn_inputs(folder, STAGES, workers)


def test_the_path_of_a_synchronous_step_follows_the_last_worker_of_each_stage(
    tmp_path: Path,
) -> None:
    synchronous(tmp_path)
    found = open_step(tmp_path).what_if()
    assert path_of(found) == [
        ("rollout", "controller", "own code", 0.1),
        ("rollout", "rollout0", "work", 3.8),
        ("rollout", "controller", "own code", 0.1),
        ("reward", "controller", "own code", 1.0),
        ("update_actor", "controller", "own code", 0.1),
        ("update_actor", "actor_rank0", "work", 2.8),
        ("update_actor", "controller", "own code", 0.1),
        ("update_weights", "controller", "own code", 1.0),
        ("(outside stages)", "controller", "own code", 1.0),
    ]
    slack = slack_of(found)
    assert slack["rollout", "rollout1"] == 1.9
    assert slack["update_actor", "actor_rank1"] == 0.9
    assert slack["update_actor", "actor_rank0"] == slack["reward", "controller"] == 0
    assert found.assumed == [
        "a stage of the loop waits for the stages of workers with its name (4)"
    ]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"scale": {"rollout": 0.5}}, 8.0),
        ({"scale": {"rollout": 0.5, "update_actor": 2.0}}, 11.0),
        ({"balance": ["update_actor"]}, 10 - 0.45),
        ({"balance": ["rollout"]}, 10 - 0.95),
    ],
)
def test_a_change_moves_all_that_waits_for_it(
    tmp_path: Path, changes: dict, seconds: float
) -> None:
    synchronous(tmp_path)
    found = open_step(tmp_path).what_if(**changes)
    assert found.predicted_us == pytest.approx(seconds * 1e6)
    assert found.span_us == pytest.approx(10e6)
    path_of(found)


def test_changes_are_ranked_by_what_they_bring(tmp_path: Path) -> None:
    synchronous(tmp_path)
    helps = open_step(tmp_path).what_if().what_would_help
    assert [row.option for row in helps[:2]] == ["--scale rollout=0.5", "--scale update_actor=0.5"]
    saved = {row.option: pytest.approx(-row.difference_us / 1e6) for row in helps}
    assert saved["--balance rollout"] == 0.95
    assert saved["--scale update_weights=0.5"] == 0.5
    assert (helps[0].hours_a_day, helps[0].unit) == (pytest.approx(0.2 * 4 * 24), "GPU-hours")


def test_the_ranked_list_predicts_what_each_option_predicts(tmp_path: Path) -> None:
    log, tried = DrawnLog(), set()
    for number in range(12):
        log.trajectory(0.2, 3 + number / 10, ("tool:web search", 1, 2.41))
    blocking = log.trajectory(0.2, 3)
    log.block(1.4, 2.4, log.span("tool:my sandbox", 1.4, 2.4, blocking), "agent.run (agent.py:7)")
    step = drawn(tmp_path, log, [("rollout", 0, 4.1), ("update_actor", 5, 9)])
    for row in step.what_if().what_would_help:
        option, value = shlex.split(row.option)
        name, _, number = value.partition("=")
        changes = {
            "--scale": {"scale": {name: 0.5}},
            "--tools": {"tools": {name: number}},
            "--unblock": {"unblock": [name]},
            "--no-tail": {"no_tail": 90.0},
        }
        assert step.what_if(**changes[option]).predicted_us == pytest.approx(row.predicted_us)
        tried.add(option)
    assert tried == {"--scale", "--tools", "--unblock", "--no-tail"}


def test_a_lack_of_cpu_is_not_unblocked_by_a_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that blocks is; its advice is another one."""
    log = DrawnLog()
    log.trajectory(0.2, 3, ("tool:search", 0.4, 1.51), ("tool:search", 1.55, 2.41))
    log.block(0.5, 1.5, function="a lack of CPU")
    log.block(1.6, 2.4, function="agent.run (agent.py:7)")
    step = drawn(tmp_path, log, [("rollout", 0, 4.1), ("update_actor", 5, 9)])
    report = step.report()
    advice = {f.text.split(" blocked")[0]: f.advice for f in report.findings if "blocked" in f.text}
    assert advice.pop("A lack of CPU") == (
        "give this host more CPUs, or run fewer processes and threads on it"
    )
    assert "thread" in advice["Agent.run (agent.py:7)"]
    offered = [row.option for row in report.what_would_help if "--unblock" in row.option]
    assert offered == ["--unblock 'agent.run (agent.py:7)'"]
    assert main(["what-if", str(tmp_path), "--unblock", "a lack of CPU"]) == 2
    assert "agent.run" in capsys.readouterr().err


def test_after_a_change_the_next_ones_are_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has the step with both; a factor of the same stage is the product of both factors."""
    synchronous(tmp_path)
    given = ["--scale", "rollout=0.5", "--balance", "update_actor"]
    assert main(["what-if", str(tmp_path), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    saved = {row["option"]: -row["difference_us"] for row in found["what_would_help"]}
    assert next(iter(saved)) == "--scale update_actor=0.5"
    assert saved["--scale rollout=0.25"] == pytest.approx(1e6)
    assert not any("--balance update_actor" in option for option in saved)
    for row in found["what_would_help"]:
        assert main(["what-if", str(tmp_path), *given, *shlex.split(row["option"]), "--json"]) == 0
        both = json.loads(capsys.readouterr().out)
        assert both["predicted_us"] == pytest.approx(row["predicted_us"])
    assert main(["what-if", str(tmp_path), *given]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    kinds = lines[lines.index("Critical path by kind") :]
    assert [line.split()[:2] for line in kinds[3:5]] == [["work", "4.25"], ["own", "code"]]
    assert any("update_actor in 50% of its time" in line for line in kinds)


def test_after_a_change_of_a_tool_its_new_time_is_halved(tmp_path: Path) -> None:
    agents(tmp_path)
    for changes, option in (
        ({"tools": {"search": 0.5}}, "--tools search=0.25s"),
        ({"tools": {"search": "0.5x"}}, "--tools search=0.25x"),
        ({"scale": {"rollout": 0.5}}, "--tools search=0.5x"),
    ):
        found = open_step(tmp_path).what_if(**changes)
        (row,) = (row for row in found.what_would_help if row.option.startswith("--tools"))
        assert (row.option, row.change) == (option, "search in 50% of its time")
        assert row.difference_us == pytest.approx(-0.25e6)


@pytest.mark.parametrize(("late_s", "is_offered"), [(0.2, False), (1.0, True)])
def test_workers_that_differ_as_equal_steps_do_are_balanced(
    tmp_path: Path, late_s: float, is_offered: bool
) -> None:
    """No change is offered that may be the noise of equal work."""
    ranks = [
        Worker("actor", 0, stages=[("update_actor", 5.1, 6.9)], kernels=WORKS),
        Worker("actor", 1, stages=[("update_actor", 5.1, 6.9 + late_s)], kernels=WORKS),
    ]
    drawn_inputs(tmp_path, STAGES, ranks)
    offers = {row.option for row in open_step(tmp_path).what_if().what_would_help}
    assert ("--balance update_actor" in offers) is is_offered


def test_path_and_changes_are_part_of_the_report(tmp_path: Path) -> None:
    """As in the prediction. Of the halved stages, tables show the best one, unless it has a change
    of its own, and no sentence of the watch has another answer beside them.
    """
    folder = tmp_path / "step_000001"
    folder.mkdir()
    synchronous(folder)
    helps = Saving(stage="reward", change="half", saves_ns=10**9)
    WatchLog(tmp_path)(
        StepSummary(step=1, begin_ns=1, end_ns=10**10, captured=folder.name, helps=helps)
    )
    found, report = open_step(folder).what_if(), open_step(folder).report()
    assert (report.critical_path, report.what_would_help) == (found.path, found.what_would_help)
    shown = [row.option for row in TABLES["what_would_help"].rows_shown(report)]
    assert shown == ["--balance rollout", "--balance update_actor"]
    assert re.search("rollout balanced  +--balance rollout", printed(report, 100, everything=False))
    slight = [row for row in report.what_would_help if row.option != "--balance rollout"]
    less = msgspec.structs.replace(report.what_would_help[0], option="--no-tail 90")
    slight.append(msgspec.structs.replace(less, stage="rollout", difference_us=-0.4e6))
    report = msgspec.structs.replace(report, what_would_help=slight)
    [first, *_] = TABLES["what_would_help"].rows_shown(report)
    assert first.option == "--scale rollout=0.5", "a part of it hides it not"
    for everything in (False, True):
        assert "most would help" not in printed(report, 100, everything=everything)
    without = msgspec.structs.replace(report, what_would_help=[])
    assert "most would help: reward" in printed(without, 100, everything=False)


def test_a_failed_prediction_costs_two_tables_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronous(tmp_path)
    monkeypatch.setattr("verl_profiling.report.build.graph_of", lambda content: 1 / 0)
    report = open_step(tmp_path).report()
    assert report.coverage.missing == [
        "no critical path and no changes that would help: ZeroDivisionError: division by zero"
    ]
    assert (report.critical_path, report.what_would_help, len(report.workers)) == ([], [], 4)


def test_the_path_is_the_first_process_of_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the option; a part of the step has its part of the path,
    and an error costs the path alone.
    """
    synchronous(tmp_path)
    assert main(["merge", str(tmp_path)]) == 0
    events = read_events(Path(capsys.readouterr().out.split()[0]))
    assert not any(event.get("cat") == "critical path" for event in events)
    for stage, parts in ([], 9), (["--stages", "reward"], 2):
        assert main(["merge", str(tmp_path), "--critical-path", *stage]) == 0
        events = read_events(Path(capsys.readouterr().out.split()[0]))
        slices = [event for event in events if event.get("cat") == "critical path"]
        assert len(slices) == parts
        assert stage or sum(event["dur"] for event in slices) == pytest.approx(10e6)
        assert {event["pid"] for event in slices} == {min(event["pid"] for event in events)}
    monkeypatch.setattr("verl_profiling.steps.read.read_step", lambda *given: 1 / 0)
    assert main(["merge", str(tmp_path), "--critical-path"]) == 1
    assert "critical path: ZeroDivisionError" in capsys.readouterr().err


def test_a_rollout_beside_the_training_is_not_on_the_path(tmp_path: Path) -> None:
    """One step off: the loop waits for the responses of the last step,
    and trains while new ones are made.
    """
    workers = [
        engine(
            0,
            (0.0, 2.9),
            (3.2, 9.9),
            requests=[(-4, 2.9, 9), (3.2, 6.0, 9), (3.2, 7.9, 9), (4, 9.5, 9)],
        ),
        Worker("actor", 0, stages=[("update_actor", 3.1, 7.8)], kernels=WORKS),
    ]
    drawn_inputs(tmp_path, [("rollout", 0, 3), ("update_actor", 3, 8)], workers)
    found = open_step(tmp_path).what_if()
    assert path_of(found)[-3:] == [
        ("update_actor", "actor_rank0", "work", 4.7),
        ("update_actor", "controller", "own code", 0.2),
        ("(outside stages)", "controller", "own code", 2.0),
    ]
    assert [row.who for row in found.path][:2] == ["rollout0", "controller"]
    assert slack_of(found)["(outside stages)", "rollout0"] == 0.5
    assert found.notes[0].startswith("rollout waits for work that began before the step")


def test_stages_of_two_tasks_of_the_loop_run_side_by_side(tmp_path: Path) -> None:
    drawn_inputs(
        tmp_path, [("rollout", 0, 6), ("update_actor", 1, 4), ("update_critic", 4.5, 5)], []
    )
    found = open_step(tmp_path).what_if()
    assert path_of(found)[0] == ("rollout", "controller", "own code", 6.0)
    assert slack_of(found)["update_actor", "controller"] == 1.0
    assert predicted_s(open_step(tmp_path), scale={"rollout": 0}) == 9


def agents(folder: Path, ends: Sequence[float] = (3.0, 3.5, 4.0, 8.0)) -> None:
    """Draw trajectories with a tool call of a second each; the last ones generate longer."""
    log = DrawnLog()
    for end in ends:
        log.trajectory(
            0.5, end, ("generate", 0.5, end - 1.5), ("tool:search", end - 1.5, end - 0.5)
        )
    drawn_inputs(folder, [("rollout", 0, 8.2), ("update_actor", 8.2, 9)], [])
    log.add_to(folder)


def test_the_path_of_an_agent_run_follows_the_last_trajectory(tmp_path: Path) -> None:
    agents(tmp_path)
    found = open_step(tmp_path).what_if()
    lane = "agent_loop_rank0 g.3"
    assert path_of(found)[:5] == [
        ("rollout", "controller", "own code", 0.5),
        ("rollout", lane, "generate", 6.0),
        ("rollout", lane, "tool:search", 1.0),
        ("rollout", lane, "own code", 0.5),
        ("rollout", "controller", "own code", 0.2),
    ]


def test_a_faster_tool_and_a_rollout_without_its_tail(tmp_path: Path) -> None:
    agents(tmp_path)
    step = open_step(tmp_path)
    quick = step.what_if(tools={"search": 0.25})
    assert quick.predicted_us == pytest.approx(9.25e6)
    assert quick.notes == [
        "extrapolated: calls of search took 1.00 s to 1.00 s in the capture, and none took 250 ms"
    ]
    both = step.what_if(tools={"search": 0.25}, scale={"rollout": 0.5})
    assert both.predicted_us == pytest.approx((0.25 + 3 + 0.25 + 0.25 + 0.1 + 1.8) * 1e6)
    assert predicted_s(step, no_tail=75) == 6
    assert predicted_s(step, no_tail=50, tools={"search": 1.0}) == 5.5
    assert step.what_if(no_tail=75, tools={"search": 0.25}).predicted_us <= quick.predicted_us
    for wrong in ({"tools": {"serch": 1.0}}, {"scale": {"train": 0.5}}, {"balance": ["rollout"]}):
        with pytest.raises(ConfigError, match="the step has no"):
            step.what_if(**wrong)


def polling(folder: Path, ends: Sequence[float]) -> None:
    """Draw a loop that looks for trajectories at 0.5 s, and then every two seconds."""
    polls = [(POLLING, 0.5, 2.4, 1), (POLLING, 2.5, 4.4, 1), (POLLING, 4.5, 6.5, 1)]
    looks = [("transfer_queue_list", begin - 0.1, begin, 1) for begin in (0.5, 2.5, 4.5)]
    drawn_inputs(folder, [("rollout", 0, 7), *polls, *looks, ("update_actor", 7, 9)], [])
    log = DrawnLog()
    for end in ends:
        log.trajectory(0.2, end, ("tool:search", 1.0, end - 0.2))
    log.add_to(folder)


def test_a_loop_that_polls_goes_on_at_its_next_poll(tmp_path: Path) -> None:
    polling(tmp_path, [3, 5.0])
    found = open_step(tmp_path).what_if()
    assert path_of(found)[2:6] == [
        ("rollout", "agent_loop_rank0 g.1", "tool:search", 3.8),
        ("rollout", "agent_loop_rank0 g.1", "own code", 0.2),
        (f"rollout / {POLLING}", "controller", "until the next poll", 1.5),
        ("rollout", "controller", "own code", 0.5),
    ]
    assert slack_of(found)["rollout", "agent_loop_rank0"] == 1.5
    helps = {row.option: (row.change, row.difference_us) for row in found.what_would_help}
    assert helps[f"--scale '{POLLING}=0.5'"] == ("polls 2x as often", pytest.approx(-1e6))


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"tools": {"search": 3.5}}, 10.0),
        ({"tools": {"search": 3.5}, "scale": {POLLING: 0.5}}, 9.0),
        ({"tools": {"search": 1.2}}, 6.0),
        ({"tools": {"search": 5.5}}, 12.0),
        ({"scale": {POLLING: 0}}, 8.5),
        ({"scale": {"rollout": 0.5}}, 7.5),
        ({"steps_ahead": 1}, 7.0),
    ],
)
def test_a_faster_tool_brings_nothing_or_a_whole_interval(
    tmp_path: Path, changes: dict, seconds: float
) -> None:
    polling(tmp_path, [3, 5.0])
    assert predicted_s(open_step(tmp_path), **changes) == seconds


def test_after_a_change_of_the_polls_they_are_twice_as_often(tmp_path: Path) -> None:
    polling(tmp_path, [3, 4.7])
    step = open_step(tmp_path)
    found = step.what_if(scale={POLLING: 0.5})
    (row,) = (row for row in found.what_would_help if row.change == "polls 2x as often")
    assert row.option == f"--scale '{POLLING}=0.25'"
    assert row.predicted_us == pytest.approx(step.what_if(scale={POLLING: 0.25}).predicted_us)


def test_polls_for_nothing_recorded_take_their_time(tmp_path: Path) -> None:
    polling(tmp_path, [])
    kinds = {row.kind for row in open_step(tmp_path).what_if().path if POLLING in row.stage}
    assert kinds == {"own code"}


@pytest.mark.parametrize(("overlap", "seconds"), [(0.0, 12.8), (1.0, 12.0)])
def test_requests_wait_for_an_engine_that_serves_one_at_a_time(
    tmp_path: Path, overlap: float, seconds: float
) -> None:
    """All tools end at 4 s; then three requests follow each other,
    or each takes as long as recorded.
    """
    log = DrawnLog()
    for number, served in enumerate([(1, 3), (3 - overlap, 5), (5, 7)]):
        log.trajectory(0, served[1], ("tool:search", 0, 1 + number / 2))
        log.span("generate", 1 + number / 2, served[1], number, request=f"0-{number}")
    requests = [(1, 3, 9), (3 - overlap, 5, 9), (5, 7, 9)]
    drawn_inputs(tmp_path, [("rollout", 0, 7.2)], [Worker("rollout", replica=0, requests=requests)])
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    assert predicted_s(step) == 10
    served = [who for _, who, kind, _ in path_of(step.what_if()) if kind in ("generate", "decode")]
    assert served == [f"agent_loop_rank0 g.{number}" for number in ((2,) if overlap else (0, 1, 2))]
    assert predicted_s(step, tools={"search": 4.0}) == seconds


def test_requests_that_enter_a_queue_together_keep_their_order(tmp_path: Path) -> None:
    """The engine serves 1, 0 and 2, though 0 and 2 were sent before 1;
    a long call follows after 0.
    """
    log = DrawnLog()
    requests = [(3, 5, 9), (1.5, 3, 9), (5, 7, 9)]
    for number, (sent, (_, end, _)) in enumerate(zip((1, 1.5, 1.2), requests, strict=True)):
        log.trajectory(0.5, 7 if number else 9, ("tool:search", 0.5, sent))
        log.span("generate", sent, end, number, request=f"0-{number}")
    log.span("tool:search", 5, 9, 0)
    stages = [("rollout", 0, 9), ("update_actor", 9, 13)]
    step = drawn(tmp_path, log, stages, [Worker("rollout", replica=0, requests=requests)], end=14.0)
    assert predicted_s(step) == 14
    for factor in (1.1, 1.000001, 0.999999, 0.99, 0.9, 0.5):
        predicted = step.what_if(scale={"rollout": factor}).predicted_us
        assert predicted == pytest.approx((5 + 9 * factor) * 1e6)
    assert predicted_s(step, steps_ahead=1) == 9


def test_a_tool_takes_its_spans_along_and_leaves_other_calls(tmp_path: Path) -> None:
    """Inner spans are part of a call, a call beside it is not,
    and one from before the step has its whole length.
    """
    log = DrawnLog()
    number = log.trajectory(0, 4.5)
    outer = log.span("tool:sandbox", 2, 4, number)
    log.span("sandbox:command", 2.1, 3.9, number, outer)
    log.span("tool:search", 2.5, 3.1, number)
    log.trajectory(-7, 3.3, ("tool:search", -7, 3.3))
    step = drawn(tmp_path, log, [("rollout", 0, 5), ("update_actor", 5, 6)], end=6.0)
    assert predicted_s(step, tools={"sandbox": 1.8}) == 5.8
    assert predicted_s(step, tools={"sandbox": 0.1}) == 4.8  # after search
    assert predicted_s(step, tools={"search": 1.2}) == 6
    assert predicted_s(step, tools={"search": 3.0}) == 7
    faster = step.what_if(tools={"search": 0.1})
    assert faster.notes[0].startswith("extrapolated: calls of search took 600 ms to 10.3 s")
    (saved,) = (
        row for row in step.what_if().what_would_help if row.option.startswith("--tools sandbox=")
    )
    assert saved.difference_us == pytest.approx(-1e6)


def test_only_a_name_of_its_own_is_a_change_to_try(tmp_path: Path) -> None:
    log = DrawnLog()
    log.trajectory(0.5, 8, ("(all others)", 0.5, 4), ("tool:search", 4, 8))
    log.trajectory(0.5, 7, ("tool:sandbox", 1, 7))
    step = drawn(tmp_path, log, [("rollout", 0, 8.2)])
    options = [row.option for row in step.what_if().what_would_help]
    assert [option for option in options if "--tools" in option] == ["--tools search=0.5x"]
    with pytest.raises(ConfigError, match="choose from: sandbox, search"):
        step.what_if(tools={"(all others)": 1.0})


def test_calls_around_a_tool_are_the_same_change(tmp_path: Path) -> None:
    """What they add is less than a twentieth; a part of the tool is a change of its own."""
    log = DrawnLog()
    number = log.trajectory(0.5, 8, ("reward", 6, 8))
    turn = log.span("tool_calls", 0.5, 6, number)
    search = log.span("tool:search", 0.6, 6, number, turn)
    log.span("start", 0.6, 2, number, search)
    drawn_inputs(tmp_path, [("rollout", 0, 8.2)], [])
    log.add_to(tmp_path)
    options = [row.option for row in open_step(tmp_path).what_if().what_would_help]
    tools = [option for option in options if "--tools" in option]
    assert tools == ["--tools search=0.5x", "--tools reward=0.5x", "--tools start=0.5x"]


def test_loop_lag_goes_with_the_tool_that_blocks_the_loop(tmp_path: Path) -> None:
    log = DrawnLog()
    number = log.trajectory(0, 3)
    blocking = log.span("tool:sandbox", 1, 3, number)
    log.trajectory(0, 4, ("tool:search", 0, 3.01), ("reward", 3.01, 4))
    log.block(1, 3, blocking, "agent.run (agent.py:7)")
    drawn_inputs(tmp_path, [("rollout", 0, 4), ("update_actor", 4, 9)], [])
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    assert ("rollout", "agent_loop_rank0 g.1", "loop lag by tool:sandbox", 2.0) in path_of(
        step.what_if()
    )
    assert predicted_s(step, tools={"sandbox": 1.0}) == 9
    beside = step.what_if(unblock=["sandbox"])  # the search takes 1 s, the sandbox 2 s
    assert beside.predicted_us == pytest.approx(9e6)
    assert beside.changes == ["--unblock sandbox"]
    assert predicted_s(step, unblock=["sandbox"], tools={"sandbox": 1.0}) == 8
    tried = {row.option: row.difference_us for row in step.what_if().what_would_help}
    assert tried["--unblock sandbox"] == pytest.approx(-1e6)
    with pytest.raises(
        ConfigError, match="no call of 'search' that blocks an event loop; choose from: sandbox"
    ):
        step.what_if(unblock=["search"])


@pytest.mark.parametrize("begin", [0, 0.5])
def test_loop_lag_of_several_blocks_is_divided(begin: float, tmp_path: Path) -> None:
    """Each part goes with the call that blocks the loop in it, or with the calls around that."""
    log = DrawnLog()
    number = log.trajectory(0, 4)
    turn = log.span("turn", 0, 4, number)
    log.block(1, 2, log.span("tool:sandbox", 1, 2, number, turn), "agent.run (agent.py:7)")
    log.block(2.005, 4, log.span("tool:parse", 2.005, 4, number, turn), "agent.parse (agent.py:9)")
    log.trajectory(begin, 6, ("tool:search", begin, 4.01), ("reward", 4.01, 6))
    drawn_inputs(tmp_path, [("rollout", 0, 6), ("update_actor", 6, 10)], [])
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    path = path_of(step.what_if())
    for name, took_s in (("sandbox", 1.005), ("parse", 1.995)):
        row = ("rollout", "agent_loop_rank0 g.1", f"loop lag by tool:{name}", took_s)
        assert row in path
        assert predicted_s(step, unblock=[name]) == pytest.approx(10 - took_s)
    assert predicted_s(step, tools={"parse": "0.5x"}) == pytest.approx(10 - 0.9975)
    assert predicted_s(step, tools={"turn": "0.5x"}) == pytest.approx(10 - 1.5)


def test_all_ranks_leave_a_collective_when_the_last_one_has_entered(tmp_path: Path) -> None:
    """Rank 1 works until 7; rank 0 waits for it, and is last at the end."""
    ranks = [0, 1]
    first = [("gemm", 5, 6), in_group(("ncclDevKernel_AllReduce", 6, 7.2), ranks), ("gemm", 7.2, 8)]
    second = [
        ("gemm", 5, 7),
        in_group(("ncclDevKernel_AllReduce", 7, 7.2), ranks),
        ("gemm", 7.2, 7.4),
    ]
    workers = [
        Worker("actor", 0, stages=[("update_actor", 5, 8)], kernels=first),
        Worker("actor", 1, stages=[("update_actor", 5, 7.4)], kernels=second),
    ]
    drawn_inputs(tmp_path, [("update_actor", 5, 8)], workers)
    found = open_step(tmp_path).what_if()
    assert path_of(found)[1:4] == [
        ("update_actor", "actor_rank1", "work", 2.0),
        ("update_actor", "actor_rank1", "ncclDevKernel_AllReduce", 0.2),
        ("update_actor", "actor_rank0", "work", 0.8),
    ]
    assert slack_of(found)["update_actor", "actor_rank0"] == 0
    balanced = open_step(tmp_path).what_if(balance=["update_actor"])
    assert balanced.predicted_us == pytest.approx(
        (10 - 0.5 - 0.3) * 1e6
    )  # of the time before, and after


def test_idle_time_of_a_worker_on_the_path_is_said(tmp_path: Path) -> None:
    """Rank 0 has a trace with a kernel of 0.2 s; scaled, its idle time shrinks with it."""
    synchronous(tmp_path)
    step = open_step(tmp_path)
    for factor, idle in ((1.0, 2.6), (0.5, 1.3)):
        found = step.what_if(scale={"update_actor": factor})
        assert {row.who: row.idle_us for row in found.path if row.kind == "work"} == {
            "rollout0": pytest.approx(0.2e6),
            "actor_rank0": pytest.approx(idle * 1e6),
        }


def test_the_time_of_the_capture_itself_is_not_scaled(tmp_path: Path) -> None:
    """In a discrete capture, a tool starts and stops inside the loop's stage."""
    tool = [("start", 5.0, 5.5, "update_actor"), ("stop", 7.5, 8.0, "update_actor")]
    worker = Worker(
        "actor", mode="discrete", stages=[("update_actor", 5.5, 7.5)], kernels=WORKS, tool=tool
    )
    drawn_inputs(tmp_path, STAGES, [worker])
    step = open_step(tmp_path)
    assert path_of(step.what_if())[2:5] == [
        (CAPTURE_CALLS, "controller", "capture", 0.5),
        ("update_actor", "actor_rank0", "work", 2.0),
        (CAPTURE_CALLS, "controller", "capture", 0.5),
    ]
    assert predicted_s(step, scale={"update_actor": 0.5}) == 9
    rewrite_worker(tmp_path, "actor_rank0", stages=[])
    step = open_step(tmp_path)
    assert ("update_actor", "controller", "own code", 2.0) in path_of(step.what_if())
    assert predicted_s(step, scale={"update_actor": 0}) == 8


@pytest.mark.parametrize("seed", range(20))
def test_a_stage_has_one_time_in_the_table_and_on_the_path(tmp_path: Path, seed: int) -> None:
    """Drawn stages of drawn ranks, whose tools start before and stop after their work."""
    drawn = random.Random(seed)
    stages, now, ranks = list[Drawn](), 0.0, drawn.randint(1, 4)
    workers = [Worker("actor", rank, mode="discrete", stages=[]) for rank in range(ranks)]
    for name in drawn.sample(("old_log_prob", "values", "update_critic", "update_actor"), 3):
        begin = now + drawn.uniform(0, 0.3)
        now = begin
        for worker in drawn.sample(workers, drawn.randint(1, ranks)):
            edges = [begin + drawn.uniform(0, 0.1)]
            for seconds in (0.3, 2, 0.3):
                edges.append(edges[-1] + drawn.uniform(0, seconds))
            if drawn.random() < 0.8:
                worker.tool += [("start", *edges[:2], name), ("stop", *edges[2:], name)]
            worker.stages = [*worker.stages, (name, *edges[1:3])]
            now = max(now, edges[-1] + drawn.uniform(0, 0.1))
        stages.append((name, begin, now))
    drawn_inputs(tmp_path, stages, workers, now + 0.1)
    report = open_step(tmp_path).report()
    path = Counter[str]()
    for part in report.critical_path:
        path[part.stage.partition(" / ")[0]] += part.duration_us
    table = {row.name: row.duration_us for row in report.stages if row.depth == 0}
    assert dict(path) == pytest.approx(table, abs=1)
    assert (CAPTURE_CALLS in table) == any(worker.tool for worker in workers)


def test_ranks_of_an_spmd_program_are_called_by_nobody(tmp_path: Path) -> None:
    """The path is that of rank 0, whose stages are the loop's; without a trace,
    nobody waits for rank 1.
    """
    stages = [("rollout", 0, 4), ("update_actor", 5, 8)]
    workers = [Worker("actor", rank, stages=stages[:], kernels=WORKS) for rank in (0, 1)]
    workers[1].stages[1] = ("update_actor", 5.1, 7.9)
    drawn_inputs(tmp_path, stages, workers)
    rank0, rank1 = (ProcessId(host="here", clock_domain="here", pid=pid) for pid in (7, 8))
    rewrite(tmp_path, process=rank0)
    for name, process in (("actor_rank0", rank0), ("actor_rank1", rank1)):
        rewrite_worker(tmp_path, name, process=process)
    found = open_step(tmp_path).what_if()
    assert {row.who for row in found.path} == {"actor_rank0"}
    assert slack_of(found)["update_actor", "actor_rank1"] == 2.1
    assert found.assumed == []


def test_ranks_whose_collectives_are_not_recorded_wait_in_a_stage_as_in_the_watch(
    tmp_path: Path,
) -> None:
    """They wait for the last one to enter it, also in a stage inside. So the path by stage is the
    exposed time of the same stages.
    """
    late = [("rollout", 0, 6), ("update_actor", 6, 9)]
    stages = [("rollout", 0, 4), ("update_actor", 4, 9), ("mini", 4.5, 9, 1)]
    workers = [Worker("actor", 0, stages=stages), Worker("actor", 1, stages=late)]
    drawn_inputs(tmp_path, stages, workers)
    processes = [ProcessId(host="here", clock_domain="here", pid=pid) for pid in (7, 8)]
    rewrite(tmp_path, process=processes[0])
    for rank, process in enumerate(processes):
        rewrite_worker(tmp_path, f"actor_rank{rank}", process=process, artifacts=[])
    found = open_step(tmp_path).what_if()
    assert path_of(found) == [
        ("rollout", "actor_rank1", "work", 6.0),
        ("update_actor / mini", "actor_rank0", "work", 3.0),
        ("(outside stages)", "actor_rank0", "work", 1.0),
    ]
    assert found.assumed == [
        "ranks without recorded collectives wait in a stage for the last one to enter it (1)"
    ]
    ranks = {"actor_rank0": stages[:2], "actor_rank1": late}
    loop = [
        with_stages(
            RankUse(lane=lane, role="actor"),
            {name: [(ns(begin), ns(end))] for name, begin, end in outermost},
        )
        for lane, outermost in ranks.items()
    ]
    watched = StepSummary(step=1, begin_ns=ns(0), end_ns=ns(10), loop=loop)
    assert [(row.name, row.exposed_ns / 1e9) for row in exposed(watched)] == [
        ("rollout", 6.0),
        ("update_actor", 3.0),
        ("", 1.0),
    ]
    halved = open_step(tmp_path).what_if(scale={"rollout": 0.5})
    assert halved.predicted_us == pytest.approx(7e6)


def test_the_time_of_the_capture_is_known_in_an_spmd_program(tmp_path: Path) -> None:
    tool = [("start", 5.0, 5.5, "update_actor"), ("stop", 7.5, 8.0, "update_actor")]
    stages = [("update_actor", 5, 8), ("mini", 5.5, 7.5, 1)]
    drawn_inputs(tmp_path, stages, [Worker("actor", stages=stages, kernels=WORKS, tool=tool)])
    rank0 = ProcessId(host="here", clock_domain="here", pid=7)
    rewrite(tmp_path, process=rank0)
    rewrite_worker(tmp_path, "actor_rank0", process=rank0)
    step = open_step(tmp_path)
    assert path_of(step.what_if())[1] == (CAPTURE_CALLS, "actor_rank0", "capture", 0.5)
    assert predicted_s(step, scale={"update_actor": 0.5}) == 9


def test_a_worker_without_stages_leaves_the_time_to_the_loop(tmp_path: Path) -> None:
    """As does one whose capture failed; the prediction says what is missing."""
    synchronous(tmp_path)
    rewrite_worker(
        tmp_path, "actor_rank0", stages=[], artifacts=[], status="failed", reason="the worker died"
    )
    found = open_step(tmp_path).what_if()
    assert ("update_actor", "actor_rank1", "work", 1.9) in path_of(found)
    assert ("update_actor", "controller", "own code", 1.0) in path_of(found)
    assert any("the worker died" in sentence for sentence in found.missing)
    assert main(["what-if", str(tmp_path)]) == 1
    rewrite(
        tmp_path,
        workers=[worker for worker in read_manifest(tmp_path).workers if not worker.stages],
    )
    found = open_step(tmp_path).what_if()
    assert {row.who for row in found.path} == {"controller"}
    assert any(note.startswith("rollout waits for nothing recorded") for note in found.notes)


def test_the_command_prints_path_slack_and_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synchronous(tmp_path)
    assert main(["what-if", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1: 10.0 s"
    assert len(lines) <= 45
    assert next(line for line in lines if "rollout0" in line).split()[2:] == [
        "work",
        "3.80",
        "s",
        "38.0%",
        "200",
        "ms",
    ]
    changed = ["--scale", "rollout=0.5", "--balance", "update_actor", "--json"]
    assert main(["what-if", str(tmp_path), *changed]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_us"] == pytest.approx(7.55e6)
    assert found["changes"] == ["--scale rollout=0.5", "--balance update_actor"]
    assert main(["what-if", str(tmp_path), "--scale", "rollot=0.5"]) == 2
    assert "did you mean 'rollout'?" in capsys.readouterr().err


def test_a_damaged_trace_is_said_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synchronous(tmp_path)
    (tmp_path / "actor_rank0.torch.json.gz").write_bytes(b"no trace")
    assert main(["what-if", str(tmp_path)]) == 1
    assert "missing: actor_rank0" in capsys.readouterr().out.replace(f"{tmp_path}/", "").replace(
        "\n", " "
    )


def test_a_step_without_the_stage_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a warning and exit code 1; a stage that no step has is a mistake."""
    for name, stages in (("a", STAGES), ("b", STAGES[:2])):
        (tmp_path / name).mkdir()
        drawn_inputs(tmp_path / name, stages, [])
    paths = [str(tmp_path / name) for name in "ab"]
    assert main(["what-if", *paths, "--scale", "update_actor=0.5", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["predicted_us"] == pytest.approx(8.5e6)
    assert "step 1: --scale: the step has no stage 'update_actor'" in printed.err
    assert main(["what-if", *paths, "--scale", "train=0.5"]) == 2
    assert "warning: step 1" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": {"rollout": -5}}, "rollout=-5 is not a finite number"),
        ({"scale": {"rollout": math.nan}}, "rollout=nan is not a finite number"),
        ({"tools": {"search": math.inf}}, "search=inf is not a finite number"),
        ({"no_tail": 0}, "above 0 and at most 100"),
        ({"tools": {"search": 1}}, "no call of 'search'; it has none of any name"),
        (
            {"balance": ["reward"]},
            "no stage 'reward' of several workers; choose from: rollout, update_actor",
        ),
        (
            {"balance": "rollout"},
            "--balance: 'rollout' is no list of names, such as \\['search'\\]",
        ),
        ({"unblock": 3}, "--unblock: 3 is no list of names, such as \\['search'\\]"),
        (
            {"tools": {"search": "1s"}},
            "search='1s' is not a finite number of at least 0, such as 0.2 \\(s",
        ),
        ({"scale": ["rollout"]}, "--scale: \\['rollout'\\] is no mapping; give {'name': 0.5}"),
        ({"no_tail": "90"}, "--no-tail: '90' is not a percentage"),
        ({"replicas": "4"}, "--replicas: '4' is not an integer of at least 1"),
        ({"steps_ahead": 1.5}, "--async: 1.5 is not 0 or 1"),
    ],
)
def test_wrong_changes_are_refused(tmp_path: Path, changes: dict, said: str) -> None:
    synchronous(tmp_path)
    with pytest.raises(ConfigError, match=said):
        open_step(tmp_path).what_if(**changes)


def test_a_wrong_value_is_refused_before_traces_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronous(tmp_path)
    monkeypatch.setattr(
        "verl_profiling.steps.read.read_step", lambda *given: pytest.fail("a trace is read")
    )
    with pytest.raises(ConfigError, match="--no-tail"):
        open_step(tmp_path).what_if(no_tail=0)
    assert main(["what-if", str(tmp_path), "--async", "-1"]) == 2


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    agents(tmp_path)
    step = open_step(tmp_path)
    found = step.what_if(tools={"search": np.float32(0.25)}, scale={"rollout": np.float64(1)})
    assert found.predicted_us == pytest.approx(9.25e6)
    assert predicted_s(step, steps_ahead=np.int64(1)) == 8.2


def test_changes_are_said_as_they_were_given(tmp_path: Path) -> None:
    agents(tmp_path)
    found = open_step(tmp_path).what_if(no_tail=99.95, tools={"search": 1234.5})
    assert found.changes == ["--no-tail 99.95", "--tools search=1234.5s"]


@pytest.mark.parametrize(
    "wrong", [["--scale", "0.5"], ["--tools", "a=fast"], ["--tools", "a=2"], ["--no-tail", "-1"]]
)
def test_wrong_values_are_refused(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["what-if", str(tmp_path), *wrong])
    assert left.value.code == 2


def test_plain_traces_have_a_path_through_their_collectives(tmp_path: Path) -> None:
    """Two ranks of real Megatron on CPU, without a manifest."""
    for rank in (0, 1):
        shutil.copy(
            Path(__file__).parents[1] / "data" / f"megatron_tp2_rank{rank}.json.gz", tmp_path
        )
    found = open_step(tmp_path).what_if()
    assert {row.kind for row in found.path} == {"work", "gloo:all_reduce", "delay"}
    assert path_of(found)
    assert found.predicted_us == pytest.approx(found.span_us)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_rollout_one_step_off_is_as_long_as_a_step_that_waits_for_it(
    tmp_path: Path, is_recorded: bool
) -> None:
    """The engine takes 7 s, of which 4 s beside the training;
    steps without a wait would take 5 s.
    """
    last = [("rollout", -4, 3)] if is_recorded else []
    stages = [("rollout", 0.5, 3), ("update_actor", 4, 7.5)]
    workers = [
        Worker("rollout", replica=0, stages=[*last, ("rollout", 4, 11)]),
        Worker("actor", stages=[("update_actor", 4, 7.5)], kernels=WORKS),
    ]
    drawn_inputs(tmp_path, stages, workers, end=8.0)
    step = open_step(tmp_path)
    assert path_of(step.what_if())[0][0::3] == ("rollout", 3.0)
    assert "a rollout that began in the last step" in step.what_if().assumed[-1]
    for changes, seconds in (
        ({"update_actor": 0.5}, 8.0),
        ({"rollout": 0.9}, 7.3),
        ({"rollout": 0.1}, 5.5 + 0.05),
        ({"rollout": 2.0}, 15.0),
        ({"update_actor": 3.0}, 5.5 + 7.0),
    ):
        found = step.what_if(scale=changes)
        assert found.predicted_us == pytest.approx(seconds * 1e6, rel=0.02), changes
        path_of(found)


def test_a_stage_that_waits_follows_the_stage_that_it_is_named_after(tmp_path: Path) -> None:
    """The loop waits for a rollout in the background; the next one goes on when the step ends."""
    log = DrawnLog()
    log.trajectory(-4, 2.9, ("generate", -4, 2.9))
    log.trajectory(4, 14, ("generate", 4, 14))
    stages = [("rollout", 0, 3), ("wait:rollout", 0.1, 3.1), ("update_weights", 3.1, 4)]
    stages += [("rollout", 4, 10), ("update_actor", 4.1, 9.5)]
    drawn_inputs(
        tmp_path, stages, [Worker("actor", stages=[("update_actor", 4.2, 9.4)], kernels=WORKS)]
    )
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    found = step.what_if()
    rows = [(stage, who, seconds) for stage, who, _, seconds in path_of(found)]
    assert rows[0] == ("rollout", "agent_loop_rank0 g.0", 2.9)
    assert ("update_actor", "actor_rank0", 5.2) in rows
    assert found.notes == []
    assert "a stage wait:NAME waits for the stage NAME that ends in it (1)" in found.assumed
    assert step.what_if(scale={"rollout": 0.5}).predicted_us == pytest.approx(7.1e6, rel=0.02)
    assert step.what_if(scale={"update_actor": 0.5}).predicted_us == pytest.approx(10e6, rel=0.01)
    with pytest.raises(ConfigError, match="needs a step whose rollout begins and ends in it"):
        step.what_if(steps_ahead=1)


def test_a_rollout_that_ends_beside_the_training_is_waited_for_once_it_is_longer(
    tmp_path: Path,
) -> None:
    """The loop sees its end in the next step. It takes 4 s after the weight update,
    and the training 9 s.
    """
    log = DrawnLog()
    log.trajectory(1, 5, ("generate", 1, 5))
    stages = [("wait:rollout", 0, 0.001), ("update_weights", 0.001, 1), ("rollout", 1, 10)]
    workers = [Worker("actor", stages=[("update_actor", 1.2, 9.4)], kernels=WORKS)]
    step = drawn(tmp_path, log, [*stages, ("update_actor", 1.1, 9.5)], workers)
    found = step.what_if()
    assert "rollout" not in {row.stage for row in found.path}
    assert found.what_would_help[0].option == "--scale update_actor=0.5"
    assert {row.time_us > 0 for row in found.slack} == {True}
    for changes, seconds in (
        ({"update_actor": 0.1}, 5.0),
        ({"rollout": 3.0}, 13.0),
        ({"rollout": 0.1}, 10.0),
    ):
        assert step.what_if(scale=changes).predicted_us == pytest.approx(seconds * 1e6, rel=0.01)
    rewrite(
        tmp_path,
        stages=[stage for stage in read_manifest(tmp_path).stages if "wait" not in stage.name],
    )
    found = open_step(tmp_path).what_if()
    assert "rollout" not in {row.stage for row in found.path}
    assert found.notes == [
        "rollout goes on after the step, so a change is not applied to all of it",
        PACED,
    ]


def test_a_wait_for_a_rollout_without_end_follows_the_trajectories_that_end_in_it(
    tmp_path: Path,
) -> None:
    """As in a fully asynchronous trainer: samples come all the time,
    and the last one of a batch is late.
    """
    log = DrawnLog()
    log.trajectory(-4, 1, ("generate", -4, 1))
    log.trajectory(0.2, 2.9, ("generate", 0.2, 2.9))
    log.trajectory(1, 5, ("generate", 1, 5))
    stages = [("rollout", 0, 10), ("wait:rollout", 0, 3), ("update_actor", 3.1, 9.5)]
    step = drawn(
        tmp_path, log, stages, [Worker("actor", stages=[("update_actor", 3.2, 9.4)], kernels=WORKS)]
    )
    found = step.what_if()
    rows = [(stage, who, seconds) for stage, who, _, seconds in path_of(found)]
    assert ("rollout", "agent_loop_rank0 g.1", 2.7) in rows
    assert ("update_actor", "actor_rank0", 6.2) in rows
    assert found.notes == [
        "wait:rollout waits for work that began before the step, so a change is not applied to "
        "all that it waits for",
        "rollout goes on after the step, so a change is not applied to all of it",
        PACED,
    ]
    assert found.what_would_help == []
    for changes, seconds, low, high in (
        ({"rollout": 0.5}, 8.65, 7.0, 10.0),
        ({"rollout": 2.0}, 12.7, 7.0, 20.0),
        ({"update_actor": 0.5}, 6.9, 6.9, 10.0),
        ({"update_actor": 2.0}, 16.2, 13.2, 16.2),
    ):
        changed = step.what_if(scale=changes)
        assert changed.predicted_us == pytest.approx(seconds * 1e6, rel=0.02)
        assert changed.low_us == pytest.approx(0.97e6 * low, rel=0.02)
        assert changed.high_us == pytest.approx(1.03e6 * high, rel=0.02)


@pytest.mark.parametrize("names", [("wait:rollout",), ("wait:rollout", "rollout")])
def test_training_beside_an_unrecorded_rollout_is_not_offered(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """The loop waits for samples of which nothing is recorded, so it may wait for what it saves."""
    stages = [("wait:rollout", 0, 1), ("update_actor", 1, 9.5)]
    if "rollout" in names:
        stages.append(("rollout", 0, 10))
    drawn_inputs(tmp_path, stages, [Worker("actor", stages=[("update_actor", 1.1, 9.4)])])
    step = open_step(tmp_path)
    assert step.what_if().what_would_help == []
    found = step.what_if(scale={"update_actor": 0.5})
    assert found.low_us < 6e6 < 10e6 < found.high_us
    assert PACED in found.notes


def test_a_rollout_one_step_off_is_known_from_the_stages_of_the_loop(tmp_path: Path) -> None:
    """Only workers of the trainer are recorded. The loop waits for 3 of the rollout's 7 s."""
    stages = [("rollout", 0, 3), ("wait:rollout", 0, 3), ("update_weights", 3, 4)]
    stages += [("rollout", 6, 10), ("update_actor", 4, 9.9)]
    workers = [Worker("actor", stages=[("update_weights", 3, 4), ("update_actor", 4, 9.9)])]
    drawn_inputs(tmp_path, stages, workers)
    step = open_step(tmp_path)
    assert {row.option for row in step.what_if().what_would_help} >= {"--scale rollout=0.5"}
    for changes, seconds in (
        ({"rollout": 0.5}, 7.0),
        ({"rollout": 2.0}, 17.0),
        ({"update_weights": 0.5}, 9.5),
    ):
        found = step.what_if(scale=changes)
        assert found.predicted_us == pytest.approx(seconds * 1e6, rel=0.01)
        assert found.low_us is None


def test_a_tail_of_a_rollout_one_step_off_is_refused(tmp_path: Path) -> None:
    """Of the rollout that the loop waits for, only the last trajectory is recorded."""
    log = DrawnLog()
    log.trajectory(-6, 3, ("generate", -6, 3))
    for number in range(15):
        log.trajectory(4, 5 + number / 10, ("generate", 4, 5 + number / 10))
    log.trajectory(4, 14, ("generate", 4, 14), status="running")
    stages = [("rollout", 0, 3), ("wait:rollout", 0, 3), ("rollout", 4, 10)]
    step = drawn(tmp_path, log, [*stages, ("update_actor", 3.5, 9.9)], [])
    with pytest.raises(ConfigError, match="--no-tail: the tail began before the step"):
        step.what_if(no_tail=90)
    assert not any("--no-tail" in row.option for row in step.what_if().what_would_help)


def test_the_next_rollout_begins_after_this_one_also_beside_other_tasks(tmp_path: Path) -> None:
    """Without that, a long step follows a short one for ever."""
    engines = [Worker("rollout", replica=0, stages=[("rollout", -4, 5.9), ("rollout", 7, 14)])]
    stages = [("rollout", 0, 6), ("update_actor", 1, 8), ("mini", 1.3, 6.5, 1)]
    drawn_inputs(tmp_path, stages, engines)
    found = open_step(tmp_path).what_if(scale={"rollout": 3.0})
    assert found.predicted_us == pytest.approx(27.5e6)
    assert not any(
        note.startswith("the predicted step is not the mean step") for note in found.notes
    )


def test_steps_that_alternate_are_predicted_by_the_one_between(tmp_path: Path) -> None:
    engines = [Worker("rollout", replica=0, stages=[("rollout", -4, 1.3), ("rollout", 3, 14)])]
    stages = [("rollout", 0, 1.4), ("update_actor", 1.5, 8.5), ("mini", 0.8, 2.5, 1)]
    drawn_inputs(tmp_path, stages, engines)
    assert predicted_s(open_step(tmp_path), scale={"mini": 0.3}) == 9.405


def test_a_note_says_that_the_steps_differ(tmp_path: Path) -> None:
    """What is left of the rollout shrinks by 60 ms in each step, and nobody waits for it."""
    engines = [Worker("rollout", replica=0, stages=[("rollout", -4, 3.9), ("rollout", 5.4, 14)])]
    drawn_inputs(
        tmp_path, [("rollout", 0, 4), ("update_actor", 3, 8), ("mini", 8.74, 8.86)], engines
    )
    found = open_step(tmp_path).what_if(scale={"mini": 1.5})
    assert found.predicted_us == pytest.approx(10.06e6)
    assert any(note.startswith("the predicted step is not the mean step") for note in found.notes)
