"""Real verl 0.9 with FSDP2 and vLLM on CPU, profiled in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_loops import read_trace

from integrations.run_contract import RunContract
from integrations.verl_runs import PLUGINS, run_verl

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]


class TestVLLM(RunContract):
    """The contract with vLLM."""

    engine = "vllm"
    iteration = "execute_"
    limits = ("prefill", "decode")


def test_a_worker_that_is_killed_leaves_the_rest(tmp_path: Path) -> None:
    """The run ends with verl's own error, and the engine's recording
    of the open step can be read.
    """
    run = run_verl(tmp_path, "profiling=e2e", PLUGINS=f"{PLUGINS},integrations.killed_worker")
    assert run.code != 0
    assert "ActorDiedError" in run.output or "RayActorError" in run.output
    manifest = run.manifest(2)
    assert not manifest.complete
    assert run.worker(2, "actor").status == "failed"
    rollout = run.worker(2, "rollout")
    assert rollout.status == "ok"
    assert read_trace(run.save_path / "step_000002" / rollout.artifacts[0].path)["traceEvents"]
