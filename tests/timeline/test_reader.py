"""The reader yields what a file holds, exactly, whatever its format and its damage."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from step_folders import read_events, recordings

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.trace import Event, Trace


def read(path: Path) -> tuple[Trace, list[Event]]:
    trace = Trace(path)
    return trace, [event for events in trace.chunks() for event in events]


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def span(name: str, ts: float | str, **fields: object) -> dict:
    return {"ph": "X", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": 1.5, **fields}


@pytest.mark.parametrize("block", [700, 4096, 1 << 16])
def test_block_boundaries_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """However the file is cut into blocks, the same events come out in the same order."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(recordings()["actor_rank0"].trace.encode()))
    monkeypatch.setattr("verl_profiling.timeline.trace.BLOCK_BYTES", block)
    monkeypatch.setattr("verl_profiling.timeline.trace._READ_BYTES", 99)
    events = [event for events in Trace(path).chunks(block) for event in events]
    assert [event.name for event in events] == [event["name"] for event in read_events(path)]


@pytest.mark.parametrize(
    ("content", "ns", "names"),
    [
        (  # old torch: absolute times, which a double would round to 0.25 us
            '{"traceEvents": [{"ph":"X","ts":1711964646123456.789}, {"ph":"X","ts":1711964646123457.001}]}',
            [1711964646123456789, 1711964646123457001],
            ["", ""],
        ),
        (  # torch 2.3: the base stands behind the events
            '{"traceEvents": [{"ph":"X","name":"a","ts":1.25}], "a": "b", "baseTimeNanoseconds": 7000}',
            [8250],
            ["a"],
        ),
        (  # Kineto writes infinite bandwidths, which JSON has not
            '{"baseTimeNanoseconds":1,"traceEvents":[{"ph":"X","name":"a","ts":1,"args":{"x":Infinity}}]}',
            [1001],
            ["a"],
        ),
        (  # a name in another encoding costs one character
            b'{"baseTimeNanoseconds":1,"traceEvents":[{"ph":"X","name":"caf\xe9","ts":1}]}',
            [1001],
            ["caf\ufffd"],
        ),
    ],
)
def test_what_profilers_write_is_read_to_the_nanosecond(
    tmp_path: Path, content: str | bytes, ns: list[int], names: list[str]
) -> None:
    """Whatever the form of its times, and though it is no JSON."""
    path = tmp_path / "t.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    trace, events = read(path)
    assert [trace.base_ns + round(event.ts * 1000) for event in events] == ns
    assert [event.name or "" for event in events] == names
    assert trace.warnings == []


def test_objects_in_arguments_do_not_end_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut inside a list of arguments is noticed and undone."""
    events = [span(f"e{i}", i, args={"inputs": [{"a": 1}, {"b": 2}] * 30}) for i in range(20)]
    monkeypatch.setattr("verl_profiling.timeline.trace.BLOCK_BYTES", 300)
    trace = Trace(write(tmp_path / "t.json", {"baseTimeNanoseconds": 1, "traceEvents": events}))
    found = [event for chunk in trace.chunks(300) for event in chunk]
    assert [event.name for event in found] == [f"e{i}" for i in range(20)]
    assert trace.warnings == []


def test_reading_ends_at_damage_and_its_place_is_named(tmp_path: Path) -> None:
    """The events before it are kept, and the warning gives the byte."""
    path = tmp_path / "t.json"
    events = '{"ph":"X","name":"a","ts":1},{"ph":"X","name":oops,"ts":2},{"ph":"X","name":"c","ts":3}'
    text = f'{{"baseTimeNanoseconds":1,"traceEvents":[{events}]}}'
    path.write_text(text)
    trace, events = read(path)
    assert [event.name for event in events] == ["a"]
    assert trace.truncated
    (warning,) = trace.warnings
    place = text.index('{"ph":"X","name":oops')
    assert warning.startswith(f"byte {place}: ")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_yields_what_it_holds(tmp_path: Path, compressed: bool) -> None:
    """Everything before the cut comes out, and the warning names a byte."""
    text = recordings()["actor_rank0"].trace
    path = tmp_path / "t.json"
    if compressed:
        data = gzip.compress(text.encode())
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_text(text[: len(text) // 2])
    trace, events = read(path)
    whole = json.loads(text)["traceEvents"]
    assert 0 < len(events) < len(whole)
    assert [event.name for event in events] == [event["name"] for event in whole[: len(events)]]
    assert trace.truncated
    assert len(whole) / 4 < len(events)
    assert re.match(r"byte [1-9]\d*: ", trace.warnings[-1])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"hello", "not a Chrome trace"),
        (b'{"events": []}', "found no traceEvents"),
        (b'{"a": oops, "traceEvents": []}', "bad JSON before traceEvents"),
        (gzip.compress(b"{" * 100)[:30], "not a Chrome trace"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: bytes, problem: str) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=problem) as caught:
        Trace(path)
    assert caught.value.path == str(path)
