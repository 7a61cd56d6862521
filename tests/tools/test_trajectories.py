"""The ``trajectories`` tool and the mixins that record with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_loops import request, settings

from verl_profiling import span, stage, trajectory
from verl_profiling.capture.session import Session
from verl_profiling.files.trajectory_log import read_log
from verl_profiling.manifest import CaptureResult
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


def test_a_log_that_was_full_is_truncated_and_says_what_is_missing(tmp_path: Path) -> None:
    with record_step({**CONFIG, "tools": {"trajectories": {"max_spans": 3}}}, tmp_path) as step:
        roll_out(5)
    (artifact,) = step.result.artifacts
    assert (artifact.status, artifact.events) == ("truncated", 6)
    assert artifact.reason.startswith(
        "2 spans and 2 trajectories after the first 3 were left out; raise tools."
    )
    assert read_log(step.path).spans_left_out == 2


def test_a_process_that_had_nothing_to_do_is_skipped_and_says_so(tmp_path: Path) -> None:
    """There may be more processes than prompts: no file, and nothing is wrong."""
    with record_step(CONFIG, tmp_path) as step:
        pass
    assert (step.result.status, step.result.reason) == (
        "skipped",
        "no trajectory and no span ran in this process",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["actor_rank0.result.json"]
