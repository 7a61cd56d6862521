"""What only an Ascend NPU shows: ``make test-npu-device``. Elsewhere all is skipped,
with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling import ToolUnavailableError, stage
from verl_profiling.testing import record_step
from verl_profiling.tools.base import imported

pytestmark = pytest.mark.npu_device


@pytest.fixture(scope="module")
def npu() -> Any:
    """The module ``torch_npu.npu``, of a machine with a device."""
    try:
        npu = imported("torch_npu", "npu").npu
    except ToolUnavailableError as error:
        pytest.skip(str(error))
    if not npu.is_available():
        pytest.skip("torch_npu sees no NPU")
    return npu


def hardware_events(trace: Path) -> list[dict[str, Any]]:
    """Return what ran on the device, by torch_npu's own trace."""
    events = json.loads(trace.read_text())
    processes = {
        event["pid"]
        for event in events
        if event["ph"] == "M" and event["args"].get("name") == "Ascend Hardware"
    }
    return [event for event in events if event["ph"] == "X" and event["pid"] in processes]


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_kernels_are_in_the_trace(npu: Any, tmp_path: Path, mode: str) -> None:
    """The artifact is finished, and a matrix product ran on the hardware."""
    import torch

    square = torch.ones(256, 256, device="npu")
    with record_step(settings(tool="npu", mode=mode), tmp_path) as recorded, stage("update_actor"):
        square @ square
        npu.synchronize()
    assert recorded.result is not None
    assert [artifact.status for artifact in recorded.result.artifacts] == ["ok"]
    [trace] = recorded.path.rglob("trace_view.json")
    assert hardware_events(trace)
