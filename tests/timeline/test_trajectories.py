"""Logs of trajectories become rows of the timeline: spans inside, arrows to requests,
and how loops did.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from drawn_logs import MS, Drawn, DrawnLog, add_log
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import build_step, read_events

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.files.trajectory_log import (
    LOG_SUFFIX,
    Counted,
    LoopRecord,
    SpanRecord,
    StatusChange,
    TrajectoryLog,
)
from verl_profiling.steps.check import check
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.step import Keep
from verl_profiling.steps.trace_content import Limits
from verl_profiling.timeline.merge import merge
from verl_profiling.timeline.processes import LANE_PIDS, TRAJECTORIES_PID


def test_trajectories_take_as_many_rows_as_ran_at_once(tmp_path: Path) -> None:
    """Three of which two overlap need two rows; spans lie inside, on the controller's clock."""
    drawn = Drawn(tmp_path, clock_ms=5_000)
    first = drawn.trajectory(0, 40, group="g1", turns=2)
    drawn.trajectory(10, 90, group="g1", status="failed", error="it broke")
    third = drawn.trajectory(50, 60, group="g2", sample=0, validate=True)
    turn = drawn.span("turn", 1, 39, first)
    drawn.span("generate", 1, 20, first, turn)
    drawn.span("tool:search", 51, 55, third, query="what")
    result, timeline = drawn.merged()
    assert result.problems == []
    assert timeline.shown("trajectory") == [
        ("trajectories 0", "g1/0", 0, 40),
        ("trajectories 0", "g2/0 (validate)", 50, 60),
        ("trajectories 1", "g1/1 (failed)", 10, 90),
    ]
    assert timeline.shown("span") == [
        ("trajectories 0", "turn", 1, 39),
        ("trajectories 0", "generate", 1, 20),
        ("trajectories 0", "tool:search", 51, 55),
    ]
    arguments = {e["name"]: e.get("args") for e in timeline.of("trajectory") + timeline.of("span")}
    assert arguments["g1/0"] == {"turns": 2, "group": "g1", "sample": 0, "status": "done"}
    assert arguments["g1/1 (failed)"]["error"] == "it broke"
    assert arguments["tool:search"] == {"query": "what"}
    assert arguments["turn"] is None
    assert timeline.counter("trajectories running") == [
        (0, 1),
        (10, 2),
        (40, 1),
        (50, 2),
        (60, 1),
        (90, 0),
    ]
    assert timeline.names["actor_rank1"] < timeline.pid < timeline.names["rollout0_rank0"]
    assert timeline.pid % LANE_PIDS == TRAJECTORIES_PID


def test_spans_of_a_trajectory_that_overlap_are_on_rows_below_it(tmp_path: Path) -> None:
    """Children of a gather lie side by side, each with its own children; another is beside them."""
    drawn = Drawn(tmp_path)
    one = drawn.trajectory(0, 50)
    gather = drawn.span("gather", 5, 45, one)
    for number in range(3):
        tool = drawn.span(f"tool:{number}", 6 + number, 30 + number, one, gather)
        drawn.span(f"http:{number}", 10, 20, one, tool)
    drawn.span("later", 40, 44, one, gather)
    drawn.trajectory(20, 60)
    _, timeline = drawn.merged()
    assert timeline.shown("span") == [
        ("trajectories 0", "gather", 5, 45),
        ("trajectories 0", "tool:0", 6, 30),
        ("trajectories 0", "http:0", 10, 20),
        ("trajectories 0", "later", 40, 44),
        ("trajectories 0.2", "tool:1", 7, 31),
        ("trajectories 0.2", "http:1", 10, 20),
        ("trajectories 0.3", "tool:2", 8, 32),
        ("trajectories 0.3", "http:2", 10, 20),
    ]
    rows = ["trajectories 0", "trajectories 0.2", "trajectories 0.3", "trajectories 1"]
    assert list(timeline.rows.values()) == rows


def test_spans_of_no_trajectory_have_rows_of_their_own(tmp_path: Path) -> None:
    """As do those of a trajectory that is not in the log."""
    drawn = Drawn(tmp_path)
    drawn.span("fill the queue", 1, 9)
    drawn.span("inside", 2, 3, parent=0)
    drawn.span("wait:batch", 5, 12)
    drawn.span("tool:lost", 20, 30, 77)
    _, timeline = drawn.merged()
    assert timeline.shown("span") == [
        ("spans 0", "fill the queue", 1, 9),
        ("spans 0", "inside", 2, 3),
        ("spans 0", "tool:lost", 20, 30),
        ("spans 1", "wait:batch", 5, 12),
    ]


def test_an_arrow_leads_from_a_span_to_the_request_it_waited_for(tmp_path: Path) -> None:
    """By the engine's id; where an id is used again, by time, and clocks may differ a little."""
    drawn = Drawn(tmp_path, clock_ms=-300)
    one = drawn.trajectory(0, 90)
    drawn.span("generate", 10, 30, one, request="a")
    drawn.span("generate", 40, 60, one, request="a")
    drawn.span("generate", 70, 80, one, request="unknown")
    drawn.requests(("a", 12, 29), ("a", 39, 59), ("other", 12, 29), ("a", 82, 85))
    _, timeline = drawn.merged()
    begins = {
        e["id"]: (timeline.rows[e["tid"]], timeline.ms(e["ts"]))
        for e in timeline.events
        if e["ph"] == "s" and e["cat"] == "request"
    }
    ends = {e["id"]: e for e in timeline.events if e["ph"] == "f" and e["cat"] == "request"}
    assert sorted(begins.values()) == [("trajectories", 10), ("trajectories", 40)]
    assert begins.keys() == ends.keys()
    assert {e["pid"] for e in ends.values()} == {timeline.names["rollout0 requests"]}
    heads = sorted((timeline.ms(e["ts"]), e.get("bp")) for e in ends.values())
    assert heads == [(11.999, None), (40.001, "e")], (
        "the next slice is the request; or it is inside of it"
    )


def test_the_last_word_on_a_fate_is_in_the_name(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path)
    drawn.trajectory(0, 10, group="g1")
    drawn.trajectory(0, 10, group="g2", sample=None, status="running")
    DrawnLog(1, statuses=[StatusChange("g1", None, "filtered", drawn.ns(50))]).add_to(drawn.folder)
    _, timeline = drawn.merged()
    assert [name for _, name, _, _ in timeline.shown("trajectory")] == [
        "g1/0 (filtered)",
        "g2 (running)",
    ]


def test_a_loop_shows_who_blocked_it(tmp_path: Path) -> None:
    """A block is named by its span, or its function."""
    drawn = Drawn(tmp_path)
    one = drawn.trajectory(0, 90)
    drawn.span("tool:slow", 10, 80, one)
    drawn.block(15, 70, 0, "tools.slow (tools.py:7)")
    drawn.block(80, 90, function="gc (x.py:1)")
    drawn.block(95, 92, function="backwards")
    _, timeline = drawn.merged()
    assert timeline.shown("block") == [
        ("loop Main blocked", "tool:slow", 15, 70),
        ("loop Main blocked", "gc (x.py:1)", 80, 90),
    ]
    assert timeline.of("block")[0]["args"] == {
        "task": "Task-1",
        "function": "tools.slow (tools.py:7)",
    }
    assert next(iter(timeline.rows.values())) == "loop Main blocked", "it is above the trajectories"


def test_loops_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path)
    drawn.trajectory(0, 90)
    drawn.log.loops[1] = LoopRecord(1, 8, "Main")
    drawn.block(10, 20, function="a (x.py:1)")
    drawn.block(30, 40, function="b (x.py:1)", loop=1)
    _, timeline = drawn.merged()
    assert [row for row, *_ in timeline.shown("block")] == ["loop Main blocked"] * 2
    assert len({event["tid"] for event in timeline.of("block")}) == 2


def test_counts_are_drawn_over_time(tmp_path: Path) -> None:
    """How long a queue was is a counter of its own beside the trajectories."""
    drawn = Drawn(tmp_path)
    drawn.trajectory(0, 90)
    drawn.log.counts += [
        Counted("message queue", drawn.ns(10), 3),
        Counted("message queue", drawn.ns(20), 0.5),
    ]
    _, timeline = drawn.merged()
    assert timeline.counter("message queue count") == [(10, 3), (20, 0.5)]


def test_trajectories_may_begin_before_the_step_and_end_after_it(tmp_path: Path) -> None:
    """What began more than an hour before begins with the timeline;
    what ended by then is left out.
    """
    drawn = Drawn(tmp_path)
    hour = 3_600_000.0
    drawn.trajectory(-20_000, 500_000)
    drawn.trajectory(-30 * hour, 10)
    drawn.trajectory(-40 * hour, -30 * hour)
    result, timeline = drawn.merged()
    slices = {e["name"]: e for e in timeline.of("trajectory")}
    assert slices.keys() == {"g/0", "g/1"}
    assert timeline.ms(slices["g/0"]["ts"]) == -20_000
    assert slices["g/1"]["ts"] == 0
    assert timeline.ms(slices["g/1"]["dur"]) == pytest.approx(10)
    assert all(event.get("ts", 0) >= 0 for event in timeline.events)
    assert (result.problems, result.left_out) == ([], 1)


def test_a_selection_holds_for_trajectories_too(tmp_path: Path) -> None:
    """Short spans, other stages and requests are left out and counted; names of the rest stay."""
    drawn = Drawn(tmp_path)
    one = drawn.trajectory(0, 40)
    drawn.trajectory(1_000, 2_000)
    drawn.span("generate", 1, 20, one, request="a")
    drawn.span("tool:short", 21, 21.5, one)
    drawn.requests(("a", 2, 19), ("b", 3, 3.2))
    begin = drawn.begin_ns
    window = (begin - MS, begin + 50 * MS)
    result, timeline = drawn.merged(Keep(min_us=1_000, windows_ns=(window,)))
    assert [name for _, name, _, _ in timeline.shown("trajectory")] == ["g/0"]
    assert [name for _, name, _, _ in timeline.shown("span")] == ["generate"]
    assert Counter(e["name"] for e in timeline.of("request") if e["ph"] == "X") == {
        "request (9 tokens)": 1,
        "first token": 1,
        "decode": 1,
    }
    assert timeline.counter("trajectories running") == [(0, 1), (40, 0)]
    log = next(member for member in result.members if member.path.name.startswith("agent_loop"))
    assert log.left_out == 2
    assert result.left_out >= 2 + 3
    assert len([e for e in timeline.events if e["ph"] in "sf" and e["cat"] == "request"]) == 2


TIMES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)
SPAN = st.tuples(st.integers(-1, 6), st.integers(-1, 11), TIMES)


@settings(max_examples=15, deadline=None)
@given(
    trajectories=st.lists(TIMES, max_size=6),
    spans=st.lists(SPAN, max_size=12),
    blocks=st.lists(st.tuples(st.integers(0, 2), TIMES), max_size=4),
)
def test_on_every_row_slices_nest(
    tmp_path_factory: pytest.TempPathFactory,
    trajectories: list[list[int]],
    spans: list[tuple[int, int, list[int]]],
    blocks: list[tuple[int, list[int]]],
) -> None:
    """Whatever a log holds, what is shown of it is shown once,
    and no slice crosses the end of another.
    """
    drawn = Drawn(tmp_path_factory.mktemp("drawn"))
    for begin, end in trajectories:
        drawn.trajectory(begin, end)
    for owner, parent, (begin, end) in spans:
        drawn.span("s", begin, end, owner, parent)
    for loop, (begin, end) in blocks:
        drawn.block(begin, end, 1, "f", loop)
    _, timeline = drawn.merged()
    shown = [timeline.shown(category) for category in ("trajectory", "span", "block")]
    assert [len(found) for found in shown] == [len(trajectories), len(spans), len(blocks)]
    by_row: dict[str, list[tuple[float, float]]] = {}
    for row, _, begin, end in (one for found in shown for one in found):
        by_row.setdefault(row, []).append((begin, end))
    for row in by_row.values():
        opened: list[float] = []
        for begin, end in sorted(row, key=lambda one: (one[0], -one[1])):
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or end <= opened[-1]
            opened.append(end)


def test_a_hostile_log_costs_its_own_lane(tmp_path: Path) -> None:
    """Names of 100 kB, thousands at once, texts of any kind: names are cut,
    and the rest is whole.
    """
    drawn = Drawn(tmp_path)
    one = drawn.trajectory(
        0, 40, group="\u202e\x1b[31m" + "g" * 100_000, sample=None, status="x" * 100_000
    )
    for number in range(3_000):
        drawn.span(
            "n" * 100_000 if number == 0 else "tool", number / 1_000, 40, one, query="q" * 1_000
        )
    drawn.log.spans[5] = msgspec.structs.replace(
        drawn.log.spans[5], facts={f"f{i}": i for i in range(5_000)}
    )
    result, timeline = drawn.merged()
    assert len(timeline.of("span")) == 3_000
    assert len(timeline.of("span")[0]["args"]["query"]) == 1_000
    assert result.problems == []
    assert max(len(event["name"]) for event in timeline.events) <= 2 * 120 + 3
    assert (
        len({timeline.names[name] for name in timeline.names if name.startswith("actor_rank")}) == 2
    )


def test_a_log_that_is_cut_damaged_or_missing_costs_what_is_not_there(tmp_path: Path) -> None:
    """The timeline has what could be read, and says the rest; a limit ends reading and is said."""
    drawn = Drawn(tmp_path)
    for number in range(5_000):
        drawn.span("tool", number, number + 1)
    path, *_ = (add_log(drawn.folder, drawn.log, rank=rank) for rank in range(3))
    (drawn.folder / "agent_loop_rank1.trajectories.jsonl.gz").unlink()
    (drawn.folder / "agent_loop_rank2.trajectories.jsonl.gz").write_bytes(b"nothing of the kind")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (inputs,) = find_steps(drawn.folder)
    result = merge(inputs)
    shown = len([e for e in read_events(result.path) if e.get("cat") == "span"])
    assert 100 < shown < 5_000
    assert len(result.problems) == 3
    assert "agent_loop_rank1.trajectories.jsonl.gz is missing" in result.problems[0]
    assert result.problems[1] == f"{path.name}: is cut off after line {shown + 3}"
    assert "not a gzip file" in result.problems[2]
    inputs.limits = Limits(memory_bytes=1)
    limited = merge(inputs)
    assert any(
        "Limits.memory_bytes raises it" in problem and path.name in problem
        for problem in limited.problems
    )


@pytest.mark.parametrize("spans", [200, 5_000])
def test_all_lines_before_the_end_of_a_cut_off_log_are_shown(tmp_path: Path, spans: int) -> None:
    """Of a small log, too."""
    drawn = Drawn(tmp_path)
    for number in range(spans):
        drawn.span("tool", number % 7, number % 7 + 1)
    path = add_log(drawn.folder, drawn.log)
    whole = path.read_bytes()
    half = whole[: len(whole) // 2]
    path.write_bytes(half)
    lines = zlib.decompressobj(wbits=31).decompress(half).count(b"\n")
    (inputs,) = find_steps(drawn.folder)
    [problem] = merge(inputs).problems
    # igzip keeps back the last bytes of its state
    assert lines - 10 <= int(problem.rpartition(" ")[2]) <= lines


def test_overlapping_requests_lie_side_by_side(tmp_path: Path) -> None:
    """With their parts inside of them, below the engine."""
    drawn = Drawn(tmp_path)
    drawn.requests(("a", 0, 10), ("b", 5, 20), ("c", 10, 18))
    events = read_events(open_step(drawn.folder).merge().path)
    names = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert names["rollout0_rank0"] < names["rollout0 requests"]
    mine = [event for event in events if event["pid"] == names["rollout0 requests"]]
    rows = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    slices = [event for event in mine if event["name"] == "request (9 tokens)"]
    assert [rows[event["tid"]] for event in slices] == ["requests 0", "requests 1", "requests 0"]
    assert [event["dur"] for event in slices] == [10_000, 15_000, 8_000]
    parts = [
        event["name"] for event in mine if event.get("cat") == "request" and event not in slices
    ]
    assert parts == ["first token", "decode"] * 3
    assert slices[0]["args"] == {
        "id": "a",
        "prompt_tokens": 3,
        "response_tokens": 9,
        "failed": False,
    }


SPANS = [SpanRecord(i, -1, -1, "tool:x", i, i + 1, 7, -1, False, "", {}) for i in range(20_000)]


def log_of(rank: int, **what: object) -> TrajectoryLog:
    return TrajectoryLog(lane=f"agent_loop_rank{rank}", begin_ns=1, end_ns=9, **what)


def checked(folder: Path) -> dict[str, tuple[str, str]]:
    found = check(folder).artifacts
    return {
        entry.path: (entry.status, entry.reason)
        for entry in found
        if entry.path.endswith(LOG_SUFFIX)
    }


def test_a_log_without_end_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may unpack to any size."""
    folder = build_step(tmp_path)
    add_log(folder, log_of(0, spans=SPANS[:50]))
    monkeypatch.setattr("verl_profiling.files.trajectory_log.MAX_BYTES", 1_000)
    assert main(["report", str(folder)]) == 1
    [(status, reason)] = checked(folder).values()
    assert (status, "more than 1,000 bytes" in reason) == ("unreadable", True)


def test_check_reads_logs_to_their_end(tmp_path: Path) -> None:
    """Whole, full, without a record, cut, of another kind or version,
    with a line of any length, missing.
    """
    folder = build_step(tmp_path)
    paths = [add_log(folder, log_of(rank, spans=SPANS[:9_000]), rank=rank) for rank in range(6)]
    add_log(folder, log_of(6, spans=SPANS[:3], spans_left_out=5), rank=6)
    paths += [add_log(folder, log_of(rank), rank=rank) for rank in (7, 8, 9, 10)]
    paths[7].write_bytes(gzip.compress(b'["log",99,"lane",0]\n'))
    paths[8].write_bytes(gzip.compress(b'["log",1,"' + b"x" * 2_000_000 + b'",0]\n'))
    paths[9].write_bytes(gzip.compress(b'["t",0,"g",0,1,2,"done",0,"",{}]\n'))
    paths[1].write_bytes(paths[1].read_bytes()[: paths[1].stat().st_size // 2])
    lines = gzip.decompress(paths[2].read_bytes()).splitlines(keepends=True)
    paths[2].write_bytes(gzip.compress(b"".join([*lines[:5], b"[]\n", *lines[5:]])))
    paths[3].write_bytes(b"plain")
    paths[4].unlink()
    paths[5].write_bytes(b"")
    found = checked(folder)
    statuses = {
        int(path.split(".")[0][len("agent_loop_rank") :]): status
        for path, (status, _) in found.items()
    }
    assert statuses == {
        0: "ok",
        1: "truncated",
        2: "unreadable",
        3: "unreadable",
        4: "missing",
        5: "empty",
        6: "ok",
        7: "empty",
        **dict.fromkeys((8, 9, 10), "unreadable"),
    }
    reasons = {path: reason for path, (_, reason) in found.items()}
    assert reasons[paths[0].name] == ""
    assert "line 6: is not a log" in reasons[paths[2].name]
    assert "spans that were not recorded" in reasons["agent_loop_rank6.trajectories.jsonl.gz"]
    for path, problem in zip(
        paths[7:], ("version 99", "a line of over", "with a header"), strict=True
    ):
        assert problem in reasons[path.name]
