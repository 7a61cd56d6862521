"""A capture of a CUDA job without an event of its devices: said, and not taken for one of CPUs."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from step_folders import build_step, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.files.machine import VARIABLE
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Artifact
from verl_profiling.report.model import Report
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool, output_of_trace

OF_A_GPU = Path(__file__).parents[1] / "data" / "nccl_data.json.gz"
LANES = ["actor_rank0", "actor_rank1", "rollout0_rank0"]


@cache
def trace_of_a_gpu(with_device: bool, with_calls: bool = False) -> bytes:
    """Return a real trace; without its device it is what torch writes where it does not get CUPTI.

    With calls alone, it is what torch writes where CUPTI loses the kernels, as on some hosts with
    WSL.
    """
    trace = json.loads(gzip.decompress(OF_A_GPU.read_bytes()))
    if not with_device:
        lost = ("kernel", "gpu_", *(() if with_calls else ("cuda_runtime", "cuda_driver")))
        trace["traceEvents"] = [
            e for e in trace["traceEvents"] if not e.get("cat", "").startswith(lost)
        ]
    return json.dumps(trace).encode()


def finished(folder: Path, content: bytes, device: str) -> Artifact:
    """Return what becomes of a training worker's raw trace."""
    expected = Artifact(
        path="actor_rank0.torch.json.gz", lane="actor_rank0", tool="torch", status="missing"
    )
    part = folder / ".part"
    part.write_bytes(content)
    output = output_of_trace(part, folder / expected.path, expected, device=device)
    return output.finish()


@pytest.mark.parametrize(
    ("with_device", "device", "said"),
    [(False, "cuda", True), (True, "cuda", False), (False, "", False)],
)
def test_a_trace_without_its_device_says_so(
    tmp_path: Path, with_device: bool, device: str, said: bool
) -> None:
    """It stays readable; the manifest says what is not in it.
    A trace of a CPU job has nothing to say.
    """
    artifact = finished(tmp_path, trace_of_a_gpu(with_device), device)
    assert artifact.status == "ok"
    assert artifact.unrecorded_device == ("cuda" if said else "")
    assert ("cuda was in use, but none of its events was recorded" in artifact.reason) == said


def test_launches_without_a_kernel_say_so(tmp_path: Path) -> None:
    """Unlike the calls of a process whose device is idle."""
    artifact = finished(tmp_path, trace_of_a_gpu(with_device=False, with_calls=True), "cuda")
    assert artifact.unrecorded_device == "cuda"


def test_the_cause_is_named_where_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVTX that loads CUPTI is the known cause, with its remedy."""
    monkeypatch.setenv(VARIABLE, "/usr/local/cuda/lib64/libcupti.so.12")
    reason = finished(tmp_path, trace_of_a_gpu(with_device=False), "cuda").reason
    assert (
        f"{VARIABLE}=/usr/local/cuda/lib64/libcupti.so.12 makes NVTX the only subscriber of CUPTI"
        in reason
    )
    assert f"set {VARIABLE}=/nonexistent/" in reason


@pytest.mark.parametrize("suffix", [".pt.trace.json", ".trace.json.gz"])
@pytest.mark.parametrize(
    ("device", "activities", "said"),
    [("cuda", None, True), ("cuda", ("cpu",), False), ("cpu", None, False)],
)
def test_an_engines_trace_says_so_too(
    tmp_path: Path, suffix: str, device: str, activities: Any, said: bool
) -> None:
    """Plain or compressed; not where the settings ask for the host alone,
    or the engine runs on a CPU.
    """
    content = trace_of_a_gpu(with_device=False)
    raw = tmp_path / f"raw{suffix}"
    raw.write_bytes(gzip.compress(content, 1) if suffix.endswith("gz") else content)
    expected = Artifact(
        path="rollout0_rank0.torch.json.gz", lane="rollout0_rank0", tool="torch", status="missing"
    )
    tool = TorchTool(TorchOptions(activities=activities))
    output = tool.engine_output(raw, tmp_path / expected.path, expected, device)
    artifact = output.finish()
    assert (artifact.status, artifact.unrecorded_device) == ("ok", "cuda" if said else "")


def report_without(tmp_path: Path, *names: str, **fields: Any) -> Report:
    """Return the report of a step in which some workers used CUDA and recorded nothing of it."""
    folder = build_step(tmp_path)
    for worker in read_manifest(folder).workers:
        if worker.name in names:
            traces = [
                msgspec.structs.replace(one, unrecorded_device="cuda") for one in worker.artifacts
            ]
            rewrite_worker(folder, worker.name, artifacts=traces, **fields)
    return open_step(folder).report()


def test_the_report_does_not_take_it_for_a_capture_of_cpus(tmp_path: Path) -> None:
    """The first finding says what is lost and what to set;
    no figure of the host stands for the device.
    """
    report = report_without(tmp_path, "actor_rank0", "actor_rank1", "rollout0")
    finding, *others = report.findings
    assert finding.rule == "device_unrecorded"
    assert "on actor_rank0, actor_rank1, rollout0_rank0, although" in finding.text
    assert VARIABLE in finding.advice
    assert finding.lanes == report.coverage.unrecorded == LANES
    assert all("no event of cuda" in sentence for sentence in report.coverage.missing)
    assert all(row.device and not row.busy_us and not row.span_us for row in report.workers)
    assert not {other.rule for other in others} & {"coverage", "host_bound", "unexplained"}


def test_an_engine_without_a_request_has_lost_nothing(tmp_path: Path) -> None:
    report = report_without(tmp_path, "rollout0", requests=[], requests_logged=True)
    assert report.coverage.unrecorded == []
