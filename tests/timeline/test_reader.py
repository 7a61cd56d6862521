"""The reader yields what a file holds, exactly, whatever its format and its damage."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from step_folders import read_events, recordings, unix_ns

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.trace import Event, Trace


def read(path: Path) -> tuple[Trace, list[Event]]:
    """Read a whole trace."""
    trace = Trace(path)
    return trace, [event for events in trace.chunks() for event in events]


def write(path: Path, content: object) -> Path:
    """Write a value as JSON."""
    path.write_text(json.dumps(content))
    return path


def span(name: str, ts: float | str, **fields: object) -> dict:
    """Return a complete event."""
    return {"ph": "X", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": 1.5, **fields}


def test_a_torch_trace_is_read_to_the_nanosecond(tmp_path: Path) -> None:
    """Every event of a real trace comes out, at the time that exact arithmetic gives."""
    path = tmp_path / "trace.json"
    path.write_text(recordings()["actor_rank0"].trace)
    trace, events = read(path)
    assert len(events) == len(read_events(path))
    found: dict[str, list[int]] = {}
    for event in events:
        if event.ph == "X":
            found.setdefault(event.name, []).append(
                trace.base_ns + round(event.ts % 1 * 1000) + int(event.ts) * 1000
            )
    assert found == unix_ns(path.read_text())
    assert trace.warnings == []


@pytest.mark.parametrize("block", [700, 4096, 1 << 16])
def test_block_boundaries_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """However the file is cut into blocks, the same events come out in the same order."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(recordings()["actor_rank0"].trace.encode()))
    monkeypatch.setattr("verl_profiling.timeline.content.BLOCK_BYTES", block)
    monkeypatch.setattr("verl_profiling.timeline.content._READ_BYTES", 99)
    events = [event for events in Trace(path).chunks(block) for event in events]
    assert [event.name for event in events] == [event["name"] for event in read_events(path)]


def test_absolute_microseconds_keep_their_nanoseconds(tmp_path: Path) -> None:
    """Old torch writes absolute times, which a double would round to 0.25 us."""
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph":"X","ts":1711964646123456.789}, {"ph":"X","ts":1711964646123457.001}]}'
    )
    trace, (first, second) = read(path)
    assert trace.base_ns + round(first.ts * 1000) == 1711964646123456789
    assert trace.base_ns + round(second.ts * 1000) == 1711964646123457001


def test_npu_times_are_strings_in_a_bare_list(tmp_path: Path) -> None:
    """torch_npu writes a list, and its times as strings of absolute microseconds."""
    trace, events = read(write(tmp_path / "trace_view.json", [span("aten::empty", "1795242730834823.956")]))
    assert trace.base_ns + round(events[0].ts * 1000) == 1795242730834823956
    assert events[0].dur == 1.5


def test_a_base_behind_the_events_is_found(tmp_path: Path) -> None:
    """Torch 2.3 wrote it there."""
    content = {"traceEvents": [span("a", 1.25)], "displayTimeUnit": "ms", "baseTimeNanoseconds": 7_000}
    trace, events = read(write(tmp_path / "t.json", content))
    assert (trace.base_ns, events[0].ts) == (7_000, 1.25)


def test_what_follows_the_events_is_not_taken_for_events(tmp_path: Path) -> None:
    """Lists of objects behind the events, as in ``deviceProperties``, stay out."""
    content = {
        "baseTimeNanoseconds": 1,
        "traceEvents": [span("a", 1)],
        "deviceProperties": [{"id": 0}, {"id": 1}],
    }
    trace, events = read(write(tmp_path / "t.json", content))
    assert [event.name for event in events] == ["a"]
    assert trace.warnings == []


def test_objects_in_arguments_do_not_end_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut inside a list of arguments is noticed and undone."""
    events = [span(f"e{i}", i, args={"inputs": [{"a": 1}, {"b": 2}] * 30}) for i in range(20)]
    monkeypatch.setattr("verl_profiling.timeline.content.BLOCK_BYTES", 300)
    trace = Trace(write(tmp_path / "t.json", {"baseTimeNanoseconds": 1, "traceEvents": events}))
    found = [event for chunk in trace.chunks(300) for event in chunk]
    assert [event.name for event in found] == [f"e{i}" for i in range(20)]
    assert trace.warnings == []


def test_not_a_number_is_read(tmp_path: Path) -> None:
    """Kineto writes infinite bandwidths; JSON has none, and the event is kept all the same."""
    path = tmp_path / "t.json"
    path.write_text(
        '{"baseTimeNanoseconds":1,"traceEvents":[{"ph":"X","name":"a","ts":1,"args":{"x":Infinity}},{"ph":"X","name":"b","ts":2}]}'
    )
    trace, events = read(path)
    assert [event.name for event in events] == ["a", "b"]
    assert trace.warnings == []


def test_bytes_that_are_no_utf8_cost_one_character(tmp_path: Path) -> None:
    """A thread name in another encoding does not cost the file."""
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"baseTimeNanoseconds":1,"traceEvents":[{"ph":"X","name":"caf\xe9","ts":1},{"ph":"X","name":"b","ts":2}]}'
    )
    _, events = read(path)
    assert [event.name for event in events] == ["caf\ufffd", "b"]


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


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    """A timeline made of joined members is read to its end."""
    text = recordings()["actor_rank0"].trace.encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:9_999]) + gzip.compress(text[9_999:]))
    trace, events = read(path)
    assert len(events) == len(json.loads(text)["traceEvents"])
    assert not trace.truncated


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


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """The error says that it cannot be read."""
    with pytest.raises(TraceFormatError, match=r"nowhere\.json: cannot be read \(No such file"):
        Trace(tmp_path / "nowhere.json")
