"""A trace may hold anything: what is no event is skipped, counted and said, and nothing hangs or breaks."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from step_folders import build_step, read_events, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.run_files import read_manifest
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.trace import Trace

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
        for argv in (["check", str(path)], ["merge", str(path), "-o", output], ["report", str(path)])
    ]


FIELDS = [
    *('"ts":1e308', '"ts":"nan"', '"ts":NaN', '"ts":[]', '"ts":3,"dur":-1', '"ts":3,"dur":"inf"'),
    *('"ts":3,"name":5', '"ts":3,"pid":[]'),
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
        timed = [event.name for events in trace.chunks() for event in events if event.ts is not None]
        assert timed == ["good", "good"], one


@pytest.mark.parametrize("base", ["9" * 40, "-1", '"x"', "1.5"])
def test_a_base_that_is_no_time_is_refused(tmp_path: Path, base: str) -> None:
    """All times of the trace would be wrong; behind the events as before them."""
    given = f'"baseTimeNanoseconds":{base}'
    assert everything(write(tmp_path, GOOD % 1, head='{"traceEvents":[', tail=f"],{given}}}"))[0] != 0
    if base != "1.5":
        assert everything(write(tmp_path, GOOD % 1, head=f'{{{given},"traceEvents":['))[0] != 0


@pytest.mark.parametrize("tail", ["", "]", '],"a":{'])
def test_what_follows_the_events_shows_whether_the_file_is_whole(tmp_path: Path, tail: str) -> None:
    """A file that ends behind its events may have lost the base of their times."""
    path = write(tmp_path, GOOD % 1, tail=tail)
    assert everything(path)[0] == 1


def bomb(path: Path, events: int) -> Path:
    """Write a small file of many events."""
    with gzip.open(path, "wb") as file:
        file.write(HEAD.encode())
        file.write(b",".join([(GOOD % 3).encode()] * events) + b"]}")
    return path


def test_at_most_so_many_bytes_are_unpacked(tmp_path: Path) -> None:
    """A small file may unpack to any size; a base behind the events is not searched further either."""
    trace = Trace(bomb(tmp_path / "t.json.gz", 200_000), Limits(content_bytes=5_000_000))
    assert 0 < sum(len(events) for events in trace.chunks()) < 200_000
    assert trace.truncated
    assert "5,000,000 bytes of content (--max-content raises it)" in trace.warnings[-1]


def test_a_process_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """Reading ends when the process has grown beyond the limit."""
    trace = Trace(bomb(tmp_path / "t.json.gz", 200_000), Limits(memory_bytes=1_000_000))
    assert 0 < sum(len(events) for events in trace.chunks()) < 200_000
    assert trace.truncated
    assert "--max-memory raises it" in trace.warnings[-1]


@pytest.mark.parametrize("command", ["check", "merge", "report", "diff"])
def test_commands_keep_what_was_read_before_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """They say which limit it was, go on, and exit with 1; with a higher one they exit with 0."""
    path = bomb(tmp_path / "t.json.gz", 30_000)
    arguments = [command, str(path), *([str(path)] if command == "diff" else [])]
    assert main([*arguments, "--max-content", "1M"]) == 1
    printed = "".join(capsys.readouterr()).replace("\n", " ")
    assert command == "diff" or "1,000,000 bytes of content (--max-content raises it)" in printed.replace(
        "  ", " "
    )
    assert main([*arguments, "--max-content", "10M"]) == 0


def test_a_limit_is_no_damage_for_the_other_traces(tmp_path: Path) -> None:
    """Each trace is read up to the limit; the report counts those that were cut short."""
    bomb(tmp_path / "rank0.json.gz", 30_000)
    bomb(tmp_path / "rank1.json.gz", 1_000)
    coverage = open_step(tmp_path, Limits(content_bytes=1_000_000)).report().coverage
    assert (coverage.read, len(coverage.missing)) == (2, 2)
    assert 1_000 < coverage.events < 31_000


NAME = '{{"ph":"M","name":"thread_name","pid":{0},"tid":{1},"args":{{"name":"t{1}"}}}}'


def named_threads(path: Path) -> Counter[str]:
    """Merge a trace and count the names of threads."""
    result = open_step(path).merge(path.with_name("out.json.gz"))
    assert result.problems == []
    return Counter(
        event["args"]["name"] for event in read_events(result.path) if event["name"] == "thread_name"
    )


def test_metadata_that_a_trace_repeats_is_written_once(tmp_path: Path) -> None:
    """Some profilers name the thread before each event of a device."""
    assert named_threads(write(tmp_path, GOOD % 1, *[NAME.format(1, 7)] * 5_000)) == {"t7": 1}


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
