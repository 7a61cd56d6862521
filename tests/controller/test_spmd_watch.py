"""The watch where one program runs on every rank: rank 0's summaries have all of them."""

from __future__ import annotations

import json
import time
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from rank_processes import run_ranks

from verl_profiling.cli import main
from verl_profiling.controller.rank_summaries import RankSummaries
from verl_profiling.controller.spmd import Ranks
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import RankUse, StepSummary

PROGRAM = Path(__file__).with_name("spmd_watch_program.py")
LANES = ["actor_rank0", "actor_rank1", "actor_rank2"]

pytestmark = pytest.mark.timeout(180)


def run(folder: Path, scenario: str = "", **settings: Any) -> list[str]:
    results = run_ranks(PROGRAM, 3, [str(folder), scenario, json.dumps(settings)], folder)
    assert [status for status, _ in results] == [0, 0, 0], results
    return [log for _, log in results]


def summaries(folder: Path, rank: int = 0, training: int = 0) -> list[StepSummary]:
    data = (folder / f"summaries_{rank}_{training}.json").read_bytes()
    return msgspec.json.decode(data, type=list[StepSummary])


def test_a_rank_that_becomes_late_is_captured_with_a_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the store: noticed within five steps;
    whom the capture is not aimed at is not missing in it.
    """
    trigger: dict[str, Any] = {"window": 8, "cooldown": 0, "slow_stage": 4.0, "slow_step": None}
    watch = {"enable": True, "every": 10, "trigger": {**trigger, "leader": None, "memory": None}}
    logs = run(tmp_path, "slow", all={"watch": watch, "tool": "torch"})
    folder = max(
        (tmp_path / "run").glob("step_*")
    )  # an earlier one is of something else on the machine
    manifest = read_manifest(folder)
    said = manifest.trigger
    assert (said.kind, said.stage, said.suspects) == ("anomaly", "rollout", ["actor_rank2"]), logs
    assert 15 <= (said.noticed or 0) < manifest.step
    [peer] = said.peers
    recorded = {worker.name: worker.status for worker in manifest.workers}
    assert recorded == {peer: "ok", "actor_rank2": "ok"}
    assert all(worker.artifacts for worker in manifest.workers)
    assert (manifest.complete, manifest.notes) == (True, [])
    assert main(["report", "--all", str(folder)]) == 0
    assert "actor_rank2" in capsys.readouterr().out
    found = {summary.step: summary for summary in summaries(tmp_path)}
    assert list(found) == list(range(1, max(found) + 1))
    assert all([use.lane for use in summary.loop] == LANES for summary in found.values())
    assert found[manifest.step].captured == folder.name


def begin_of(use: RankUse) -> int:
    """Return when the first stage of a process began."""
    return next(begin_ns for _, begin_ns, _, _ in use.each_run())


def has_all_ranks(summary: StepSummary, logs: list[str]) -> None:
    """Check that all ranks are in the loop of a step, and that its rows add up."""
    assert [use.lane for use in summary.loop] == LANES, (summary.step, logs)
    assert [use.stages for use in summary.loop] == ["rollout\nupdate_actor"] * 3
    assert summary.workers == []
    assert sum(row.exposed_ns for row in summary.exposed) == summary.duration_ns


def test_a_late_rank_leads_in_the_accounts_of_rank_0_training_after_training(
    tmp_path: Path,
) -> None:
    """All ranks are there under the names of manifests, and the rows add up to the step."""
    logs = run(tmp_path, "twice")
    for training in range(2):
        found = summaries(tmp_path, training=training)
        assert [summary.step for summary in found] == list(range(1, 9)), logs
        for summary in found:
            has_all_ranks(summary, logs)
        first = [summary.exposed[0] for summary in found]
        begins = [begin_of(use) - summary.begin_ns for summary in found for use in summary.loop]
        assert median(begins) < 100e6
        assert median(row.name == "rollout" for row in first), "but for a busy machine"
        leaders = [(row.leader, row.role) for row in first]
        assert leaders.count(("actor_rank2", "actor")) >= 5, "another may be interrupted in a step"
        assert median(row.exposed_ns for row in first) > 150e6
        assert median(row.lead_ns for row in first) > 100e6
        for rank in (1, 2):
            own = [
                (summary.step, summary.loop[0].lane)
                for summary in summaries(tmp_path, rank, training)
            ]
            assert own == [(step, LANES[rank]) for step in range(1, 9)]


def test_workers_that_are_added_when_training_has_begun_are_of_one_loop(tmp_path: Path) -> None:
    """They tell that there are other ranks: until then no rank takes a folder, or listens, for
    itself.

    Ranks that end after rank 0 end well, and strict settings raise what goes wrong.
    """
    watch = {"enable": True, "every": 2}
    logs = run(
        tmp_path, "added inside", all={"strict": True, "watch": watch, "schedule": {"steps": [4]}}
    )
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    manifest = read_manifest(tmp_path / "run" / "step_000004")
    assert [(worker.name, worker.status) for worker in manifest.workers] == [
        (lane, "ok") for lane in LANES
    ]
    found = summaries(tmp_path)
    assert [[use.lane for use in summary.loop] for summary in found] == [LANES] * 8, logs
    assert logs == ["", "", ""]


def test_ranks_with_other_settings_hold_up_nothing(tmp_path: Path) -> None:
    """One without the watch is logged once; one that sends less often is
    in the summaries once it has.
    """
    watch = {"enable": True, "every": 2}
    logs = run(
        tmp_path,
        "unlike",
        all={"watch": watch, "timeouts": {"start_s": 1.5, "stop_s": 20, "finish_s": 20}},
        **{
            "1": {"watch": {"enable": False}, "schedule": {"steps": [99]}},
            "2": {"watch": {**watch, "every": 3}},
        },
    )
    found = summaries(tmp_path)
    assert [summary.step for summary in found] == list(range(1, 17)), logs
    lanes = {tuple(use.lane for use in summary.loop) for summary in found}
    assert ("actor_rank0", "actor_rank2") in lanes, logs
    assert not any("actor_rank1" in ranks for ranks in lanes)
    assert logs[0].count("watch: rank 1 has sent no step summaries") == 1, logs[0]
    assert logs[1:] == ["", ""]


@pytest.mark.parametrize("recorder", ["on", "off"])
def test_a_rank_that_is_late_inside_a_stage_leads_if_torch_recorded_it(
    tmp_path: Path, recorder: str
) -> None:
    """Late by a seventh, and all leave the stage together: it is noticed; without records,
    nobody leads.
    """
    buffer = {"TORCH_FR_BUFFER_SIZE": "2000" if recorder == "on" else "0"}
    trigger: dict[str, Any] = {"slow_stage": None, "slow_step": None, "memory": None}
    watch = {"enable": True, "every": 1, "trigger": trigger}
    logs = run(tmp_path, "inside", all={"watch": watch}, environment=buffer)
    found = summaries(tmp_path)
    assert [summary.step for summary in found] == list(range(1, 10)), logs
    leaders = [row.leader for summary in found for row in summary.exposed if row.leader]
    assert set(leaders) <= {"actor_rank2"}
    assert (len(leaders) >= 3) == (recorder == "on"), logs
    assert ("actor_rank2 was in stage update_actor" in logs[0]) == (recorder == "on"), logs


def test_a_rank_that_is_past_a_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has no summary of step 3, and sends its later steps all the same."""
    monkeypatch.setattr("verl_profiling.controller.spmd._trainings", repeat(0))
    store = dist.HashStore()
    ranks = [Ranks(rank, 2, store) for rank in range(2)]
    leader, other = (RankSummaries(each, 10) for each in ranks)
    for sent, expected in (((1, 2), (1, 2)), ((4, 5), (3, 4)), ((7, 8), (6, 7))):
        other.send([StepSummary(step=step, begin_ns=0) for step in sent])
        begun_s = time.monotonic()
        leader.receive([StepSummary(step=step, begin_ns=0) for step in expected], lambda: 20.0)
        assert time.monotonic() - begun_s < 10
    for each in ranks:
        each.end()


def test_a_loop_that_restarts_its_step_numbers_has_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a rank had a step before that rank 0 had not."""
    monkeypatch.setattr("verl_profiling.controller.spmd._trainings", repeat(0))
    store = dist.HashStore()
    ranks = [Ranks(rank, 2, store) for rank in range(2)]
    leader, other = (RankSummaries(each, 10) for each in ranks)
    use = RankUse(lane="actor_rank1", role="actor", rank=1)
    for sent, expected in (((1, 2, 3), (1, 2)), ((1, 2, 3), (1, 2, 3)), ((4,), (4,))):
        other.send([StepSummary(step=step, begin_ns=0, loop=[use]) for step in sent])
        steps = [StepSummary(step=step, begin_ns=0) for step in expected]
        leader.receive(steps, lambda: 20.0)
        assert [leader.joined(step).loop for step in steps] == [[use]] * len(expected)
    for each in ranks:
        each.end()
