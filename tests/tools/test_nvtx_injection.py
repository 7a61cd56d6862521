"""Whether NVTX takes CUPTI from torch, as far as the environment says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_profiling.cli import main
from verl_profiling.commands.doctor import examine_machine
from verl_profiling.files.machine import NO_INJECTION, VARIABLE
from verl_profiling.manifest import Device
from verl_profiling.tools import torch_profiler
from verl_profiling.tools.base import Destination
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/usr/local/cuda/extras/CUPTI/lib64/libcupti.so", True),
        ("libcupti.so.12", True),
        (NO_INJECTION, False),
        ("/opt/nsight-systems/libToolsInjection64.so", False),
        ("/usr/local/cuda/extras/CUPTI/lib64/", False),
    ],
)
def test_the_doctor_notices_a_library_of_cupti(
    path: str, wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the file's name; our own value is none."""
    monkeypatch.setenv(VARIABLE, path)
    assert main(["doctor"]) == 0
    assert (f"set {VARIABLE}={NO_INJECTION}" in capsys.readouterr().out) == wrong
    assert [found.subject for found in examine_machine() if found.problem] == ["CUPTI"] * wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device, its kernels are recorded")
@pytest.mark.parametrize(
    ("devices", "said"),
    [([Device(kind="cuda", index=0)], "cuda"), ([Device(kind="cpu")], ""), ([], "")],
)
def test_a_worker_that_used_a_device_says_that_it_recorded_none(
    devices: list[Device], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which devices a process used is known when its recording stops;
    this machine has no events of one.
    """
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    monkeypatch.setattr(TorchTool, "_activities", lambda self: both)
    monkeypatch.setattr(torch_profiler, "used_devices", lambda: devices)
    metadata: dict[str, Any] = {}
    recording = TorchTool(TorchOptions()).start(
        Destination(folder=tmp_path, lane="actor_rank0", metadata=metadata)
    )
    torch.ones(8, 8) @ torch.ones(8, 8)
    [output] = recording.stop()
    artifact = output.finish()
    assert (artifact.status, artifact.unrecorded_device) == ("ok", said)
