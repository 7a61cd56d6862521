"""What explains the difference of two runs: of real loops with injected changes,
and of drawn steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_logs import DrawnLog
from drawn_steps import STAGES, Drawn, Worker, drawn_inputs, ns
from drawn_summaries import summary
from step_folders import rewrite_worker

from verl_profiling.cli import main
from verl_profiling.manifest import POLLING, Request
from verl_profiling.predict.explain import explain
from verl_profiling.predict.graph import graph_of
from verl_profiling.report.diff import Change, Diff
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.read import read_step
from verl_profiling.watch.log_writer import WatchLog

LOOP = Path(__file__).parents[2] / "benchmarks" / "what_if_loop.py"
GENERATE_S = [0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3]
PLAN = {
    "generate_s": GENERATE_S,
    "ranks_s": [0.2, 0.2],
    "reward_s": 0.05,
    "sync_s": 0.1,
    "steps": 5,
}
LONGER = {"generate_s": [1.5 * seconds for seconds in GENERATE_S]}
SYNC, LENGTHS = "update_weights", "response lengths of rollout"


def diff(before: Path, after: Path, capsys: pytest.CaptureFixture[str]) -> Diff:
    main(["diff", str(before), str(after), "--json"])
    return msgspec.json.decode(capsys.readouterr().out, type=Diff)


def of_kind(found: Diff, kind: str) -> dict[str, Change]:
    return {change.name: change for change in found.changes if change.kind == kind}


def parts_of(found: Diff) -> dict[str, float]:
    """Return the parts of the step's change (s), which add up to it."""
    parts = {name: change.change_s for name, change in of_kind(found, "explained").items()}
    assert sum(parts.values()) == pytest.approx(of_kind(found, "step")["step"].change_s)
    assert list(parts)[-1:] == ["unexplained"] * bool(parts)
    return parts


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> str:
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


def run_loop(folder: Path, cluster: str, **plan: Any) -> Path:
    """Run the loop of Ray actors that the predictions of ``what-if`` are judged by."""
    command = [sys.executable, str(LOOP), str(folder), json.dumps({**PLAN, **plan})]
    done = subprocess.run(
        command,
        check=False,
        timeout=120,
        capture_output=True,
        env={**os.environ, "RAY_ADDRESS": cluster},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, cluster: str) -> Path:
    return run_loop(tmp_path_factory.mktemp("before"), cluster)


@pytest.mark.recipes
@pytest.mark.parametrize(
    ("plan", "parts", "injected_s"),
    [
        ({"sync_s": 0.3}, {SYNC}, 0.2),
        (LONGER, {LENGTHS}, 0.3),
        ({**LONGER, "token_s": 0.015}, {"time per token of rollout"}, 0.3),
        ({"tool_s": 0.25}, {"tool:search of rollout"}, 0.3),
        ({**LONGER, "sync_s": 0.3}, {LENGTHS, SYNC}, 0.5),
    ],
    ids=["weight sync", "longer responses", "slower engine", "slower tool", "both"],
)
def test_an_injected_change_explains_nine_tenths_of_the_difference(
    tmp_path: Path,
    before: Path,
    cluster: str,
    plan: dict[str, Any],
    parts: set[str],
    injected_s: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = diff(before, run_loop(tmp_path, cluster, **plan), capsys)
    explained, step = parts_of(found), of_kind(found, "step")["step"]
    assert set(sorted(explained, key=explained.__getitem__)[-len(parts) :]) == parts
    assert sum(explained[part] for part in parts) == pytest.approx(injected_s, rel=0.1)
    assert abs(explained["unexplained"]) <= max(0.1 * injected_s, step.noise_s or 0.0)
    assert all(part in found.explained for part in parts)


def draw(run: Path, step: int, stages: list[Drawn], end: float = 10.0) -> Path:
    """Draw a step in which an actor works in ``update_actor``,
    up to 0.1 s before the end of the stage.
    """
    times = {name: (begin + 0.1, until - 0.1) for name, begin, until in stages}
    actor = Worker("actor", stages=[("update_actor", *times["update_actor"])])
    folder = run / f"step_{step:06d}"
    folder.mkdir(parents=True)
    drawn_inputs(folder, stages, [actor], end)
    return run


def test_parts_are_replaced_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that takes longer, one that A does not have, one that B does not have;
    nothing is left.
    """
    before = draw(tmp_path / "a", 1, [*STAGES, ("save", 9.0, 9.5)])
    longer = [("rollout", 0, 4), ("reward", 4, 5), ("update_actor", 5, 9.5), ("test", 9.5, 10.5)]
    after = draw(tmp_path / "b", 1, [*longer, ("update_weights", 10.5, 11.5)], 12.0)
    found = diff(before, after, capsys)
    parts = {name: pytest.approx(seconds, abs=1e-6) for name, seconds in parts_of(found).items()}
    assert parts["update_actor"] == 1.5
    assert parts["test"] == 1.0
    assert parts["save"] == -0.5
    assert parts["unexplained"] == 0.0
    assert "rollout" not in parts
    assert found.explained.startswith(
        "step +2.00 s (+20.0%): update_actor +15.0%, test +10.0%, save -5.0%"
    )


def test_the_longest_takes_the_place_of_the_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slower tool matters only in the last trajectory, whichever it is."""
    runs = []
    for name, ends in (("before", (1.0, 3.9)), ("short", (3.9, 2.0)), ("long", (4.9, 1.0))):
        late_s = max(ends) - 3.9
        stages = [
            (stage, begin + late_s * bool(begin), end + late_s) for stage, begin, end in STAGES
        ]
        runs.append(draw(tmp_path / name, 1, stages, 10.0 + late_s))
        log = DrawnLog()
        for end in ends:
            log.trajectory(0, end, ("tool:search", 0, end))
        log.add_to(runs[-1] / "step_000001")
    before, short, long = runs
    assert {*parts_of(diff(before, short, capsys))} == {"(all others)", "unexplained"}
    assert parts_of(diff(before, long, capsys))["tool:search of rollout"] == pytest.approx(1.0)


def test_training_may_outlast_the_rollout_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop of A waits for responses that began in the step before; in B they are there."""
    sides = []
    for waited, end, made in (
        (3, 10, {"pending": [3.1]}),
        (0.1, 12.1, {"stages": [("rollout", 0.2, 10)]}),
    ):
        sides.append(tmp_path / f"{end}" / "step_000001")
        sides[-1].mkdir(parents=True)
        actor = Worker("actor", stages=[("update_actor", waited, end)])
        stages = [("rollout", 0, waited), ("update_actor", waited, end)]
        drawn_inputs(sides[-1], stages, [Worker("rollout", replica=0, **made), actor], end)
    parts = parts_of(diff(*sides, capsys))
    assert parts["update_actor"] == pytest.approx(2.0, abs=0.2)
    assert parts["unexplained"] == pytest.approx(0.0, abs=0.2)


def roll_out(
    folder: Path,
    until: float,
    *requests: dict[str, float],
    log: DrawnLog | None = None,
    polls: Sequence[Drawn] = (),
) -> Path:
    """Draw a step in which the loop waits for requests, in seconds and tokens,
    and for trajectories.
    """
    stages = [("rollout", 0, until), *polls, ("update_actor", until, until + 2)]
    folder.mkdir()
    drawn_inputs(folder, stages, [Worker("rollout", replica=0)], until + 2)
    made = [
        Request(
            replica=0,
            id=str(number),
            prompt_tokens=9,
            response_tokens=round(said.get("tokens", 0)),
            **{f"{mark}_ns": ns(at) for mark, at in said.items() if mark != "tokens"},
        )
        for number, said in enumerate(requests)
    ]
    rewrite_worker(folder, "rollout0", requests=made)
    if log:
        log.add_to(folder)
    return folder


def request(end: float, tokens: float = 0, **marks: float) -> dict[str, float]:
    return {"begin": 0, "arrival": 0.1, "end": end, "tokens": tokens, **marks}


def explained_by(before: Path, after: Path) -> dict[str, float]:
    """Return the parts of at least a thousandth of a second (s)."""
    graphs = [
        graph_of(read_step(inputs)) for folder in (before, after) for inputs in find_steps(folder)
    ]
    found = explain(graphs[:1], graphs[1:])
    return {part: round(seconds, 3) for part, (seconds, _) in found.items() if round(seconds, 3)}


def test_times_of_the_engine_on_one_side_explain_nothing(tmp_path: Path) -> None:
    """Without them, a request is not divided on the other side either;
    and two thirds of the tokens are.
    """
    whole = roll_out(tmp_path / "a", 4, request(3.9, 60))
    divided = roll_out(tmp_path / "b", 4, request(3.9, 60, scheduled=0.5, first_token=1.0))
    slower = roll_out(tmp_path / "c", 5.9, request(5.8, 90, scheduled=0.5, first_token=1.0))
    assert explained_by(whole, divided) == explained_by(divided, whole) == {}
    assert explained_by(whole, slower) == {"response lengths of rollout": 1.9}
    assert explained_by(slower, whole) == {"response lengths of rollout": -1.9}


def test_other_intervals_of_polling_explain_the_difference(tmp_path: Path) -> None:
    folders = []
    for ends in ([2.5, 4.5], [1.5, 2.5, 3.5]):
        polls = [(POLLING, begin, end, 1) for begin, end in pairwise([0.5, *ends])]
        folders.append(roll_out(tmp_path / f"{len(ends)}", ends[-1], request(2.6, 9), polls=polls))
    assert explained_by(*folders) == {"rollout": -1.0}
    assert explained_by(*folders[::-1]) == {"rollout": 1.0}


def test_tokens_on_one_side_explain_nothing(tmp_path: Path) -> None:
    told = roll_out(tmp_path / "a", 4, request(3.9, 60))
    untold = roll_out(tmp_path / "b", 5, request(4.9))
    assert explained_by(told, untold) == {"generate of rollout": 1.0}


def test_the_tokens_of_a_request_count_once(tmp_path: Path) -> None:
    """Beside a tool in the middle of the generation, too; a generation before the step has none."""
    folders = []
    for calls in (0, 1):
        log = DrawnLog()
        log.trajectory(0, 3.9)
        outer = log.span("generate", 0, 3.9, 0, request="0")
        if calls:
            log.span("tool:search", 2, 3, 0, outer)
        folders.append(roll_out(tmp_path / f"{calls}", 4, request(3.9, 60), log=log))
    parts = explained_by(*folders)
    assert "response lengths of rollout" not in parts
    early = {
        "begin": -4,
        "arrival": -3.9,
        "first_token": -3,
        "last_token": -1,
        "tokens": 9,
        "end": 3.9,
    }
    ended = [roll_out(tmp_path / name, 4, early) for name in ("early", "as early")]
    assert explained_by(*ended) == {}


def test_parts_that_only_one_side_has_are_removed_one_after_the_other(tmp_path: Path) -> None:
    """Two at a time explain as much as both; tokens and time
    of the same requests do not count twice.
    """
    nothing = roll_out(tmp_path / "a", 1)
    log = DrawnLog()
    for number, tool in enumerate(("tool:search", "tool:fetch")):
        log.trajectory(0, 3.9, (tool, 0, 3.9), sample=number)
    tools = roll_out(tmp_path / "b", 4, log=log)
    parts = explained_by(nothing, tools)
    assert sum(parts[part] for part in parts if part.startswith("tool:")) == pytest.approx(3.9)
    requests = roll_out(tmp_path / "c", 4, request(3.9, 60))
    assert explained_by(nothing, requests)["generate of rollout"] == 3.8
    assert explained_by(requests, nothing)["generate of rollout"] == -3.8


def test_a_delay_next_to_nothing_does_not_become_a_long_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long trajectory of A begins a little later than the short one; in B,
    the short one begins late.
    """

    def step(name: str, updated: float, long: float, short: float) -> Path:
        folder = draw(
            tmp_path / name, 1, [("rollout", 0, 4), ("update_actor", 4, updated)], updated
        )
        log = DrawnLog(end=updated)
        log.trajectory(long, 3.9, ("tool:search", long, 3.9))
        log.trajectory(short, short + 0.9, ("tool:search", short, short + 0.9))
        log.add_to(folder / "step_000001")
        return folder

    parts = parts_of(diff(step("a", 8, 0.002, 0.001), step("b", 10, 0.001, 3.0), capsys))
    assert parts["update_actor"] == pytest.approx(2.0)
    assert abs(parts["unexplained"]) < 0.3
    found = diff(step("c", 8, 0.2, 0.1), step("d", 8.1, 0.001, 3.0), capsys)
    stages = {"rollout": 0.0, "update_actor": pytest.approx(0.1), "(outside stages)": 0.0}
    assert parts_of(found) == {**stages, "unexplained": 0.0}, (
        "the parts explain nothing; the stages do"
    )


def test_each_trace_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a saved report; an error costs the explanation alone."""
    runs = [draw(tmp_path / name, 1, STAGES) for name in ("a", "b")]
    saved = tmp_path / "report.json"
    main(["report", str(runs[0]), "--json"])
    saved.write_text(capsys.readouterr().out)
    read: list[object] = []
    monkeypatch.setattr(
        "verl_profiling.steps.read.read_step",
        lambda *given: read.append(given) or read_step(*given),
    )
    assert parts_of(diff(*runs, capsys))
    assert len(read) == 2
    assert not parts_of(diff(saved, runs[1], capsys))
    assert len(read) == 3
    for function in ("report.build.graph_of", "commands.diff.explain"):
        with monkeypatch.context() as patch:
            patch.setattr(f"verl_profiling.{function}", lambda *given: 1 / 0)
            found = diff(*runs, capsys)
        assert (found.explained, of_kind(found, "step")["step"].change_s) == ("", 0.0)


def test_a_change_within_the_noise_is_said_to_be_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole step, or of a part of it."""

    def run(name: str, *steps: tuple[float, float]) -> Path:
        for number, (updated, sent) in enumerate(steps, 1):
            stages = [("update_actor", 0, updated), ("update_weights", updated, updated + sent)]
            draw(tmp_path / name, number, stages, updated + sent)
        return tmp_path / name

    before = run("before", (5, 1), (5.2, 1), (5.4, 1))
    assert diff(before, run("alike", (5.1, 1), (5.3, 1.1)), capsys).explained.endswith(
        ": within the noise"
    )
    found = diff(before, run("slower", (6, 1), (6.2, 1.1), (6.4, 1.4)), capsys)
    assert found.explained == (
        "step +1.10 s (+17.7%): update_actor +16.1%, parts within the noise +1.6%, "
        "unexplained +0.0%"
    )
    noise = {name: change.noise_s for name, change in of_kind(found, "explained").items()}
    assert (noise["update_actor"], noise["update_weights"]) == (
        pytest.approx(0.2),
        pytest.approx(0.2),
    )
    steady = diff(before, run("steady", (6, 1.1), (6.2, 1.1), (6.4, 1.1)), capsys)
    assert "update_actor +16.1%, update_weights +1.6%" in steady.explained


def test_all_steps_of_the_watch_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the captured ones, and without the tenth at each end,
    where the first step warms up.
    """
    runs = [draw(tmp_path / name, 1, STAGES) for name in ("before", "after")]
    for run, took_ms in zip(runs, (3000, 3500), strict=True):
        log = WatchLog(run)
        for number in range(20):
            warm_up_ms = 60_000 if number == 0 else number
            log(summary(number, {"rollout": 5000, "update_actor": took_ms + warm_up_ms}))
    found = diff(*runs, capsys)
    watched = of_kind(found, "watch")
    assert {*watched} == {"step", "rollout", "update_actor", "(in no stage)"}
    assert (watched["update_actor"].before_s, watched["step"].before_s) == (3.0105, 8.5105)
    assert watched["update_actor"].change_s == watched["step"].change_s == pytest.approx(0.5)
    assert watched["step"].noise_s == pytest.approx(0.0075)
    assert found.basis.startswith("1 captured step before and 1 after; the watch has 20 and 20")
    saved = tmp_path / "report.json"
    main(["report", str(runs[0]), "--json"])
    saved.write_text(capsys.readouterr().out)
    alone = diff(saved, runs[1], capsys)
    assert (alone.explained, alone.logged) == ("", (0, 20))
