"""Steps that were captured on an H100 (``tests/data/README.md``), as the report shows them without a GPU."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from verl_profiling.analysis import open_step
from verl_profiling.manifest import Artifact
from verl_profiling.tools.trace_file import output_of_trace

H100 = Path(__file__).parents[1] / "data" / "h100"


def test_a_kernel_belongs_to_the_stage_that_launched_it() -> None:
    """40 products were launched in a stage, and nearly all of them ran in the next one."""
    calls = Counter[str]()
    for row in open_step(H100 / "late_kernels/step_000001").report().kernels:
        calls[row.stage] += row.calls
    assert calls == {"old_log_prob": 40, "update_actor": 1}


def test_a_trainer_and_vllm_with_cuda_graphs_share_a_gpu() -> None:
    """One device with two lanes; kernels that graphs replay are in the rollout: two layers in 12 batches."""
    report = open_step(H100 / "vllm/step_000004").report()
    [device] = report.devices
    assert (device.lanes, device.kind) == (["actor_rank0", "rollout0_rank0"], "cuda")
    [engine] = report.engines
    assert (engine.iterations, engine.prefill_tokens, engine.decode_tokens) == (14, 256, 1447)
    assert {row.stage for row in report.kernels} == {
        "rollout",
        "old_log_prob",
        "update_actor",
        "update_weights",
    }
    attention = [row for row in report.kernels if row.name == "kernel_unified_attention"]
    assert [(row.stage, row.calls) for row in attention] == [("rollout", 24)]


@pytest.mark.parametrize(("trace", "lost"), [("idle", ""), ("held", "cuda")])
def test_an_idle_gpu_is_told_from_one_that_another_profiler_records(
    tmp_path: Path, trace: str, lost: str
) -> None:
    """Without kernels, Kineto's own synchronization shows that CUPTI was not held by somebody else."""
    expected = Artifact(path="actor_rank0.torch.json.gz", lane="actor_rank0", tool="torch", status="missing")
    raw = tmp_path / "raw"
    raw.write_bytes(gzip.decompress((H100 / f"{trace}.torch.json.gz").read_bytes()))
    artifact = output_of_trace(raw, tmp_path / expected.path, expected, device="cuda").finish()
    assert (artifact.status, artifact.unrecorded_device) == ("ok", lost)
