"""The rollout's requests become slices of a process beside the engine's own."""

from __future__ import annotations

from pathlib import Path

from drawn_logs import Drawn
from step_folders import read_events

from verl_profiling.analysis import open_step


def test_overlapping_requests_lie_side_by_side(tmp_path: Path) -> None:
    """With their parts inside of them, below the engine."""
    drawn = Drawn(tmp_path)
    drawn.requests(("a", 0, 10), ("b", 5, 20), ("c", 10, 18))
    events = read_events(open_step(drawn.folder).merge().path)
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert names["rollout0_rank0"] < names["rollout0 requests"]
    mine = [event for event in events if event["pid"] == names["rollout0 requests"]]
    rows = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    slices = [event for event in mine if event["name"] == "request (9 tokens)"]
    assert [rows[event["tid"]] for event in slices] == ["requests 0", "requests 1", "requests 0"]
    assert [event["dur"] for event in slices] == [10_000, 15_000, 8_000]
    parts = [event["name"] for event in mine if event.get("cat") == "request" and event not in slices]
    assert parts == ["first token", "decode"] * 3
    assert slices[0]["args"] == {"id": "a", "prompt_tokens": 3, "response_tokens": 9, "failed": False}
