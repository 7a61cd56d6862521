"""The rollout's requests become slices of a process beside the engine's own."""

from __future__ import annotations

from pathlib import Path

from step_folders import build_step, read_events, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.manifest import Request
from verl_profiling.run_files import read_manifest


def test_overlapping_requests_lie_side_by_side(tmp_path: Path) -> None:
    folder = build_step(tmp_path)
    begin = read_manifest(folder).begin_ns
    times = [(0, 400, 1000), (500, 0, 2000), (1000, 1500, 1800)]
    requests = [
        Request(
            replica=0,
            begin_ns=begin + a,
            first_token_ns=begin + first if first else 0,
            end_ns=begin + b,
            prompt_tokens=7,
            response_tokens=9,
        )
        for a, first, b in times
    ]
    rewrite_worker(folder, "rollout0", requests=requests)
    whole = "request (9 tokens)"
    events = read_events(open_step(folder).merge().path)
    slices = [event for event in events if event.get("cat") == "request" and event["name"] == whole]
    rows = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == slices[0]["pid"]
    }
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in slices} == {names["rollout0 requests"]}
    assert names["rollout0_rank0"] < names["rollout0 requests"], "they sort below the engine"
    assert [rows[event["tid"]] for event in slices] == ["requests 0", "requests 1", "requests 0"]
    assert [event["dur"] for event in slices] == [1.0, 1.5, 0.8]
    parts = [event["name"] for event in events if event.get("cat") == "request" and event["name"] != whole]
    assert parts == ["first token", "decode", "first token", "decode"]
    assert slices[0]["args"] == {"prompt_tokens": 7, "response_tokens": 9, "failed": False}
