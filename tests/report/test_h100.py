"""Steps that were captured on an H100 (``tests/data/README.md``),
as the report shows them without a GPU.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from example_loops import read_trace

from verl_profiling.analysis import open_step
from verl_profiling.manifest import Artifact
from verl_profiling.tools.torch_profiler import output_of_trace

H100 = Path(__file__).parents[1] / "data" / "h100"


def test_a_kernel_belongs_to_the_stage_that_launched_it() -> None:
    """40 products were launched in a stage, and nearly all of them ran in the next one."""
    calls = Counter[str]()
    for row in open_step(H100 / "late_kernels/step_000001").report().kernels:
        calls[row.stage] += row.calls
    assert calls == {"old_log_prob": 40, "update_actor": 1}


@pytest.mark.parametrize("number", [b"0", b"18446744073709551615"])
def test_a_kernel_without_the_number_of_its_launch_is_counted_where_it_begins(
    tmp_path: Path, number: bytes
) -> None:
    """0 is the number of no launch, and CUPTI's have 32 bits."""
    step = shutil.copytree(H100 / "late_kernels/step_000001", tmp_path / "step_000001")
    for trace in step.glob("*.json.gz"):
        content = gzip.decompress(trace.read_bytes())
        trace.write_bytes(
            gzip.compress(re.sub(rb'"correlation": \d+', b'"correlation": ' + number, content))
        )
    calls = Counter[str]()
    for row in open_step(step).report().kernels:
        calls[row.stage] += row.calls
    assert calls == {"old_log_prob": 1, "update_actor": 40}


def test_a_trainer_and_vllm_with_cuda_graphs_share_a_gpu() -> None:
    """One device with two lanes; kernels that graphs replay are in the rollout:
    two layers in 12 batches.
    """
    report = open_step(H100 / "vllm/step_000004").report()
    [device] = report.devices
    assert (device.lanes, device.kind) == (["actor_rank0", "rollout0_rank0"], "cuda")
    [engine] = report.engines
    assert (engine.iterations, engine.prefill_tokens, engine.decode_tokens) == (12, 256, 1586)
    assert engine.again_tokens == 117  # the engine computed more than its requests have
    assert {row.stage for row in report.kernels} == {
        "rollout",
        "old_log_prob",
        "update_actor",
        "update_weights",
    }
    attention = [row for row in report.kernels if row.name == "kernel_unified_attention"]
    assert [(row.stage, row.calls) for row in attention] == [("rollout", 24)]


def test_a_discrete_capture_has_a_trace_and_the_kernels_of_each_stage() -> None:
    """The observed time of a lane is that of its windows."""
    report = open_step(H100 / "discrete/step_000004").report()
    assert [len(row.traces) for row in report.workers] == [3, 1]
    assert [row.span_us for row in report.workers] == pytest.approx([106_019, 94_545], abs=1)
    calls = Counter[str]()
    for row in report.kernels:
        calls[row.stage] += row.calls
    assert calls == {"rollout": 829, "old_log_prob": 163, "update_actor": 923, "update_weights": 27}


def test_a_merged_timeline_keeps_each_allocation(tmp_path: Path) -> None:
    """Those of the device and of the host, which torch records with the option ``memory``."""
    merged = tmp_path / "merged.json.gz"
    open_step(H100 / "memory.torch.json.gz").merge(merged)
    before, after = (
        [
            event["args"]["Bytes"]
            for event in read_trace(path)["traceEvents"]
            if event["name"] == "[memory]"
        ]
        for path in (H100 / "memory.torch.json.gz", merged)
    )
    assert len(before) == 2376
    assert sorted(after) == sorted(before)


@pytest.mark.parametrize(("trace", "lost"), [("idle", ""), ("held", "cuda")])
def test_an_idle_gpu_is_told_from_one_that_another_profiler_records(
    tmp_path: Path, trace: str, lost: str
) -> None:
    """Without kernels, Kineto's own synchronization shows that CUPTI was not held
    by somebody else.
    """
    expected = Artifact(
        path="actor_rank0.torch.json.gz", lane="actor_rank0", tool="torch", status="missing"
    )
    raw = tmp_path / "raw"
    raw.write_bytes(gzip.decompress((H100 / f"{trace}.torch.json.gz").read_bytes()))
    artifact = output_of_trace(raw, tmp_path / expected.path, expected, device="cuda").finish()
    assert (artifact.status, artifact.unrecorded_device) == ("ok", lost)
