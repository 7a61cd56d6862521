"""Slices of a thread or stream that overlap partly have rows of their own:
Perfetto before v57 drops them.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from step_folders import read_events

from verl_profiling.cli import main

ANNOTATION = {"cat": "user_annotation", "name": "ProfilerStep#3"}


def drawn(draw: random.Random) -> list[dict[str, Any]]:
    """Draw streams whose kernels overlap, threads with frames and annotations, arrows,
    in any order.
    """
    events: list[dict[str, Any]] = []
    for stream in range(draw.randint(1, 3)):
        at = 0.0
        for number in range(draw.randint(1, 60)):
            span = {
                "pid": 0,
                "tid": stream,
                "ts": round(at, 3),
                "dur": round(draw.uniform(0, 150), 3),
            }
            events.append({"ph": "X", "cat": "kernel", "name": f"k{number}", **span})
            arrow = {"cat": "ac2g", "name": "ac2g", "id": 1000 * stream + number}
            events.append({"ph": "s", **arrow, "pid": 9, "tid": 9, "ts": span["ts"]})
            events.append(
                {"ph": "f", "bp": "e", **arrow, "pid": 0, "tid": stream, "ts": span["ts"]}
            )
            at += draw.choice([span["dur"], draw.uniform(0.001, 100)])
    for thread in range(9, 9 + draw.randint(1, 3)):
        for _ in range(draw.randint(1, 30)):
            begin, took = round(draw.uniform(0, 5_000), 3), round(draw.uniform(1, 900), 3)
            span = {"ph": "X", "pid": 9, "tid": thread}
            frame = {"cat": "python_function", "name": "_record_function_enter_new"}
            events.append({**span, **frame, "ts": begin, "dur": 20})
            events.append({**span, **ANNOTATION, "ts": begin + draw.randint(1, 19), "dur": took})
            events.append(
                {**span, "cat": "cpu_op", "name": "aten::mm", "ts": begin + 20, "dur": took / 3}
            )
    draw.shuffle(events)
    return events


def partial_overlaps(events: list[dict[str, Any]]) -> int:
    """Count the slices that begin inside another one of their row and end after it, in whole ns."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin_ns = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append(
                (begin_ns, -begin_ns - round(event["dur"] * 1000))
            )
    count = 0
    for spans in rows.values():
        opened: list[int] = []
        for begin_ns, less_end_ns in sorted(spans):
            while opened and opened[-1] <= begin_ns:
                opened.pop()
            count += bool(opened) and -less_end_ns > opened[-1]
            opened.append(-less_end_ns)
    return count


@pytest.mark.parametrize("seed", range(24))
def test_no_two_slices_of_a_row_overlap_partly(seed: int, tmp_path: Path) -> None:
    """Every event stays in its process and in time; arrows still end at kernels;
    each row has a name.
    """
    draw = random.Random(seed)
    names = ["rank0-EXTEND.json", "rank0-DECODE.json"][: draw.randint(1, 2)]
    inputs: Counter[tuple[str, str]] = Counter()
    for number, name in enumerate(names):
        events = drawn(draw)
        inputs.update((event["ph"], event["name"]) for event in events)
        head = {"baseTimeNanoseconds": (1_767_225_600 + number) * 10**9}
        metadata = [
            {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": "trainer"}}
        ]
        (tmp_path / name).write_text(json.dumps({**head, "traceEvents": metadata + events}))
    suffix = draw.choice([".json", ".json.gz"])
    output = tmp_path / f"all{suffix}"
    assert main(["merge", *(str(tmp_path / name) for name in names), "-o", str(output)]) == 0
    assert (output.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")
    merged = read_events(output)
    assert partial_overlaps(merged) == 0
    assert Counter((event["ph"], event["name"]) for event in merged if event["ph"] != "M") == inputs
    kernels = {(e["pid"], e["tid"], e["ts"]) for e in merged if e.get("cat") == "kernel"}
    assert {(e["pid"], e["tid"], e["ts"]) for e in merged if e["ph"] == "f"} <= kernels
    named = {(e["pid"], e["tid"]) for e in merged if e["name"] == "thread_name"}
    moved = {(e["pid"], e["tid"]) for e in merged if e["ph"] == "X" and e["tid"] >= 1 << 24}
    assert moved <= named


def test_rows_of_overlaps_are_limited(tmp_path: Path) -> None:
    """Threads with too many overlaps keep all slices,
    and no row of one trace is that of another one.
    """
    events = []
    for thread in range(20):
        span = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": thread, "dur": 1e6}
        events += [{**span, "ts": at} for at in range(300)]
    rows = []
    for name in ("rank0-EXTEND.json", "rank0-DECODE.json"):
        named = [{**event, "name": name} for event in events]
        (tmp_path / name).write_text(
            json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": named})
        )
    output = tmp_path / "all.json"
    assert main(["merge", *map(str, sorted(tmp_path.iterdir())), "-o", str(output)]) == 0
    slices = [event for event in read_events(output) if event["ph"] == "X"]
    assert len(slices) == 2 * len(events)
    for name in ("rank0-EXTEND.json", "rank0-DECODE.json"):
        rows.append(
            {(e["pid"], e["tid"]) for e in slices if e["name"] == name and e["tid"] >= 1 << 24}
        )
        assert len(rows[-1]) <= 4_096
    assert not rows[0] & rows[1]
