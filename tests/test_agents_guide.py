"""The guide for coding agents: its schemas hold, and its rule finds the culprit and a change."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import whole_step
from drawn_summaries import summary
from guide_rule import culprit_and_change
from step_folders import build_step
from test_top import write_run

from verl_profiling.cli import main
from verl_profiling.watch.log_writer import WatchLog

validator = pytest.importorskip("jsonschema").Draft202012Validator

DATA = Path(__file__).parent / "data"


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the first document of a command, which is valid by the schema of the command."""

    def run(command: str, *arguments: str) -> dict[str, Any]:
        main(["schema", command])
        schema = json.loads(capsys.readouterr().out)
        main([command, *arguments, "--json"])
        found = json.loads(capsys.readouterr().out.splitlines()[0])
        validator(schema).validate(found)
        assert not validator(schema).is_valid({})
        return dict(found)

    return run


def test_documents_are_valid(tmp_path: Path, document: Any) -> None:
    """Of a drawn run, of a run without captures, of recorded steps and of one H100's."""
    run = tmp_path / "run"
    write_run(run, trigger={"slow_stage": 1.3, "window": 20})
    for number in range(30):
        WatchLog(run)(summary(number))
    document("report", str(run))
    step = str(build_step(run, step=29))
    document("top", str(run), "--once")
    document("check", str(run))
    document("diff", step, step, "--fail-above", "5")
    settings = tmp_path / "conf.json"
    settings.write_text('{"enable": true, "schedule": {"every": 5}}')
    document("plan", str(settings), "--steps", "20")
    with tarfile.open(DATA / "demo_steps.tar.gz") as steps:
        steps.extractall(tmp_path / "demos", filter="data")
    for folder in (step, DATA / "h100" / "vllm", *(tmp_path / "demos").iterdir()):
        document("report", str(folder))
        document("what-if", str(folder))


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (8, 4), (8, 2), (16, 4)])
@pytest.mark.parametrize("fault", ["slow rank", "long tail", "slow weight sync", "host-bound"])
def test_the_rule_finds_planted_faults(
    tmp_path: Path, document: Any, fault: str, ranks: int, replicas: int
) -> None:
    """The process, and the change that undoes the fault, from the document alone."""
    whole_step(tmp_path, ranks=ranks, replicas=replicas, fault=fault)
    culprit, change = culprit_and_change(document("report", str(tmp_path)))
    lane, option = {
        "slow rank": (f"actor_rank{ranks * 5 // 8}", "--balance update_actor"),
        "long tail": (f"rollout{replicas - 1}_rank0", "--no-tail 90"),
        "slow weight sync": ("rollout0_rank0", "--scale update_weights=0.5"),
        "host-bound": (
            "actor_rank0",
            "fewer, larger launches; CUDA graphs; fewer synchronisations",
        ),
    }[fault]
    assert (culprit.split()[0], change) == (lane, option)


def test_the_rule_finds_a_tool_that_blocks(tmp_path: Path, document: Any) -> None:
    """In a recorded step of the recipe, whose tool blocks the event loop."""
    with tarfile.open(DATA / "demo_steps.tar.gz") as steps:
        steps.extractall(tmp_path, filter="data")
    culprit, change = culprit_and_change(document("report", str(tmp_path / "agent")))
    assert (culprit, change) == ("agent_loop_rank0 agent_loop_rank1", "--unblock sandbox")
