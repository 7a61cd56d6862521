"""What only a CUDA device shows: ``make test-gpu``.
Elsewhere every test is skipped with that reason.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_loops import read_trace, settings

from verl_profiling import stage
from verl_profiling.testing import record_step
from verl_profiling.tools import Destination
from verl_profiling.tools.nsys import NsysOptions, NsysTool
from verl_profiling.tools.torch_memory import OOM_SUFFIX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def kernels(path: Path) -> list[str]:
    """Return the names of the kernels in a trace."""
    return [
        event["name"] for event in read_trace(path)["traceEvents"] if event.get("cat") == "kernel"
    ]


def product() -> torch.Tensor:
    square = torch.ones(256, 256, device="cuda")
    result = square @ square
    torch.cuda.synchronize()
    return result


def test_kernels_are_in_the_trace_and_under_their_stage(tmp_path: Path) -> None:
    """The default activities record the device; the stage is shown again above its kernels."""
    product()
    with record_step(settings(), tmp_path) as recorded, stage("update_actor"):
        product()
    assert recorded.path is not None
    assert kernels(recorded.path)
    annotations = [
        event["name"]
        for event in read_trace(recorded.path)["traceEvents"]
        if event.get("cat") == "gpu_user_annotation"
    ]
    assert "update_actor" in annotations


def test_a_stage_without_work_of_the_device_is_no_loss(tmp_path: Path) -> None:
    """CUDA is in use, but nothing runs there during the capture."""
    product()
    with record_step(settings(), tmp_path) as recorded, stage("reward"):
        torch.ones(8).sum()
    [artifact] = recorded.result.artifacts
    assert (artifact.status, artifact.reason, artifact.unrecorded_device) == ("ok", "", "")


SUBSCRIBED = """
import ctypes, sys, torch
from pathlib import Path
from verl_profiling.testing import record_step
torch.ones(8, device="cuda")
library = next(line.split()[-1] for line in open("/proc/self/maps") if "libcupti.so" in line)
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
callback = kind(lambda *given: None)
handle = ctypes.c_void_p()
assert ctypes.CDLL(library).cuptiSubscribe(ctypes.byref(handle), callback, None) == 0
with record_step({"enable": True}, Path(sys.argv[1])) as recorded:
    torch.ones(256, device="cuda") + 1
    torch.cuda.synchronize()
[artifact] = recorded.result.artifacts
print(artifact.status, artifact.unrecorded_device, artifact.reason, sep="|")
"""


def test_kernels_that_another_profiler_keeps_are_missed_by_name(tmp_path: Path) -> None:
    """A program that subscribed to CUPTI first gets the kernels;
    the artifact says that they are missing.
    """
    command = [sys.executable, "-c", SUBSCRIBED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, device, reason = done.stdout.strip().splitlines()[-1].split("|")
    assert (status, device) == ("ok", "cuda")
    assert "another profiler may hold CUPTI" in reason


def test_kernels_of_a_cuda_graph_are_in_the_trace(tmp_path: Path) -> None:
    """A graph that was captured before shows its kernels when it is replayed."""
    square = torch.ones(256, 256, device="cuda")
    product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        square @ square
    with record_step(settings(), tmp_path) as recorded:
        graph.replay()
        torch.cuda.synchronize()
    assert recorded.path is not None
    assert kernels(recorded.path)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="NCCL launches no kernel for one rank; this needs two CUDA devices",
)
def test_nccl_kernels_are_in_the_trace(tmp_path: Path) -> None:
    """A collective of NCCL is a separate kernel on both of its ranks."""
    torch.multiprocessing.spawn(all_reduce, args=(tmp_path,), nprocs=2)
    for rank in (0, 1):
        assert any(
            "nccl" in name.lower() for name in kernels(tmp_path / f"actor_rank{rank}.torch.json.gz")
        )


def all_reduce(rank: int, folder: Path) -> None:
    """Record a collective on one of two ranks."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    with record_step(settings(), folder, rank=rank):
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_a_memory_snapshot_names_what_was_allocated(tmp_path: Path, mode: str) -> None:
    """The snapshot holds the allocation, the metrics its peak,
    and torch records no history afterwards.
    """
    config = settings(tool="torch_memory", mode=mode)
    with record_step(config, tmp_path) as recorded, stage("update_actor"):
        held = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    assert held.numel() == 32 << 20
    with recorded.path.open("rb") as file:
        snapshot = pickle.load(file)
    actions = [entry for device in snapshot["device_traces"] for entry in device]
    assert any(entry["action"] == "alloc" and entry["size"] >= 32 << 20 for entry in actions)
    assert recorded.result.metrics["stage/update_actor/peak_allocated_bytes"] >= 32 << 20
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_failed_allocation_leaves_a_snapshot_of_its_own(tmp_path: Path) -> None:
    """Out of memory: the user's exception passes,
    and a second artifact shows the state it happened in.
    """
    with (
        record_step(settings(tool="torch_memory"), tmp_path) as recorded,
        pytest.raises(torch.cuda.OutOfMemoryError),
    ):
        torch.ones(1 << 44, dtype=torch.uint8, device="cuda")
    snapshot, oom = recorded.result.artifacts
    assert (snapshot.path, oom.path) == ("actor_rank0.memory.pickle", f"actor_rank0{OOM_SUFFIX}")
    assert "could not allocate" in oom.reason
    assert (tmp_path / oom.path).stat().st_size > 0


def test_ranges_of_nsight_systems_open_and_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA profiler API and NVTX accept the calls of the nsys tool even
    if no nsys is attached.
    """
    pytest.importorskip("nvtx", reason="nvtx is not installed")
    monkeypatch.setenv("VERL_PROFILING_NSYS_OUTPUT", str(tmp_path / "actor"))
    monkeypatch.setenv("VERL_PROFILING_NSYS_RANGES", "1000")
    tool = NsysTool(NsysOptions())
    recording = tool.start(Destination(folder=tmp_path, lane="actor_rank0", metadata={}))
    mark = recording.marks.begin("update_actor")
    product()
    recording.marks.end(mark)
    [output] = recording.stop()
    assert output.artifact.status == "pending"
