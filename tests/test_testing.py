"""The helpers for users' tests: that they see what they are there to see."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from example_loops import settings, train

from verl_profiling import stage
from verl_profiling.capture.session import Session
from verl_profiling.testing import leaks, record_step


def test_an_open_capture_and_a_running_profiler_are_leaks(tmp_path: Path, session: Session) -> None:
    """Until they are stopped."""
    with record_step(settings(tool="spans"), tmp_path):
        assert leaks() == ["a capture is open; call stop_capture()"]
    assert leaks() == []
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert leaks() == ["a torch profiler records"]
    assert leaks() == []


def test_a_call_that_still_runs_is_a_leak() -> None:
    """Threads of ours are found by their names; an idle finisher is none."""
    leave = threading.Event()
    for name in ("verl-profiling-call_0", "verl-profiling-finisher"):
        thread = threading.Thread(target=leave.wait, name=name)
        thread.start()
    assert leaks() == ["thread verl-profiling-call_0 runs"]
    leave.set()


def test_a_recorded_step_has_its_result_after_the_block(tmp_path: Path, session: Session) -> None:
    """Finished artifacts, the path of the first one, and the answer to the start."""
    with (
        record_step(settings(), tmp_path, role="critic", rank=3, step=7) as recorded,
        stage("values"),
    ):
        assert recorded.result is None
        with pytest.raises(LookupError, match="no artifact was recorded"):
            _ = recorded.path
        train()
    assert recorded.started.status == "recording"
    assert recorded.result is not None
    assert (recorded.result.name, recorded.result.step) == ("critic_rank3", 7)
    assert [artifact.status for artifact in recorded.result.artifacts] == ["ok"]
    assert recorded.path.name == "critic_rank3.torch.json.gz"


def test_a_step_that_raises_is_recorded(tmp_path: Path, session: Session) -> None:
    with (
        pytest.raises(ValueError, match="x"),
        record_step(settings(tool="spans"), tmp_path) as recorded,
    ):
        raise ValueError("x")
    assert recorded.result is not None
    assert leaks() == []
