"""The ``torch_memory`` tool where there is no accelerator;
tests/gpu and test_npu.py record with it.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from example_loops import settings

from verl_profiling import CaptureStateError, ToolUnavailableError
from verl_profiling.tools import torch_memory
from verl_profiling.tools.base import Destination
from verl_profiling.tools.torch_memory import OOM_SUFFIX, TorchMemoryOptions, TorchMemoryTool
from verl_profiling.workers import CaptureMixin


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_training_does_not_start() -> None:
    """The worker's set-up fails and says what to do instead."""
    with pytest.raises(
        ToolUnavailableError, match=r"sees no CUDA.*tool 'spans' has the process's peak"
    ):
        CaptureMixin().init_capture(settings(tool="torch_memory"), role="actor")


def test_torch_takes_what_we_pass() -> None:
    """The arguments of the private function that starts a history exist in this torch,
    with these values.
    """
    options = TorchMemoryOptions()
    signature = inspect.signature(torch.cuda.memory._record_memory_history)
    bound = signature.bind(
        enabled="all",
        context="alloc",
        stacks="python",
        max_entries=options.max_entries,
    )
    bound.apply_defaults()
    assert bound.arguments["max_entries"] == 100_000
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters


class Allocator:
    """Stands for ``torch.cuda.memory`` and its native functions;
    a history is a list of allocations.
    """

    def __init__(self) -> None:
        self.memory = self
        self.history: list[str] | None = None
        self.observers: list[Any] = []
        self.observe_oom = self.observers.append

    def history_enabled(self) -> bool:
        return self.history is not None

    def _record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        self.history = None if enabled is None else self.history or []

    def _dump_snapshot(self, path: str) -> None:
        Path(path).write_text(" ".join(self.history or []))

    def allocate(self, what: str) -> None:
        if self.history is not None:
            self.history.append(what)

    def fail(self) -> None:
        for observer in self.observers:
            observer(0, 100, 80, 10)

    def memory_allocated(self) -> int:
        return 1

    memory_reserved = memory_allocated


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch_memory, "_accelerator", lambda: made)
    monkeypatch.setattr(torch_memory, "_history", torch_memory._History())
    return made


def recorded(
    tool: TorchMemoryTool, allocator: Allocator, folder: Path, step: int, stage: str | None = None
) -> str:
    destination = Destination(
        folder=folder / str(step), lane="actor_rank0", stage=stage, occurrence=1, metadata={}
    )
    destination.folder.mkdir(exist_ok=True, parents=True)
    recording = tool.start(destination)
    allocator.allocate(f"{step}{stage or ''}")
    (output,) = recording.stop()
    allocator.allocate(f"after-{step}")
    return (destination.folder / output.artifact.path).read_text()


def test_a_history_covers_the_steps_that_are_wanted(allocator: Allocator, tmp_path: Path) -> None:
    """What lies between them too; each step has a snapshot so far, and then it begins anew."""
    tool = TorchMemoryTool(TorchMemoryOptions(steps=2, peaks=False))
    assert [recorded(tool, allocator, tmp_path, step) for step in (3, 5, 7, 8)] == [
        "3",
        "3 after-3 5",
        "7",
        "7 after-7 8",
    ]
    assert not allocator.history_enabled()


def test_stages_that_are_recorded_by_themselves_have_histories_of_their_own(
    allocator: Allocator, tmp_path: Path
) -> None:
    """In discrete mode a snapshot is of its stage, however many steps are wanted."""
    tool = TorchMemoryTool(TorchMemoryOptions(steps=2, peaks=False))
    assert recorded(tool, allocator, tmp_path, 3, "values") == "3values"
    assert recorded(tool, allocator, tmp_path, 3, "update_actor") == "3update_actor"
    assert not allocator.history_enabled()


def test_an_allocation_that_fails_outside_of_a_capture_leaves_a_snapshot(
    allocator: Allocator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first failure does, the one that tells the most;
    the history goes on after captures.
    """
    folder = tmp_path / "oom"
    tool = TorchMemoryTool(TorchMemoryOptions(oom_folder=str(folder), peaks=False))
    tool.prepare()
    allocator.allocate("model")
    allocator.fail()
    (snapshot,) = folder.iterdir()
    assert snapshot.name.endswith(f"_{os.getpid()}{OOM_SUFFIX}")
    assert snapshot.read_text() == "model"
    assert "could not allocate 100 bytes, 10 of 80 are free" in caplog.text
    assert recorded(tool, allocator, tmp_path, 3) == "3"
    allocator.fail()
    assert [path.read_text() for path in folder.iterdir()] == ["model"]
    assert allocator.history_enabled()


def test_a_history_of_somebody_else_is_left_alone(allocator: Allocator, tmp_path: Path) -> None:
    allocator.history = ["theirs"]
    tool = TorchMemoryTool(TorchMemoryOptions(peaks=False))
    with pytest.raises(CaptureStateError, match="being recorded already"):
        recorded(tool, allocator, tmp_path, 3)
    assert allocator.history == ["theirs"]
