"""The ``trajectories`` tool and the mixins that record with it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from example_loops import request, settings

from verl_profiling import span, stage, trajectory
from verl_profiling.capture.session import Session
from verl_profiling.files.trajectory_log import TrajectoryLog, read_log
from verl_profiling.manifest import Artifact, CaptureResult
from verl_profiling.testing import record_step
from verl_profiling.workers import AgentLoopCaptureMixin, RewardCaptureMixin

CONFIG = {"enable": True, "tool": "trajectories"}


def roll_out(groups: int = 2) -> None:
    for number in range(groups):
        with trajectory(group=number), span("tool:search"):
            pass


def captured(worker: AgentLoopCaptureMixin, folder: Path, groups: int = 2) -> CaptureResult:
    assert worker.start_capture(request(folder)).status in ("recording", "armed")
    with stage("rollout"):
        roll_out(groups)
    return worker.stop_capture("run-1", 60).result


@pytest.mark.parametrize(
    ("mixin", "lane"),
    [(AgentLoopCaptureMixin, "agent_loop_rank1"), (RewardCaptureMixin, "reward_rank1")],
)
def test_a_cpu_process_records_trajectories_whatever_the_tool_is(
    tmp_path: Path, session: Session, mixin: type[AgentLoopCaptureMixin], lane: str
) -> None:
    """The other roles' tool and mode are not its own."""
    worker = mixin()
    worker.init_capture(settings(tool="nsys", mode="discrete"), rank=1, world_size=2)
    result = captured(worker, tmp_path)
    assert (result.tools, result.mode, result.status) == (["trajectories"], "e2e", "ok")
    log = read_log(tmp_path / f"{lane}.trajectories.jsonl.gz")
    assert (log.lane, [found.group for found in log.trajectories]) == (lane, ["0", "1"])
    assert [span.name for span in result.stages] == ["rollout"]


def test_a_role_that_is_told_a_tool_records_with_both(tmp_path: Path, session: Session) -> None:
    """``roles.agent_loop.tool`` adds to it, ``mode`` sets the mode, and options are kept."""
    worker = AgentLoopCaptureMixin()
    told: dict[str, Any] = {"agent_loop": {"tool": "spans", "mode": "discrete"}}
    worker.init_capture(
        settings(tool="torch", roles=told, tools={"trajectories": {"max_spans": 1}})
    )
    result = captured(worker, tmp_path)
    assert (result.tools, result.mode) == (["spans", "trajectories"], "discrete")
    (artifact,) = result.artifacts
    assert (artifact.path, artifact.stage) == (
        "agent_loop_rank0.rollout.trajectories.jsonl.gz",
        "rollout",
    )


def full(tmp_path: Path, **more: Any) -> tuple[Artifact, TrajectoryLog]:
    """Record 64 groups of two trajectories, with two spans each, into a log of 100 spans."""
    with record_step({**CONFIG, "tools": {"trajectories": {"max_spans": 100}}}, tmp_path) as step:
        for number in range(64):
            for sample in range(2):
                given = {"group": number, "sample": sample, **more}
                with trajectory(**given), span("tool:search"), span("inner"):
                    pass
    (artifact,) = step.result.artifacts
    return artifact, read_log(step.path)


def test_a_log_that_was_full_has_whole_groups_of_the_whole_time(tmp_path: Path) -> None:
    """Each with all its trajectories and spans; the status says what is missing."""
    artifact, log = full(tmp_path)
    groups = Counter(int(record.group) for record in log.trajectories)
    assert len(groups) >= 10
    assert {*groups.values()} == {2}
    assert min(groups) < 16
    assert max(groups) >= 48
    owners = Counter(record.trajectory for record in log.spans)
    assert owners == {record.id: 2 for record in log.trajectories}
    assert artifact.status == "truncated"
    left_out = 128 - len(log.trajectories)
    assert artifact.reason.startswith(
        f"the log is a sample of groups: {2 * left_out} spans and {left_out} trajectories were"
    )
    assert (log.trajectories_left_out, log.spans_left_out) == (left_out, 0)


def test_each_trajectory_without_a_group_is_drawn_by_itself(tmp_path: Path) -> None:
    _, log = full(tmp_path, group="")
    assert {*Counter(record.trajectory for record in log.spans).values()} == {2}
    assert 10 <= len(log.trajectories) <= 50


def test_of_one_group_the_first_spans_are_kept(tmp_path: Path) -> None:
    """Nothing of it can go as a whole."""
    _, log = full(tmp_path, group="all")
    assert (len(log.spans), log.spans_left_out) == (100, 156)


def test_a_block_names_its_span_in_a_log_that_was_full(tmp_path: Path) -> None:
    """Other spans came and went since."""

    async def roll_out() -> None:
        for number in range(64):
            with trajectory(group=number), span("tool:blocks" if number % 8 else "tool:long"):
                time.sleep(0 if number % 8 else 0.15)
            await asyncio.sleep(0)

    with record_step({**CONFIG, "tools": {"trajectories": {"max_spans": 40}}}, tmp_path) as step:
        asyncio.run(roll_out())
    log = read_log(step.path)
    names = {record.id: record.name for record in log.spans}
    named = [names[block.span] for block in log.blocks if block.span in names]
    assert log.trajectories_left_out
    assert named
    assert {*named} == {"tool:long"}


def test_a_process_that_had_nothing_to_do_is_skipped_and_says_so(tmp_path: Path) -> None:
    """There may be more processes than prompts: no file, and nothing is wrong."""
    with record_step(CONFIG, tmp_path) as step:
        pass
    assert (step.result.status, step.result.reason) == (
        "skipped",
        "no trajectory and no span ran in this process",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["actor_rank0.result.json"]
