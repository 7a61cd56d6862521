"""A slimmed timeline keeps what was asked for, fits, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_folders import build_step, read_events

from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import merge
from verl_profiling.timeline.step import StepInputs


@pytest.fixture
def step(tmp_path: Path) -> StepInputs:
    """A real step."""
    (inputs,) = find_steps(build_step(tmp_path))
    return inputs


def test_a_size_limit_is_met_by_leaving_out_the_shortest(step: StepInputs) -> None:
    """Half of the bytes: the longest events are still there, and the rest is counted."""
    whole = merge(step)
    longest = max(e["dur"] for e in read_events(whole.path) if e.get("cat") == "cpu_op")
    limit = whole.bytes // 2
    result = merge(step, max_bytes=limit)
    assert result.path.stat().st_size <= limit
    assert result.events + result.left_out == whole.events
    assert longest in {e["dur"] for e in read_events(result.path) if e.get("cat") == "cpu_op"}
