"""A slimmed timeline keeps what was asked for, fits, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

from step_folders import build_step, read_events

from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import merge, stage_windows
from verl_profiling.timeline.step import Keep


def test_a_slimmed_timeline_keeps_what_was_asked_for(tmp_path: Path) -> None:
    (step,) = find_steps(build_step(tmp_path))
    whole = merge(step)
    longest = max(e["dur"] for e in read_events(whole.path) if e.get("cat") == "cpu_op")
    limit = whole.bytes // 2
    result = merge(step, max_bytes=limit)
    assert result.path.stat().st_size <= limit
    assert result.events + result.left_out == whole.events
    assert longest in {e["dur"] for e in read_events(result.path) if e.get("cat") == "cpu_op"}
    result = merge(step, keep=Keep(windows_ns=stage_windows(step, ["rollout"])))
    kept = {member.path.name: member.events for member in result.members}
    names = {e["args"]["name"] for e in read_events(result.path) if e["name"] == "thread_name"}
    assert any(name.startswith("thread ") for name in names)
    assert kept["rollout0_rank0.torch.json.gz"] > 100
    assert kept["actor_rank1.torch.json.gz"] < 10
