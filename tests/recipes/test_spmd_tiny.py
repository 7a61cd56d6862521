"""The recipe without Ray, started with torchrun as its page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reader import run_module

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import Manifest

pytest.importorskip("hydra", reason="hydra-core is not installed; `make env` builds an environment")


STAGES = ["rollout", "reward", "update_actor"]


def has_both_ranks(manifest: Manifest, mode: str) -> None:
    """Check that both ranks recorded a step whole."""
    assert [(worker.name, worker.status, worker.mode) for worker in manifest.workers] == [
        ("actor_rank0", "ok", mode),
        ("actor_rank1", "ok", mode),
    ]
    statuses = [artifact.status for worker in manifest.workers for artifact in worker.artifacts]
    assert statuses == ["ok"] * (2 if mode == "e2e" else 4)
    assert [span.name for span in manifest.stages] == STAGES
    assert manifest.notes == []


@pytest.mark.timeout(200)
@pytest.mark.recipes
@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_both_ranks_are_in_each_step(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every artifact of both is whole when the run ends,
    and one timeline and one report hold them.
    """
    launcher = "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"
    printed = run_module(
        *launcher, "recipes.spmd_tiny.train", f"output_dir={tmp_path}", f"profiling={mode}"
    )
    # Both ranks print into one pipe: what one logs may follow on a line of the other.
    rewards = [float(reward) for reward in re.findall(r"step \d+  reward (\d\.\d{3})", printed)]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0], "it learns"
    run = tmp_path / "profiling"
    for step in (2, 3):
        has_both_ranks(read_manifest(run / f"step_{step:06d}"), mode)
    summaries = WatchLogReader(run).read()
    assert [summary.step for summary in summaries] == [1, 2, 3, 4]
    for summary in summaries:
        assert [row.name for row in summary.exposed if row.name] == STAGES, "of all ranks"
        assert [(memory.role, memory.processes) for memory in summary.memory] == [("actor", 2)]
    assert main(["check", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run / "step_000002"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [worker["name"] for worker in report["workers"]] == ["actor_rank0", "actor_rank1"]
    assert [
        stage["name"] for stage in report["stages"] if stage["name"] in ("rollout", "update_actor")
    ]
    assert main(["merge", str(run)]) == 0
