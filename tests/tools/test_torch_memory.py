"""The ``torch_memory`` tool where there is no accelerator; tests/gpu and test_npu.py record with it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from example_loops import settings

from verl_profiling import ConfigError, ProfilingConfig, ToolUnavailableError
from verl_profiling.tools.torch_memory import TorchMemoryOptions
from verl_profiling.workers import CaptureMixin


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_training_does_not_start() -> None:
    """The worker's set-up fails and says what to do instead."""
    with pytest.raises(ToolUnavailableError, match=r"sees no CUDA.*tools\.spans\.peak_rss=true"):
        CaptureMixin().init_capture(settings(tool="torch_memory"), role="actor")


@pytest.mark.parametrize("others", [["torch"], ["npu"], ["spans"]])
def test_it_records_beside_others(others: list[str]) -> None:
    """An allocator's history disturbs no profiler, so the tools may be combined."""
    config = ProfilingConfig.from_any(settings(tool=["torch_memory", *others]))
    assert [tool.name for tool in config.for_role("actor").tools] == ["torch_memory", *others]


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"max_entries": 0}, "must be at least 1"), ({"stacks": "c++"}, "choose from: python, all")],
)
def test_a_wrong_option_is_named(options: dict[str, Any], problem: str) -> None:
    """Without a bound the history would fill the host's memory."""
    with pytest.raises(ConfigError, match=problem):
        ProfilingConfig.from_any(settings(tool="torch_memory", tools={"torch_memory": options}))


@pytest.mark.parametrize("frees", [False, True])
def test_torch_takes_what_we_pass(frees: bool) -> None:
    """The arguments of the private function that starts a history exist in this torch, with these values."""
    options = TorchMemoryOptions(frees=frees)
    signature = inspect.signature(torch.cuda.memory._record_memory_history)
    bound = signature.bind(
        enabled="all",
        context="all" if options.frees else "alloc",
        stacks=options.stacks,
        max_entries=options.max_entries,
    )
    bound.apply_defaults()
    assert bound.arguments["max_entries"] == 100_000
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters
