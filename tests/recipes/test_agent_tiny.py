"""The recipe of an agent, run as a user runs it: what its processes record,
and what the report finds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed; `make env` builds an environment"
)

from reader import run_module

from verl_profiling.analysis import open_step
from verl_profiling.files.trajectory_log import TrajectoryLog, read_log

pytestmark = [
    pytest.mark.recipes,
    pytest.mark.timeout(300),
]  # the first test of an engine runs the recipe
PROMPTS, GROUP, TURNS = 4, 4, 2


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("agent_tiny")
    run_module(
        *("recipes.agent_tiny.train", f"output_dir={output}", "steps=1", "profiling=e2e"),
        *(f"rollout.engine={request.param}", "rollout.replicas=1"),
        *(f"batch.prompts={PROMPTS}", f"batch.group_size={GROUP}", f"agent.turns={TURNS}"),
    )
    return output / "profiling" / "step_000001"


@pytest.fixture(scope="module")
def logs(step: Path) -> list[TrajectoryLog]:
    logs = [read_log(path) for path in sorted(step.glob("*.trajectories.jsonl.gz"))]
    assert [log.lane for log in logs] == ["agent_loop_rank0", "agent_loop_rank1"]
    return logs


def test_every_trajectory_is_recorded(logs: list[TrajectoryLog]) -> None:
    """Each sample of each group once, done, with its turns; and a span for all that it did."""
    found = [trajectory for log in logs for trajectory in log.trajectories]
    expected = {(f"1.{prompt}", sample) for prompt in range(PROMPTS) for sample in range(GROUP)}
    assert Counter((each.group, each.sample) for each in found) == Counter(expected)
    assert {(each.status, each.facts["turns"], each.facts["max_version"]) for each in found} == {
        ("done", TURNS, 0)
    }
    names = Counter(span.name for log in logs for span in log.spans)
    calls = sum(int(each.facts["tool_calls"] or 0) for each in found)
    assert names["environment:start"] == len(found)
    assert names["generate"] == names["reward"] == names["environment:step"] == TURNS * len(found)
    assert names["tool:sandbox"] + names["tool:search"] == calls > 0


def test_the_log_says_who_blocked(logs: list[TrajectoryLog]) -> None:
    """Each call of the sandbox, for nearly all of its time, and in which function."""
    for log in logs:
        calls = {span.id: span for span in log.spans if span.name == "tool:sandbox"}
        blocks = [block for block in log.blocks if block.span in calls]
        assert {block.span for block in blocks} == set(calls) != set()
        blocked_ns = sum(block.end_ns - block.begin_ns for block in blocks)
        assert blocked_ns == pytest.approx(
            sum(span.end_ns - span.begin_ns for span in calls.values()), rel=0.15
        )
        assert all("Tools._run (environment.py:" in block.function for block in blocks)


def test_the_report_begins_with_the_tool_that_blocks(step: Path) -> None:
    """The first finding names it, the processes whose event loops it blocked,
    and how many stood still.
    """
    first = open_step(step).report().findings[0]
    assert first.rule == "loop_blocked"
    assert set(first.lanes) == {"agent_loop_rank0", "agent_loop_rank1"}
    loops = ", ".join(first.lanes)
    assert first.text.startswith(f"Tool `sandbox` blocked the event loops of {loops} for ")
    assert f": {PROMPTS * GROUP} trajectories stood still" in first.text
