"""Calls that block are told from calls that launch, by the names of three vendors."""

from __future__ import annotations

import pytest

from verl_profiling.report.kinds import LONG_COPY_NS, blocks_from_ns, launches_graph


@pytest.mark.parametrize(
    ("name", "blocks_from"),
    [
        ("cudaMemcpy", 0),
        ("cudaMemcpyAsync", LONG_COPY_NS),
        ("cuMemcpyHtoD_v2", 0),
        ("cuMemcpyHtoDAsync_v2", LONG_COPY_NS),
        ("cudaMalloc", 0),
        ("cudaMallocAsync", None),
        ("cuMemAlloc_v2", 0),
        ("cudaStreamSynchronize", 0),
        ("cudaDeviceSynchronize", 0),
        ("cuCtxSynchronize", 0),
        ("hipMemcpyWithStream", 0),
        ("hipDeviceSynchronize", 0),
        ("AscendCL@aclrtMemcpy", 0),
        ("AscendCL@aclrtSynchronizeStreamWithTimeout", 0),
        ("cudaLaunchKernel", None),
        ("cudaMemsetAsync", None),
        ("cudaStreamWaitEvent", None),
        ("cudaEventRecord", None),
        ("aten::copy_", None),
        ("", None),
    ],
)
def test_calls_that_block(name: str, blocks_from: int | None) -> None:
    """An asynchronous copy does where it takes longer than launching it."""
    assert blocks_from_ns(name) == blocks_from


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cudaGraphLaunch", True),
        ("hipGraphLaunch", True),
        ("cuGraphLaunch", True),
        ("cudaGraphCreate", False),
    ],
)
def test_calls_that_launch_a_graph(name: str, launches: bool) -> None:
    """Capturing and instantiating one is no launch."""
    assert launches_graph(name) == launches
