"""What trajectories wait for: every instant has its causes, as a count of instants by hand finds them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.manifest import Request
from verl_profiling.report.rollout.axes import Sharing
from verl_profiling.report.rollout.pieces import LOOP_LAG, OWN_CODE, UNEXPLAINED, trajectory_pieces
from verl_profiling.report.rollout.records import Records, read_records
from verl_profiling.timeline.requests import joined
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import Block, LoopRecord, SpanRecord, TrajectoryLog, TrajectoryRecord

MS = 1_000_000  # the logs are drawn in milliseconds, so that 50 ms of a loop's drain are 50 of them
END = 400


def span(
    id: int,
    trajectory: int,
    name: str,
    begin: float,
    end: float,
    *,
    parent: int = -1,
    request: str = "",
    loop: int = 0,
) -> SpanRecord:
    return SpanRecord(
        id, trajectory, parent, name, round(begin * MS), round(end * MS), 7, loop, False, request, {}
    )


def trajectory(id: int, begin: float, end: float, *, loop: int = 0) -> TrajectoryRecord:
    return TrajectoryRecord(id, "g", id, round(begin * MS), round(end * MS), "done", loop, "", {})


def log_of(
    trajectories: list[TrajectoryRecord], spans: list[SpanRecord], blocks: list[Block] = (), **more: object
) -> TrajectoryLog:
    loops = [LoopRecord(0, 7, "AsyncIO"), LoopRecord(1, 8, "AsyncIO")]
    return TrajectoryLog(
        lane="agent_loop_rank0",
        begin_ns=0,
        end_ns=END * MS,
        loops=loops,
        trajectories=trajectories,
        spans=spans,
        blocks=list(blocks),
        **more,
    )


def records_of(*logs: TrajectoryLog, begin: float = 0, end: float = END) -> Records:
    sources = [
        Source(path=Path("a"), lane=log.lane, worker=log.lane, role="agent_loop", rank=rank)
        for rank, log in enumerate(logs)
    ]
    return read_records(zip(sources, logs, strict=True), round(begin * MS), round(end * MS))


def causes_of(records: Records, requests: dict[str, list[Request]] | None = None) -> list[dict[str, Any]]:
    """Return the milliseconds of each trajectory by cause."""
    served = joined(
        (
            (number, id, int(records.spans.begin[number]), int(records.spans.end[number]))
            for number, id in records.spans.requests.items()
        ),
        requests or {},
    )
    pieces = trajectory_pieces(records, served)
    found: list[dict[str, float]] = [defaultdict(float) for _ in records.trajectories]
    shares = Sharing(pieces.owner, pieces.begin, pieces.end).shares()
    for owner, cause, share in zip(pieces.owner, pieces.cause, shares, strict=True):
        found[owner][pieces.causes[cause]] += share / MS
    for row, begin, end in zip(pieces.owner, pieces.begin, pieces.end, strict=True):
        of = records.trajectories[row]
        assert of.begin_ns <= begin < end <= of.end_ns
    return [{cause: pytest.approx(took) for cause, took in one.items() if took > 1e-6} for one in found]


def test_an_instant_is_of_the_innermost_span() -> None:
    """What is around it waits for it; what is in no span is the trajectory's own code."""
    spans = [
        span(0, 0, "turn", 10, 90),
        span(1, 0, "tool:search", 20, 40, parent=0),
        span(2, 0, "tool:http", 25, 30, parent=1),
    ]
    (found,) = causes_of(records_of(log_of([trajectory(0, 0, 100)], spans)))
    assert found == {OWN_CODE: 20, "turn": 60, "tool:search": 15, "tool:http": 5}


def test_what_a_trajectory_was_in_before_recording_began_is_not_its_own_code() -> None:
    """It may have been in a span that nobody knows, such as a long request; its first one ends that."""
    running = trajectory(0, -50, 100)
    (found,) = causes_of(records_of(log_of([running], [span(0, 0, "tool:a", 60, 90)])))
    assert found == {"began before the capture": 60, "tool:a": 30, OWN_CODE: 10}
    (seen,) = causes_of(records_of(log_of([trajectory(0, 0, 100)], [span(0, 0, "tool:a", 60, 90)]), begin=10))
    assert seen == {OWN_CODE: 60, "tool:a": 30}, "all of it was recorded, though the step began later"


def test_spans_side_by_side_share_their_time() -> None:
    """Two tools at once have half of it each."""
    spans = [span(0, 0, "tool:a", 0, 60), span(1, 0, "tool:b", 40, 100)]
    (found,) = causes_of(records_of(log_of([trajectory(0, 0, 100)], spans)))
    assert found == {"tool:a": 50, "tool:b": 50}


def test_what_outlives_the_span_around_it_is_still_inside_the_next() -> None:
    """A task that a tool left behind runs inside the turn that the tool was in."""
    spans = [
        span(0, 0, "turn", 0, 100),
        span(1, 0, "tool:a", 0, 50, parent=0),
        span(2, 0, "left behind", 40, 70, parent=1),
        span(3, 0, "later", 80, 90, parent=2),
    ]
    (found,) = causes_of(records_of(log_of([trajectory(0, 0, 100)], spans)))
    assert found == {"tool:a": 40, "left behind": 30, "later": 10, "turn": 20}


def request(begin: float, end: float, **marks: float) -> Request:
    times = {f"{name}_ns": round(at * MS) for name, at in marks.items()}
    return Request(
        replica=0,
        id="r",
        begin_ns=round(begin * MS),
        end_ns=round(end * MS),
        prompt_tokens=1,
        response_tokens=1,
        **times,
    )


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
            request(12, 75, first_token=30),
            {"to the engine": 2, "first token": 18, "decode": 45, "from the engine": 15},
        ),
        (request(5, 200, arrival=6, scheduled=7, first_token=8), {"decode": 80}),
        (request(200, 300), {"generate": 80}),
    ],
)
def test_a_generate_span_divides_by_its_request(made: Request, found: dict[str, float]) -> None:
    """As far as the engine tells, and inside of the span; a request at another time is none of it."""
    log = log_of([trajectory(0, 10, 90)], [span(0, 0, "generate", 10, 90, request="r")])
    assert causes_of(records_of(log), {"r": [made]}) == [found]


def test_of_several_requests_with_one_id_it_is_the_one_at_that_time() -> None:
    """Turns of a conversation may keep their id."""
    spans = [span(i, 0, "generate", 100 * i, 100 * i + 50, request="r") for i in range(3)]
    requests = {"r": [request(100 * i + 10, 100 * i + 40) for i in range(3)]}
    (found,) = causes_of(records_of(log_of([trajectory(0, 0, 250)], spans)), requests)
    assert found == {"to the engine": 30, "generate": 90, "from the engine": 30, OWN_CODE: 100}


def test_a_blocked_loop_stops_what_was_due_and_nothing_else() -> None:
    """Of five trajectories one blocks, one is in the engine, one's tool goes on, and two stand still."""
    spans = [
        span(0, 0, "tool:blocking", 100, 200),
        span(1, 1, "generate", 0, 300, request="r"),
        span(2, 2, "tool:long", 0, 300),
        span(3, 3, "tool:due", 0, 205),
        span(4, 5, "tool:due", 0, 205, loop=1),
    ]
    trajectories = [trajectory(i, 0, 300, loop=int(i == 5)) for i in range(6)]
    block = Block(0, 100 * MS, 200 * MS, 0, "Task-1", "tools.search (tools.py:3)")
    log = log_of(trajectories, spans, [block])
    found = causes_of(records_of(log), {"r": [request(0, 150, arrival=1, last_token=150)]})
    assert found[0] == {"tool:blocking": 100, OWN_CODE: 200}
    assert found[1] == {"to the engine": 1, "generate": 149, "from the engine": 150}
    assert found[2] == {"tool:long": 300}
    assert found[3] == {"tool:due": 105, LOOP_LAG: 100, OWN_CODE: 95}
    assert found[4] == {OWN_CODE: 300}
    assert found[5] == {"tool:due": 205, OWN_CODE: 95}  # on another loop


def test_a_span_that_goes_on_when_recording_ends_keeps_its_time() -> None:
    """A block just before the end of recording did not hold up what was not done by then."""
    block = Block(0, 340 * MS, 395 * MS, -1, "Task-1", "own.loop (own.py:1)")
    ended = span(0, 0, "tool:slow", 10, END)
    for slow, took in ((ended, 335), (msgspec.structs.replace(ended, open=True), 390)):
        (found,) = causes_of(records_of(log_of([trajectory(0, 0, END)], [slow], [block])))
        assert found["tool:slow"] == took


def test_blocks_in_a_row_stop_those_that_wait_for_their_own_turn() -> None:
    """Three trajectories call one blocking tool; each stands still for the blocks of the two others."""
    spans = [span(i, i, "tool:blocking", 100 + 60 * i, 160 + 60 * i) for i in range(3)]
    blocks = [Block(0, s.begin_ns, s.end_ns, s.id, "t", "f") for s in spans]
    trajectories = [trajectory(i, 0, 281) for i in range(3)]
    found = causes_of(records_of(log_of(trajectories, spans, blocks)))
    assert [one["tool:blocking"] for one in found] == [60, 60, 60]
    assert [one.get(LOOP_LAG, 0) for one in found] == [120, 120, 120]


def test_a_log_that_is_not_whole_does_not_claim_to_know() -> None:
    """Where spans were left out, time without one is unexplained."""
    (found,) = causes_of(
        records_of(log_of([trajectory(0, 0, 10)], [span(0, 0, "tool:a", 0, 4)], spans_left_out=1))
    )
    assert found == {"tool:a": 4, UNEXPLAINED: 6}


def test_what_is_outside_of_the_step_does_not_count() -> None:
    """A trajectory that began before the step, or ends after it, is clipped to it."""
    spans = [span(0, 0, "tool:a", 0, 20), span(1, 0, "tool:b", 90, 120)]
    records = records_of(log_of([trajectory(0, 0, 130), trajectory(1, 150, 160)], spans), begin=10, end=100)
    (one,) = records.trajectories
    assert (one.cut_begin, one.cut_end) == (True, True)
    assert causes_of(records) == [{"tool:a": 10, OWN_CODE: 70, "tool:b": 10}]


def by_hand(log: TrajectoryLog, of: TrajectoryRecord, held: set[int]) -> dict[str, float]:
    """Count a trajectory's milliseconds by cause; no two begins are the same."""
    mine = {s.id: s for s in log.spans if s.trajectory == of.id}
    found: dict[str, float] = defaultdict(float)
    for at in range(of.begin_ns, of.end_ns, MS):
        open_ = {id for id, s in mine.items() if s.begin_ns <= at < s.end_ns}
        around = set()
        for id in open_:
            child = id
            while (parent := mine[child].parent) in mine:
                around.add(parent)
                child = parent
        leaves = open_ - around
        for id in leaves:
            found[mine[id].name] += 1 / len(leaves)
        if not open_:
            found[OWN_CODE] += 1
    return dict(found)


@st.composite
def workloads(draw: st.DrawFn) -> TrajectoryLog:
    """Trajectories with spans in spans and beside spans, some of which outlive those that began them."""
    trajectories, spans = [], []
    begins = iter(draw(st.permutations(range(80))))
    for number in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 40))
        trajectories.append(trajectory(number, first, first + draw(st.integers(0, 60))))
        for _ in range(draw(st.integers(0, 8))):
            begin = next(begins)
            name = draw(st.sampled_from(["tool:a", "tool:b", "reward", "environment:start"]))
            earlier = [s.id for s in spans if s.trajectory == number and s.begin_ns < begin * MS]
            parent = draw(st.sampled_from([-1, *earlier]))
            spans.append(
                span(len(spans), number, name, begin, begin + draw(st.integers(0, 30)), parent=parent)
            )
    return log_of(trajectories, spans)


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_causes_are_those_that_a_count_of_instants_finds(log: TrajectoryLog) -> None:
    """They add up to the trajectory's time, none is negative, and no piece is outside of its trajectory."""
    found = causes_of(records_of(log))
    assert len(found) == len(log.trajectories)
    for one, of in zip(found, log.trajectories, strict=True):
        assert one == by_hand(log, of, set())


@settings(max_examples=100, deadline=None)
@given(
    workloads(),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 100), st.integers(0, 80), st.integers(-1, 20))),
)
def test_lag_takes_from_others_and_adds_nothing(
    log: TrajectoryLog, blocks: list[tuple[int, int, int, int]]
) -> None:
    """Whatever blocks are drawn, each trajectory's causes add up to its time."""
    log.blocks = [Block(loop, b * MS, (b + d) * MS, s, "t", "f") for loop, b, d, s in blocks]
    plain = TrajectoryLog(
        lane=log.lane,
        begin_ns=0,
        end_ns=log.end_ns,
        loops=log.loops,
        trajectories=log.trajectories,
        spans=log.spans,
    )
    for one, before, of in zip(
        causes_of(records_of(log)), causes_of(records_of(plain)), log.trajectories, strict=True
    ):
        values = {cause: took.expected for cause, took in one.items()}
        assert sum(values.values()) == pytest.approx((of.end_ns - of.begin_ns) / MS)
        for cause, took in values.items():
            assert cause == LOOP_LAG or took <= before[cause].expected + 1e-6
