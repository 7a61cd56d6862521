"""Peak memory of the process after each stage."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from verl_profiling import stage
from verl_profiling.files.machine import process_peak_bytes
from verl_profiling.testing import record_step

MIB = 1 << 20


@pytest.mark.parametrize("tool", ["torch", "spans"])
@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_every_tool_says_how_high_the_process_was_after_each_stage(
    tmp_path: Path, tool: str, mode: str
) -> None:
    """The kernel's mark is only read, so it rises with a stage that sets it
    and stays there after it.
    """
    short = {f"short{number}" for number in range(50)}
    with record_step({"enable": True, "tool": tool, "mode": mode}, tmp_path / "step") as recorded:
        with stage("large"), stage("inner"):
            before = process_peak_bytes()
            held = []
            while (
                process_peak_bytes() < before + 48 * MIB
            ):  # other threads may free memory meanwhile
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
    assert (
        peaks["stage/raises/process_peak_rss_bytes"] >= peaks["stage/large/process_peak_rss_bytes"]
    )


@stage("raises")
def raise_after_2_ms() -> None:
    time.sleep(0.002)
    raise KeyError
