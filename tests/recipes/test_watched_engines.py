"""The recipe's watch, on real engines: a replica becomes late,
and is captured beside the healthy one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed; `make env` builds an environment"
)

from reader import run_module
from test_grpo_tiny import REPLICAS

from verl_profiling.files.run_files import read_manifest

LATE_FROM, LAST = 10, 16
SETTINGS = (
    "rollout.engine=vllm",
    "profiling=e2e",
    f"profiling.schedule.steps=[{LAST}]",
    "profiling.watch.enable=true",
    "profiling.watch.every=5",
    "profiling.watch.trigger={window: 6, cooldown: 0, max_captures: 5}",
    "fault.replica=1",
    f"fault.step={LATE_FROM}",
    "fault.seconds=4",
    f"steps={LAST}",
    "batch.prompts=16",
)

pytestmark = [pytest.mark.recipes, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_replica_that_is_late_is_captured_with_its_peer_and_nobody_else(tmp_path: Path) -> None:
    """The stage `rollout` of both engines, and no training rank;
    the next capture is of all again.
    """
    run_module("recipes.grpo_tiny.train", f"output_dir={tmp_path}", *SETTINGS)
    manifests = [
        read_manifest(folder) for folder in sorted((tmp_path / "profiling").glob("step_*"))
    ]
    aimed = [one for one in manifests if (one.trigger.noticed or 0) >= LATE_FROM]
    assert aimed, [one.trigger for one in manifests]
    assert aimed[0].trigger.suspects == ["rollout1_rank0"]
    assert aimed[0].trigger.peers == ["rollout0_rank0"]
    found = {worker.name: (worker.status, worker.mode) for worker in aimed[0].workers}
    assert found == {"rollout0": ("ok", "discrete"), "rollout1": ("ok", "discrete")}
    traces = [artifact.path for worker in aimed[0].workers for artifact in worker.artifacts]
    assert traces == [f"{lane}.rollout.torch.json.gz" for lane in REPLICAS]
    last = {worker.name: worker.status for worker in manifests[-1].workers}
    assert last == dict.fromkeys(("actor_rank0", "actor_rank1", "rollout0", "rollout1"), "ok")
