"""A step in which the watch noticed something is never called usual."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_steps import Worker, report_of
from drawn_summaries import MS, summary
from step_folders import rewrite

from verl_profiling.analysis import open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.cli import EXIT_FINDING, EXIT_OK, main
from verl_profiling.files.step_summary import Hang, RoleMemory, StepSummary
from verl_profiling.watch.log_writer import WatchLog

STEP = "step_000001"
USUAL, SLOW = {"reward": 800.0, "update_actor": 500.0}, {"reward": 2400.0, "update_actor": 500.0}
SLOW_REWARD = Trigger(
    kind="anomaly",
    sign="slow_stage",
    noticed=12,
    stage="reward",
    suspects=["reward_rank0"],
    value=2.42,
    median=0.8,
    reason="step 12: stage reward took 2.42 s of the step; score of reward took 2.41 s in 4 calls",
)


def captured_run(run: Path, trigger: Trigger, steps: list[StepSummary]) -> Path:
    """Write a run whose last step is captured, with a worker that is always busy."""
    folder = run / STEP
    folder.mkdir(parents=True)
    busy = Worker("actor", kernels=[("gemm", 0, 3)], recorded=(0, 3))
    report_of(folder, [("reward", 0, 2.4), ("update_actor", 2.4, 3)], [busy], 3)
    rewrite(folder, trigger=trigger, step=steps[-1].step, steps=[steps[-1].step])
    log = WatchLog(run)
    for step in steps:
        log(step)
    return folder


def slow_from_10(last: int, recovers_at: int = 1000) -> list[StepSummary]:
    steps = []
    for number in range(1, last + 1):
        is_slow = 10 <= number < recovers_at
        captured = STEP if number == last else ""
        steps.append(
            summary(number, SLOW if is_slow else USUAL, leader="reward_rank0", captured=captured)
        )
    if last >= 12:
        steps[11].noticed = SLOW_REWARD
    return steps


def test_a_capture_of_the_watch_says_what_was_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that its step hung, though no rule knows why: in the report, the verdict, the page."""
    steps = slow_from_10(14)
    reason = "is in update_actor at loop.py:17 in work"
    steps[-1].hang = Hang("update_actor", 5.4, 0.5, "actor_rank1", reason, [])
    folder = captured_run(tmp_path / "run", SLOW_REWARD, steps)
    slow, hung = open_step(folder).report().findings
    assert slow.text.startswith(
        "The stage reward took 2.40 s, usually 800 ms. Noticed in step 12: "
    )
    assert "score of reward took 2.41 s in 4 calls" in slow.text
    assert (slow.rule, slow.lanes) == ("noticed", ["reward_rank0"])
    assert hung.text.startswith("The step hung: nothing progressed in update_actor for 5.40 s")
    assert hung.lanes == ["actor_rank1"]
    assert main(["report", str(folder.parent), "--verdict"]) == EXIT_FINDING
    assert "The stage reward took 2.40 s, usually 800 ms" in capsys.readouterr().out
    assert main(["report", str(folder.parent), "--save"]) == EXIT_OK
    page = (folder.parent / "index.html").read_text()
    assert "The stage reward took 2.40 s" in page
    assert "nothing unusual" not in page


@pytest.mark.parametrize("recovers_at", [1000, 15])
def test_any_capture_says_what_still_lasts(recovers_at: int, tmp_path: Path) -> None:
    """But not what was noticed and is over, though this capture's tool made its step slow."""
    steps = slow_from_10(30, recovers_at)
    if recovers_at < 30:
        steps[-1] = summary(30, SLOW, captured=STEP)
    folder = captured_run(tmp_path / "run", Trigger(kind="demand"), steps)
    [finding] = open_step(folder).report().findings
    assert ("Noticed in step 12" in finding.text) == (recovers_at == 1000)
    assert finding.text.startswith("The stage" if recovers_at == 1000 else "This step took 3")


@pytest.mark.parametrize("trigger", [Trigger(kind="schedule"), Trigger(kind="demand")])
@pytest.mark.parametrize(
    ("leader", "lead_ms", "who"),
    [
        ("reward_rank0", 1_500, " of reward_rank0"),
        ("reward_rank0", 0, " of reward_rank0"),
        ("reward_rank0", 200, " of several processes"),
        ("", 0, "; of which process is not known"),
    ],
)
def test_a_step_far_above_the_median_is_said_without_a_notice(
    leader: str, lead_ms: int, who: str, trigger: Trigger, tmp_path: Path
) -> None:
    """With the stage and the process, if that is known; steps of other stages do not count."""
    steps = [summary(number, USUAL) for number in range(1, 14)]
    steps[3] = summary(4, USUAL | {"validate": 9_000})
    steps.append(summary(14, SLOW, leader=leader, captured=STEP))
    reward = steps[-1].exposed[0]
    steps[-1].exposed[0] = msgspec.structs.replace(reward, lead_ns=lead_ms * MS)
    [finding] = open_step(captured_run(tmp_path / "run", trigger, steps)).report().findings
    assert finding.text == (
        f"This step took 3.40 s, 1.9 times the median of 13 steps; +1.60 s are reward{who}."
    )
    few = captured_run(tmp_path / "few", trigger, steps[-4:])
    assert open_step(few).report().findings == []


def test_a_notice_whose_value_is_not_logged_is_no_usual_step(tmp_path: Path) -> None:
    """Memory that grows is in the log as a notice alone."""
    reason = "step 12: the memory of actor_rank1 has grown by 409 MB"
    leak = Trigger(
        kind="anomaly", sign="memory", noticed=12, suspects=["actor_rank1"], reason=reason
    )
    steps = [summary(number, USUAL, captured=STEP * (number == 14)) for number in range(1, 15)]
    steps[11].noticed = leak
    [finding] = open_step(captured_run(tmp_path / "run", leak, steps)).report().findings
    assert finding.text == (
        "Noticed in step 12: the memory of actor_rank1 has grown by 409 MB. Whether this step has "
        "it is not known: it is not in the log."
    )


def test_memory_that_grew_is_told_in_bytes(tmp_path: Path) -> None:
    """It takes no time of the step."""
    leak = Trigger(
        kind="anomaly",
        sign="memory",
        noticed=12,
        suspects=["actor_rank1"],
        value=4e8,
        median=1e8,
        memory="held",
        reason="step 12: memory of actor_rank1 has grown by 300 MB",
    )
    steps = [summary(number, USUAL, captured=STEP * (number == 14)) for number in range(1, 15)]
    steps[11].noticed = leak
    steps[-1].memory = [RoleMemory(role="actor", lane="actor_rank1", held_bytes=460_000_000)]
    [finding] = open_step(captured_run(tmp_path / "run", leak, steps)).report().findings
    assert finding.text == (
        "Memory is 460 MB, before 100 MB. Noticed in step 12: memory of actor_rank1 has grown by "
        "300 MB."
    )
    assert finding.seconds == 0.0
