"""The first section of a run's page: whether it is as usual, since when, and what is not known."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary
from step_folders import build_step, rewrite

from verl_profiling.capture_request import Trigger
from verl_profiling.cli import main
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.watch.log_writer import WatchLog


def health_of(run: Path, steps: Sequence[StepSummary]) -> str:
    """Return the text of the section, for a run that ended with these steps."""
    run.mkdir(exist_ok=True)
    info = RunInfo(
        run_id="run",
        begin_ns=steps[0].begin_ns,
        end_ns=steps[-1].end_ns,
        process=ProcessId.current(),
        config={"watch": {"enable": True, "trigger": {}}},
        versions={},
    )
    write_json_atomically(run / "run.json", info)
    log = WatchLog(run)
    for step in steps:
        log(step)
    assert main(["report", str(run), "--save"]) == 0
    page = (run / "index.html").read_text()
    section = page.partition('id="health"')[2].partition("</section>")[0]
    return html.unescape(re.sub(r"<[^>]+>", "\n", section))


def lead(step: int, share: float = 0.3) -> Trigger:
    return Trigger(
        kind="anomaly",
        sign="leader",
        noticed=step,
        stage="update_actor",
        suspects=["actor_rank1"],
        value=share,
        median=share,
        reason=f"step {step}: actor_rank1 was in stage update_actor 3 s longer than its peers",
    )


def slow(step: int, value_s: float, median_s: float) -> Trigger:
    return Trigger(
        kind="anomaly",
        sign="slow_stage",
        noticed=step,
        stage="update_actor",
        value=value_s,
        median=median_s,
        reason=f"step {step}: stage update_actor took {value_s} s of the step",
    )


def test_a_lead_is_unknown_where_no_leader_is_known(tmp_path: Path) -> None:
    """A collective hides who was late, so no leader in the log is no recovery."""
    steps = [summary(step, leader="actor_rank1" if step <= 12 else "") for step in range(1, 31)]
    steps[9].noticed = lead(10)
    text = health_of(tmp_path / "run", steps)
    assert "Healthy" not in text
    assert "Nothing to mend" not in text
    assert "Not known whether it is as usual again since step" in text
    assert "Whether it lasts is not known: in the last steps, the log has no leader" in text
    assert "verl-profiling trigger" in text
    assert "Look at actor_rank1." in text


def test_a_lead_of_another_process_is_a_recovery(tmp_path: Path) -> None:
    steps = [
        summary(step, leader="actor_rank1" if step <= 12 else "actor_rank3")
        for step in range(1, 31)
    ]
    steps[9].noticed = lead(10)
    text = health_of(tmp_path / "run", steps)
    assert "Healthy again" in text
    assert "Now 0.0% of the step." in text


def test_a_stage_that_is_still_far_longer_is_not_as_usual(tmp_path: Path) -> None:
    """One extreme step, as of a busy machine, is no measure of what is as before."""
    usual, after = {"update_actor": 1_200.0}, {"update_actor": 2_300.0}
    steps = [summary(step, usual if step < 12 else after, leader="") for step in range(1, 31)]
    steps[11].noticed = slow(12, 7.7, 1.2)
    text = health_of(tmp_path / "run", steps)
    assert "Healthy" not in text
    assert "Still 2.30 s, before 1.20 s." in text


@pytest.mark.parametrize(
    ("suspect", "now"),
    [
        ("actor_rank3", "Still 3 GB, before 1 GB."),
        ("actor_rank1", "Whether it lasts is not known: in the last steps, the log has other"),
    ],
)
def test_memory_that_grew_lasts_if_the_log_has_the_process(
    suspect: str, now: str, tmp_path: Path
) -> None:
    """It has the largest one of each role."""
    steps = [summary(step, leader="") for step in range(1, 31)]
    steps[9].noticed = Trigger(
        kind="anomaly",
        sign="memory",
        noticed=10,
        suspects=[suspect],
        value=3e9,
        median=1e9,
        memory="held",
        reason=f"step 10: memory of {suspect} has grown by 2 GB",
    )
    text = health_of(tmp_path / "run", steps)
    assert now in text
    assert f"Look at {suspect}." in text


@pytest.mark.parametrize("share", [None, 0.1, 0.6])
def test_a_lack_of_cpu_is_said_without_a_notice(
    share: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page and in ``top``, as nothing else is as usual to compare with."""
    steps = [summary(step, leader="") for step in range(1, 31)]
    for step in steps[::2]:  # a reading is not made in each step
        [actor] = [row for row in step.memory if row.role == "actor"]
        actor.no_cpu = share
    text = health_of(tmp_path / "run", steps)
    is_short = share == 0.6
    assert ("Healthy" in text) is not is_short
    assert ("Short of CPU" in text) is is_short
    assert ("Give the processes more CPUs" in text) is is_short
    capsys.readouterr()
    main(["top", str(tmp_path / "run"), "--once"])
    sentence = (
        "short of CPU: a process of actor was ready to run and got no CPU for 60% of the time"
    )
    assert (sentence in " ".join(capsys.readouterr().out.split())) is is_short


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("steps_of_growth", "how"),
    [
        (1, r"jumped from 4\.\d+ s to 5\.\d+ s in step 20, most in update_actor \(from [23]"),
        (20, r"grew from 4\.\d+ s to 5\.\d+ s in steps (\d+) to \d+, most in update_actor"),
        (40, r"grew from 4\.\d+ s to 5\.\d+ s since step (\d+), most in update_actor"),
    ],
)
def test_growth_is_no_jump_and_has_its_begin(
    steps_of_growth: int, how: str, seed: int, tmp_path: Path
) -> None:
    """A slow first step and an outlier do not hide it; a fault that is noticed is there since its
    begin, too.
    """
    noise = random.Random(seed)
    steps = []
    for step in range(1, 60):
        actor_ms = 3_000 * (1 + 0.4 * min(max(step - 19, 0) / steps_of_growth, 1))
        times = {
            "rollout": 1_000 * (3 if step in (1, 30) else 1),
            "update_actor": actor_ms * noise.lognormvariate(0, 0.01),
        }
        steps.append(summary(step, times, leader=""))
    steps[44].noticed = slow(45, steps[44].exposed_s["update_actor"], 3.0)
    text = health_of(tmp_path / "run", steps)
    found = re.search(f"Steps {how}", text)
    assert found is not None, text
    noticed = re.search(r"Not as usual since step (\d+): update_actor", text)
    assert noticed is not None, text
    assert all(abs(int(since) - 20) <= 3 for since in (*found.groups(), noticed[1]))


def test_a_change_that_is_over_is_not_told(tmp_path: Path) -> None:
    steps = [
        summary(step, {"update_actor": 3_000 + 2_000 * (9 < step < 22) + step % 7}, leader="")
        for step in range(1, 40)
    ]
    assert "Healthy\n" in health_of(tmp_path / "run", steps)


def test_a_fault_is_since_its_begin_not_since_its_notice(tmp_path: Path) -> None:
    """Some steps pass until it is noticed; a captured one before it does not count."""
    usual, after = {"update_actor": 1_000.0}, {"update_actor": 2_000.0}
    steps = [summary(step, usual if step < 8 else after, leader="") for step in range(1, 31)]
    steps[5] = summary(6, after, leader="", captured="step_000006")
    steps[16].noticed = slow(17, 2.0, 1.0)
    assert "Not as usual since step 8: update_actor" in health_of(tmp_path / "run", steps)


def test_a_lead_is_since_the_first_step_that_shows_it(tmp_path: Path) -> None:
    """Steps without a known leader do not show its begin."""
    leaders = dict.fromkeys(range(8, 31), "actor_rank1")
    leaders |= {5: "actor_rank3", 9: "", 10: ""}
    steps = [summary(step, leader=leaders.get(step, "")) for step in range(1, 31)]
    steps[12].noticed = lead(13, 0.03)
    assert "Not as usual since step 8: actor_rank1" in health_of(tmp_path / "run", steps)


@pytest.mark.parametrize(
    ("captured", "shows"),
    [
        (Trigger(kind="anomaly", noticed=10, stage="update_actor", suspects=["actor_rank1"]), True),
        (
            Trigger(kind="anomaly", noticed=10, stage="update_actor", suspects=["actor_rank0"]),
            False,
        ),
        (Trigger(kind="anomaly", noticed=10, stage="rollout", suspects=["actor_rank1"]), False),
        (Trigger(kind="demand", stage="update_actor"), True),
        (Trigger(kind="schedule"), True),
    ],
)
@pytest.mark.parametrize("step", [3, 22])
def test_a_capture_of_the_same_fault_is_found(
    captured: Trigger, shows: bool, step: int, tmp_path: Path
) -> None:
    """Whatever requested it: since the begin of the fault, with its stage and process."""
    run = tmp_path / "run"
    usual, after = {"update_actor": 1_000.0}, {"update_actor": 2_000.0}
    steps = [summary(step, usual if step < 8 else after, leader="") for step in range(1, 31)]
    steps[16].noticed = msgspec.structs.replace(slow(17, 2.0, 1.0), suspects=["actor_rank1"])
    steps[-1].waits = "step 22 was captured, and the watch pauses"
    steps[step - 1].captured = f"step_{step:06d}"
    rewrite(build_step(run, step=step), step=step, trigger=captured)
    text = health_of(run, steps)
    is_shown = shows and step == 22
    assert ("It was not captured" in text) is not is_shown
    assert ("Step 22: " in text) is is_shown
    assert "Look at actor_rank1." in text
