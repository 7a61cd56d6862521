"""The report's figures of a CUDA device against CUDA events,
torch's memory statistics and known sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from verl_profiling import ProfilingCallback, stage
from verl_profiling.analysis import open_step
from verl_profiling.report.model import Report
from verl_profiling.workers import CaptureMixin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SLEEP_S = 0.2
SIZE = 4096


@contextmanager
def captured(folder: Path, **more: object) -> Iterator[None]:
    """Capture the block as step 1 of a loop whose only worker is this process."""
    config = {"enable": True, "save_path": str(folder), **more}
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", [worker])
        torch.cuda.synchronize()
        profiling.on_step_begin(1)
        yield
        torch.cuda.synchronize()
        profiling.on_step_end()


def report_of(folder: Path) -> Report:
    report = open_step(folder / "step_000001").report()
    assert isinstance(report, Report)
    return report


def products(square: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(square, square)


@pytest.fixture(scope="module")
def square() -> torch.Tensor:
    made = torch.randn(SIZE, SIZE, device="cuda")
    products(made, 3)
    return made


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_busy_and_idle_are_those_of_cuda_events(
    tmp_path: Path, square: torch.Tensor, mode: str
) -> None:
    """Kernels between two events are busy time; a sleep of the host in a stage is idle time
    of that stage.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with captured(tmp_path, mode=mode):
        with stage("update_actor"):
            begin.record()
            products(square, 40)
            end.record()
            torch.cuda.synchronize()
        with stage("reward"):
            time.sleep(SLEEP_S)
    [row] = report_of(tmp_path).workers
    assert row.device
    assert "GPU 0" in row.accelerator
    assert row.busy_us == pytest.approx(1e3 * begin.elapsed_time(end), rel=0.03)
    assert row.compute_us == pytest.approx(row.busy_us, rel=0.01)
    assert row.idle_us == pytest.approx(1e6 * SLEEP_S, abs=40e3)


def test_a_kernel_belongs_to_the_stage_that_launched_it(
    tmp_path: Path, square: torch.Tensor
) -> None:
    """Kernels that run on after their stage has ended on the host are counted in it."""
    with captured(tmp_path):
        with stage("old_log_prob"):
            products(square, 40)
        with stage("update_actor"):
            torch.add(square, 1.0)
            torch.cuda.synchronize()
    counted = {(row.stage, row.name[:40]): row.calls for row in report_of(tmp_path).kernels}
    assert sum(calls for (where, _), calls in counted.items() if where == "old_log_prob") == 40, (
        counted
    )
    assert sum(calls for (where, _), calls in counted.items() if where == "update_actor") == 1, (
        counted
    )


def test_kernels_on_two_streams_count_their_common_time_once(tmp_path: Path) -> None:
    """Two kernels that sleep side by side are busy as long as one of them."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    with captured(tmp_path), stage("update_actor"):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
        torch.cuda.synchronize()
    report = report_of(tmp_path)
    [row] = report.workers
    each = max(kernel.self_us / kernel.calls for kernel in report.kernels)
    assert sum(kernel.calls for kernel in report.kernels) == 2
    assert row.busy_us == pytest.approx(each, rel=0.1)


def test_a_replayed_graph_is_as_busy_as_its_events_say(
    tmp_path: Path, square: torch.Tensor
) -> None:
    """The kernels of a CUDA graph have their time, and the stage that replayed the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products(square, 20)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with captured(tmp_path), stage("update_actor"):
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    report = report_of(tmp_path)
    assert report.workers[0].busy_us == pytest.approx(1e3 * begin.elapsed_time(end), rel=0.03)
    assert {row.stage for row in report.kernels} == {"update_actor"}
    assert sum(row.calls for row in report.kernels) == 60


def test_copies_are_copies_and_overlap_with_computation(
    tmp_path: Path, square: torch.Tensor
) -> None:
    """A copy from pinned memory on a stream of its own is memcpy time, and not computation."""
    host = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
    with captured(tmp_path), stage("update_weights"):
        host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    [row] = report_of(tmp_path).workers
    assert row.memcpy_us > 500
    assert row.compute_us == 0


def test_peaks_of_stages_are_those_of_torch(tmp_path: Path) -> None:
    """Each stage's peak is what ``max_memory_allocated`` says at its end."""
    said = {}
    with captured(tmp_path, tool="torch_memory"):
        for name, size in (
            ("old_log_prob", 32 << 20),
            ("update_actor", 96 << 20),
            ("reward", 1 << 20),
        ):
            with stage(name):
                torch.ones(size, dtype=torch.uint8, device="cuda")
                said[name] = torch.cuda.max_memory_allocated()
    peaks = {
        row.stage: row.value
        for row in report_of(tmp_path).measures
        if row.name == "peak_allocated_bytes"
    }
    assert peaks == said
