"""The reader yields what a file holds, exactly, whatever its format and its damage."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from step_folders import build_step, read_events, recordings, rewrite, rewrite_worker

from verl_profiling.analysis import open_run, open_step
from verl_profiling.cli import main
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import read_manifest
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.trace import Event, Trace
from verl_profiling.steps.trace_content import Limits
from verl_profiling.timeline.processes import LANE_PIDS


def read(path: Path) -> tuple[Trace, list[Event]]:
    trace = Trace(path)
    return trace, [event for events in trace.chunks() for event in events]


def saved(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def span(name: str, ts: float | str, **fields: object) -> dict:
    return {"ph": "X", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": 1.5, **fields}


@pytest.mark.parametrize("block", [700, 4096, 1 << 16])
def test_block_boundaries_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """However the file is cut into blocks, the same events come out in the same order."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(recordings()["actor_rank0"].trace.encode()))
    monkeypatch.setattr("verl_profiling.steps.trace_content.BLOCK_BYTES", block)
    monkeypatch.setattr("verl_profiling.steps.trace_content._READ_BYTES", 99)
    events = [event for events in Trace(path).chunks(block) for event in events]
    assert [event.name for event in events] == [event["name"] for event in read_events(path)]


@pytest.mark.parametrize(
    ("content", "ns", "names"),
    [
        (  # old torch: absolute times, which a double would round to 0.25 us
            '{"traceEvents": [{"ph":"X","ts":1711964646123456.789}, '
            '{"ph":"X","ts":1711964646123457.001}]}',
            [1711964646123456789, 1711964646123457001],
            ["", ""],
        ),
        (  # torch 2.3: the base stands behind the events
            '{"traceEvents": [{"ph":"X","name":"a","ts":1.25}], "a": "b", '
            '"baseTimeNanoseconds": 7000}',
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


def test_objects_in_arguments_do_not_end_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut inside a list of arguments is noticed and undone."""
    events = [span(f"e{i}", i, args={"inputs": [{"a": 1}, {"b": 2}] * 30}) for i in range(20)]
    monkeypatch.setattr("verl_profiling.steps.trace_content.BLOCK_BYTES", 300)
    trace = Trace(saved(tmp_path / "t.json", {"baseTimeNanoseconds": 1, "traceEvents": events}))
    found = [event for chunk in trace.chunks(300) for event in chunk]
    assert [event.name for event in found] == [f"e{i}" for i in range(20)]
    assert trace.warnings == []


def test_reading_goes_on_after_damage_and_its_place_is_named(tmp_path: Path) -> None:
    """The events around it are kept, the warning gives the byte,
    and the time between them is a hole.
    """
    path = tmp_path / "t.json"
    events = (
        '{"ph":"X","name":"a","ts":1},{"ph":"X","name":oops,"ts":2},{"ph":"X","name":"c","ts":3}'
    )
    text = f'{{"baseTimeNanoseconds":1,"traceEvents":[{events}]}}'
    path.write_text(text)
    trace, events = read(path)
    assert [event.name for event in events] == ["a", "c"]
    assert (trace.truncated, trace.holes_ns) == (False, [(1000, 3000)])
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
        (gzip.compress(b"{" * 100, mtime=0)[:30], "not a Chrome trace"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: bytes, problem: str) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=problem) as caught:
        Trace(path)
    assert caught.value.path == str(path)


HEAD = '{"baseTimeNanoseconds":1700000000000000000,"traceEvents":['
GOOD = '{"ph":"X","cat":"cpu_op","name":"good","pid":1,"tid":1,"ts":%d,"dur":1.5}'


def write(folder: Path, *events: str, head: str = HEAD, tail: str = "]}") -> Path:
    """Write a trace of events that are given as text."""
    path = folder / "t.json"
    path.write_text(head + ",".join(events) + tail, encoding="utf-8", errors="surrogatepass")
    return path


def between(folder: Path, event: str, head: str = HEAD) -> Path:
    """Write a trace with one event between two good ones."""
    return write(folder, GOOD % 1, event, GOOD % 5, head=head)


def everything(path: Path) -> list[int]:
    """Check, merge and report on a file; return the exit codes."""
    output = str(path.with_name("out.json.gz"))
    return [
        main(argv)
        for argv in (
            ["check", str(path)],
            ["merge", str(path), "-o", output],
            ["report", str(path)],
        )
    ]


FIELDS = [
    *(
        '"ts":1e308',
        '"ts":-1e308',
        '"ts":"nan"',
        '"ts":"inf"',
        '"ts":1e999999999',
        '"ts":1e18',
        '"ts":NaN',
    ),
    *('"ts":"three"', '"ts":[]', '"ts":true', f'"ts":{"9" * 40}'),
    *('"ts":3,"dur":"long"', '"ts":3,"dur":{}'),
    *(
        '"ts":3,"name":5',
        '"ts":3,"name":null',
        '"ts":3,"cat":[]',
        '"ts":3,"pid":[]',
        '"ts":3,"id":1.5',
    ),
]


def test_what_is_no_event_is_skipped_and_check_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their neighbours are read by every command, and ``check`` finds the file unreadable."""
    bad = [f'{{"ph":"X","cat":"kernel","name":"bad","pid":0,"tid":7,{field}}}' for field in FIELDS]
    path = write(tmp_path, *(event for one in bad for event in (GOOD % 1, one)), GOOD % 5)
    assert everything(path)[0] == 1
    assert capsys.readouterr().out.startswith("unreadable")
    for one in bad:
        trace = Trace(between(tmp_path, one))
        timed = [
            event.name for events in trace.chunks() for event in events if event.ts is not None
        ]
        assert timed == ["good", "good"], one


@pytest.mark.parametrize("rank", ['"x"', "-1", "9" * 40])
def test_a_rank_that_is_none_is_not_believed(tmp_path: Path, rank: str) -> None:
    """The rank then follows from the name of the file, as for a trace without any."""
    path = write(
        tmp_path, GOOD % 1, head=HEAD.replace("{", f'{{"distributedInfo":{{"rank":{rank}}},', 1)
    )
    assert [source.rank for source in find_steps(path)[0].files] == [0]
    assert everything(path) == [0, 0, 0]


@pytest.mark.parametrize("base", ["9" * 40, "-1", '"x"', "null", "NaN", "1.5", "9" * 5000])
def test_a_base_that_is_no_time_is_refused(tmp_path: Path, base: str) -> None:
    """All times of the trace would be wrong; behind the events as before them."""
    given = f'"baseTimeNanoseconds":{base}'
    assert (
        everything(write(tmp_path, GOOD % 1, head='{"traceEvents":[', tail=f"],{given}}}"))[0] != 0
    )
    if base not in ("1.5", "9" * 5000):
        assert everything(write(tmp_path, GOOD % 1, head=f'{{{given},"traceEvents":['))[0] != 0


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ([GOOD % 1, *["{x}"] * 5_000, GOOD % 2], 2),
        (["1"] * 5_000, 0),
        ([""] * 5_000, 0),
        (["{" * 5_000], 0),
        (['{"ph":"X","name":"a","ts":NaN}'] * 5_000, 5_000),
    ],
)
def test_damage_without_end_is_counted(tmp_path: Path, content: list[str], kept: int) -> None:
    """Thousands of damaged places give a few warnings and a number."""
    trace = Trace(write(tmp_path, *content))
    assert sum(len(events) for events in trace.chunks()) == kept
    assert len(trace.warnings) <= 3
    assert everything(trace.path)[0] == 1


def bomb(path: Path, events: int) -> Path:
    with gzip.open(path, "wb") as file:
        file.write(HEAD.encode())
        file.write(b",".join([(GOOD % 3).encode()] * events) + b"]}")
    return path


def test_memory_is_limited(tmp_path: Path) -> None:
    """Reading ends when the process has grown beyond its limit."""
    trace = Trace(bomb(tmp_path / "t.json.gz", 200_000), Limits(memory_bytes=1_000_000))
    assert 0 < sum(len(events) for events in trace.chunks()) < 200_000
    assert trace.truncated
    assert "Limits.memory_bytes raises it" in trace.warnings[-1]


def test_an_event_of_any_length_is_refused(tmp_path: Path) -> None:
    """Without an end of an event in sight, reading stops."""
    path = write(tmp_path, GOOD % 1, json.dumps({"ph": "X", "name": "x" * (40 << 20), "ts": 1}))
    trace = Trace(path)
    assert [event.name for events in trace.chunks() for event in events] == ["good"]
    assert "no end of an event within 16 MiB" in trace.warnings[-1]


@pytest.mark.parametrize(("content_bytes", "ok"), [(1_000_000, False), (10_000_000, True)])
def test_what_was_read_before_a_limit_is_kept(tmp_path: Path, content_bytes: int, ok: bool) -> None:
    """The limit is named, also in the check and the report."""
    path, limits = bomb(tmp_path / "t.json.gz", 30_000), Limits(content_bytes=content_bytes)
    [checked] = open_run(path, limits).check().artifacts
    assert ok or "1,000,000 bytes of content (Limits.content_bytes raises it)" in checked.reason
    step = open_step(path, limits)
    result, report = step.merge(), step.report()
    assert [checked.status == "ok", not result.problems, not report.coverage.missing] == [ok] * 3
    assert report.coverage.events > 0


def test_a_limit_is_no_damage_for_the_other_traces(tmp_path: Path) -> None:
    """Each trace is read up to the limit; the report counts those that were cut short."""
    bomb(tmp_path / "rank0.json.gz", 30_000)
    bomb(tmp_path / "rank1.json.gz", 1_000)
    coverage = open_step(tmp_path, Limits(content_bytes=1_000_000)).report().coverage
    assert (coverage.read, len(coverage.missing)) == (2, 2)
    assert 1_000 < coverage.events < 31_000


def test_processes_beyond_the_room_of_a_lane_share_one(tmp_path: Path) -> None:
    """The ids of one lane never run into those of the next."""
    event = '{{"ph":"X","cat":"cpu_op","name":"n","pid":{0},"tid":1,"ts":{0},"dur":1}}'
    path = write(tmp_path, *(event.format(pid) for pid in range(9_000)))
    result = open_step(path).merge(tmp_path / "out.json.gz")
    pids = {event["pid"] for event in read_events(result.path) if event["ph"] == "X"}
    assert max(pids) - min(pids) < LANE_PIDS - 1
    assert result.events == 9_000


NAME = '{{"ph":"M","name":"thread_name","pid":{0},"tid":{1},"args":{{"name":"t{1}"}}}}'


@pytest.mark.parametrize("events", [[GOOD % 1], []])
def test_all_names_of_threads_are_kept_and_written_once(tmp_path: Path, events: list[str]) -> None:
    """Some profilers name the thread before each event of a device."""
    names = [NAME.format(1, tid) for tid in range(8_000)]
    path = write(tmp_path, *events, *names, *names[:1] * 5_000, GOOD % 5)
    result = open_step(path).merge(tmp_path / "out.json.gz")
    assert result.problems == []
    found = [e["args"]["name"] for e in read_events(result.path) if e["name"] == "thread_name"]
    assert sorted(found) == sorted(f"t{tid}" for tid in range(8_000))


def test_any_number_of_notes_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first hundred of them stand in the report; the others are counted."""
    step = build_step(tmp_path)
    notes = [f"note {number} of the capture" for number in range(100_000)]
    rewrite(step, notes=notes)
    begin_s = time.thread_time()
    assert main(["report", str(step), "--all"]) == 0
    assert time.thread_time() - begin_s < 20
    printed = capsys.readouterr().out
    assert "note 99 of" in printed
    assert "note 100 of" not in printed
    assert "99,900 more notes are in manifest.json" in printed


def test_one_unreadable_trace_costs_the_lane_no_other(tmp_path: Path) -> None:
    """A lane of several traces is reported from those that can be read."""
    step = build_step(tmp_path, mode="discrete")
    (first, *_) = sorted(step.glob("actor_rank0.*.json.gz"))
    [artifact] = read_manifest(step).workers[0].artifacts
    extra = msgspec.structs.replace(artifact, path="actor_rank0.z.torch.json.gz", stage="z")
    (step / extra.path).write_bytes(b"no trace")
    rewrite_worker(step, "actor_rank0", artifacts=[artifact, extra])
    report = open_step(step).report()
    assert first.is_file()
    assert "actor_rank0" in {row.name for row in report.workers}
    assert any("actor_rank0.z.torch.json.gz" in problem for problem in report.coverage.missing)


def test_a_task_type_may_be_any_bytes(tmp_path: Path) -> None:
    """An NPU trace is read although the kind of a task is not UTF-8."""
    named = '{"ph":"M","name":"process_name","pid":1,"args":{"name":"Ascend Hardware"}}'
    task = '{"ph":"X","name":"k","pid":1,"tid":1,"ts":3,"dur":1,"args":{"Task Type":"%s"}}'
    path = write(tmp_path, named, task % "AI_CORE", task % "?")
    path.write_bytes(path.read_bytes().replace(b"?", b"\xff\xfe"))
    assert everything(path) == [0, 0, 0]
