"""Peak memory of stages: nested, repeated, and in the result of a capture."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from example_loops import request

from verl_profiling import stage
from verl_profiling.memory import process_peak_bytes
from verl_profiling.testing import record_step
from verl_profiling.tools.process_memory import take_host_peak
from verl_profiling.workers import CaptureMixin

MIB = 1 << 20


@pytest.mark.skipif(not take_host_peak(), reason="this system's peak resident size cannot be set back")
@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_the_manifest_gets_the_peak_resident_size_of_each_stage(tmp_path: Path, mode: str) -> None:
    """A stage that allocates 128 MiB peaks at least 100 MiB above one that does not, in both modes."""
    worker = CaptureMixin()
    settings = {"enable": True, "tool": "spans", "mode": mode, "tools": {"spans": {"peak_rss": True}}}
    worker.init_capture(settings, role="actor")
    worker.start_capture(request(tmp_path / "step"))
    with stage("small"):
        pass
    with stage("large"), stage("inner"):
        assert bytearray(128 * MIB)[-1] == 0
    with stage("small_again"):
        pass
    metrics = worker.stop_capture().result.metrics
    peaks = {name for name in metrics if name.endswith("/peak_rss_bytes")}
    assert peaks == {f"stage/{name}/peak_rss_bytes" for name in ("small", "large", "inner", "small_again")}
    assert metrics["stage/large/peak_rss_bytes"] > metrics["stage/small/peak_rss_bytes"] + 100 * MIB
    assert metrics["stage/large/peak_rss_bytes"] > metrics["stage/small_again/peak_rss_bytes"] + 100 * MIB


@pytest.mark.parametrize("tool", ["torch", "spans"])
@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_every_tool_says_how_high_the_process_was_after_each_stage(
    tmp_path: Path, tool: str, mode: str
) -> None:
    """The kernel's mark is only read, so it rises with a stage that sets it and stays there after it."""
    short = {f"short{number}" for number in range(50)}
    with record_step({"enable": True, "tool": tool, "mode": mode}, tmp_path / "step") as recorded:
        with stage("large"), stage("inner"):
            before = process_peak_bytes()
            held = []
            while process_peak_bytes() < before + 48 * MIB:  # other threads may free memory meanwhile
                held.append(bytearray(16 * MIB))
        del held
        for name in short:
            with stage(name):
                pass
        with pytest.raises(KeyError):
            raise_after_2_ms()
    peaks = recorded.result.metrics
    read = {name.split("/")[1] for name in peaks}
    assert read - short == {"large", "raises"}
    assert short - read
    assert peaks["stage/large/process_peak_rss_bytes"] > before + 32 * MIB
    assert peaks["stage/raises/process_peak_rss_bytes"] >= peaks["stage/large/process_peak_rss_bytes"]


@stage("raises")
def raise_after_2_ms() -> None:
    time.sleep(0.002)
    raise KeyError
