"""What trajectories wait for: every instant has its causes,
as a count of instants by hand finds them.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from drawn_logs import MS, DrawnLog
from drawn_steps import BASE, Worker, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import rewrite, rewrite_worker

from verl_profiling.analysis import open_step
from verl_profiling.manifest import Request

OWN_CODE, LOOP_LAG = "own code", "loop lag"
END = 400


def drawn(*trajectories: tuple[float, float], **what: object) -> DrawnLog:
    """Return a log that is drawn in milliseconds,
    so that 50 ms of a loop's drain are 50 of them.
    """
    log = DrawnLog(end=END, unit_ns=MS, **what)
    for begin, end in trajectories:
        log.trajectory(begin, end)
    return log


def causes_of(
    folder: Path, log: DrawnLog, *requests: Request, begin: int = 0, end: int = END
) -> dict[str, float]:
    """Return the milliseconds of all trajectories by cause,
    in a step from one millisecond to another.
    """
    report_of(folder, [("rollout", 0, END / 1000)], [Worker("rollout", replica=0)], end / 1000)
    rewrite_worker(folder, "rollout0", requests=list(requests))
    rewrite(folder, begin_ns=BASE + begin * MS)
    log.add_to(folder)
    rollout = open_step(folder).report().rollout
    rows = rollout.causes if rollout is not None else []
    return {
        row.cause: pytest.approx(row.seconds * 1000, abs=1e-3) for row in rows if row.seconds > 1e-9
    }


@pytest.mark.parametrize(
    ("trajectory", "begin", "found"),
    [
        ((-50, 100), 0, {"began before the capture": 60, "tool:a": 30, OWN_CODE: 10}),
        (
            (0, 100),
            10,
            {"tool:a": 30, OWN_CODE: 60},
        ),  # all was recorded, though the step began later
    ],
)
def test_what_a_trajectory_was_in_before_recording_began_is_not_its_own_code(
    trajectory: tuple[float, float], begin: int, found: dict[str, float], tmp_path: Path
) -> None:
    """It may have been in a span that nobody knows, such as a long request;
    its first one ends that.
    """
    log = drawn(trajectory)
    log.span("tool:a", 60, 90, 0)
    assert causes_of(tmp_path, log, begin=begin) == found


def request(begin: float, end: float, **marks: float) -> Request:
    """Return a request of the engine that has been told of some times."""
    times = {"begin": begin, "end": end, **marks}
    ns = {f"{name}_ns": BASE + round(at * MS) for name, at in times.items()}
    return Request(replica=0, id="r", prompt_tokens=1, response_tokens=1, **ns)


ALL = {"arrival": 15, "scheduled": 20, "first_token": 30, "last_token": 70}


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (
            request(12, 75, **ALL),
            {"to the engine": 5, "queued": 5, "prefill": 10, "decode": 40, "from the engine": 20},
        ),
        (request(12, 75), {"to the engine": 2, "generate": 63, "from the engine": 15}),
        (
            request(12, 75, last_token=200),
            {"to the engine": 2, "generate": 63, "from the engine": 15},
        ),
        (
            request(12, 75, first_token=30),
            {"to the engine": 2, "first token": 18, "decode": 45, "from the engine": 15},
        ),
        (request(5, 200, arrival=6, scheduled=7, first_token=8), {"decode": 80}),
        (request(200, 300), {"generate": 80}),
        (request(10, 90, arrival=5, scheduled=70, first_token=30), {"queued": 60, "decode": 20}),
    ],
)
def test_a_generate_span_divides_by_its_request(
    made: Request, found: dict[str, float], tmp_path: Path
) -> None:
    """As far as the engine tells, and inside of the span;
    a request at another time is none of it.
    """
    log = drawn((10, 90))
    log.span("generate", 10, 90, 0, request="r")
    assert causes_of(tmp_path, log, made) == found


def test_a_blocked_loop_stops_what_was_due_and_nothing_else(tmp_path: Path) -> None:
    """Of five trajectories one blocks, one is in the engine, one's tool goes on,
    and two stand still.
    """
    log = drawn(*[(0, 300)] * 5)
    log.trajectory(0, 300, loop=1)
    blocking = log.span("tool:blocking", 100, 200, 0)
    log.span("generate", 0, 300, 1, request="r")
    log.span("tool:long", 0, 300, 2)
    log.span("tool:due", 0, 205, 3)
    log.span("tool:elsewhere", 0, 205, 5, loop=1)
    log.block(100, 200, blocking, "tools.search (tools.py:3)")
    assert causes_of(tmp_path, log, request(0, 150, arrival=1, last_token=150)) == {
        "tool:blocking": 100,
        **{"to the engine": 1, "generate": 149, "from the engine": 150},
        "tool:long": 300,
        "tool:due": 105,
        LOOP_LAG: 100,
        "tool:elsewhere": 205,
        OWN_CODE: 200 + 95 + 300 + 95,
    }


@pytest.mark.parametrize(("still_open", "took"), [(False, 335), (True, 390)])
def test_a_span_that_goes_on_when_recording_ends_keeps_its_time(
    still_open: bool, took: float, tmp_path: Path
) -> None:
    """A block just before the end of recording did not hold up what was not done by then."""
    log = drawn((0, END))
    log.span("tool:slow", 10, END, 0, still_open=still_open)
    log.block(340, 395, function="own.loop (own.py:1)")
    assert causes_of(tmp_path, log)["tool:slow"] == took


def test_a_log_is_read_as_far_as_it_knows(tmp_path: Path) -> None:
    """Where spans were left out, time is unexplained; what lies outside of the step is clipped."""
    log = drawn((0, 10), spans_left_out=1)
    log.span("tool:a", 0, 4, 0)
    assert causes_of(tmp_path, log) == {"tool:a": 4, "unexplained": 6}
    log = drawn((0, 130), (150, 160))
    log.span("tool:a", 0, 20, 0)
    log.span("tool:b", 90, 120, 0)
    assert causes_of(tmp_path, log, begin=10, end=100) == {"tool:a": 10, OWN_CODE: 70, "tool:b": 10}


def by_hand(log: DrawnLog) -> dict[str, float]:
    """Count the milliseconds of all trajectories by cause; no two begins are the same."""
    found: dict[str, float] = defaultdict(float)
    for of in log.log.trajectories:
        mine = {span.id: span for span in log.log.spans if span.trajectory == of.id}
        for at in range(of.begin_ns, of.end_ns, MS):
            running = {id for id, span in mine.items() if span.begin_ns <= at < span.end_ns}
            around = set()
            for id in running:
                while (id := mine[id].parent) in mine:
                    around.add(id)
            leaves = running - around
            for id in leaves:
                found[mine[id].name] += 1 / len(leaves)
            if not running:
                found[OWN_CODE] += 1
    return dict(found)


@st.composite
def workloads(draw: st.DrawFn) -> DrawnLog:
    """Trajectories with spans in spans and beside spans,
    some of which outlive those that began them.
    """
    log = drawn()
    begins = iter(draw(st.permutations(range(80))))
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 40))
        own = log.trajectory(first, first + draw(st.integers(0, 60)))
        earlier: dict[int, int] = {}
        for _ in range(draw(st.integers(0, 8))):
            begin = next(begins)
            name = draw(st.sampled_from(["tool:a", "tool:b", "reward", "environment:start"]))
            parent = draw(st.sampled_from([-1, *(id for id, at in earlier.items() if at < begin)]))
            earlier[log.span(name, begin, begin + draw(st.integers(0, 30)), own, parent)] = begin
    return log


@settings(max_examples=25, deadline=None)
@given(
    workloads(),
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 100), st.integers(0, 80), st.integers(-1, 20))
    ),
)
def test_causes_are_those_that_a_count_of_instants_finds(
    log: DrawnLog, blocks: list[tuple[int, int, int, int]]
) -> None:
    """They add up to the time of all trajectories; lag takes from the others and adds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        plain = causes_of(Path(folder), log)
    assert plain == by_hand(log)
    for loop, begin, took, span in blocks:
        log.block(begin, begin + took, span, "f", loop)
    with tempfile.TemporaryDirectory() as folder:
        found = causes_of(Path(folder), log)
    own_ms = sum(of.end_ns - of.begin_ns for of in log.log.trajectories) / MS
    assert sum(took.expected for took in found.values()) == pytest.approx(own_ms)
    for cause, took in found.items():
        assert cause == LOOP_LAG or took.expected <= plain[cause].expected + 1e-3
