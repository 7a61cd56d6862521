"""Numbers of the report: of stages, traces, requests, and of what the capture says of itself."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_logs import MS
from drawn_steps import BASE, Worker, drawn_inputs, engine, ns, report_of, whole_step
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import build_step, recordings, rewrite, rewrite_worker, with_facts
from step_outcome import printed

from verl_profiling.analysis import open_step
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import ClockAnchor, HostClock, Request, StageSpan
from verl_profiling.numbers.report_columns import CostRow, MeasureRow, ReplicaRow
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.report.exports import scalars
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report


@pytest.mark.parametrize("clock_ns", [0, 1_234_567_891])
def test_busy_is_the_time_with_an_operator_running(tmp_path: Path, clock_ns: int) -> None:
    """On CPU traces busy equals the union of top-level operators,
    whatever the host's clock says.
    """
    report = open_step(build_step(tmp_path, rank1_clock_ns=clock_ns)).report()
    for row in report.workers:
        events = json.loads(recordings()[row.name].trace)["traceEvents"]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op")
        busy, reach = 0.0, 0.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, reach))
            reach = max(reach, end)
        assert row.busy_us == pytest.approx(busy, abs=0.01 * len(spans))
        assert row.busy_us + row.idle_us == pytest.approx(row.span_us)
        assert row.span_us == pytest.approx(recorded_us(row.name))
        assert not row.device
    assert sum(kernel.self_us for kernel in report.kernels) == pytest.approx(
        sum(row.busy_us for row in report.workers), rel=1e-3
    )


def test_a_call_belongs_to_the_stage_that_it_begins_in(tmp_path: Path) -> None:
    """A stage that runs twice is one row, and outside of all stages there is one without a name."""
    stages = [("train", 1, 2), ("train", 4, 5), ("rollout", 5.5, 5.9)]
    kernels = [("mm", 0, 0.5), ("mm", 1, 3), ("mm", 4, 4.5), ("mm", 6, 6.1)]
    report = report_of(tmp_path, stages, [Worker("actor", kernels=kernels)])
    found = {(row.stage, row.name): (row.calls, row.self_us) for row in report.kernels}
    assert found == {("", "mm"): (2, 0.6e6), ("train", "mm"): (2, 2.5e6)}


def recorded_us(lane: str) -> float:
    """Return the length of torch's own span in a recording."""
    events = json.loads(recordings()[lane].trace)["traceEvents"]
    (span,) = (event for event in events if event.get("cat") == "Trace" and event["ph"] == "X")
    return span["dur"]


def test_a_discrete_capture_is_measured_where_it_recorded(tmp_path: Path) -> None:
    """Outside its windows a worker was not observed, so it is not called idle there."""
    report = open_step(build_step(tmp_path, mode="discrete", rank1_clock_ns=99)).report()
    for row in report.workers:
        assert row.span_us == pytest.approx(recorded_us(row.name))


def test_the_clocks_error_is_reported(tmp_path: Path) -> None:
    """A corrected clock comes with its bound and its drift."""
    (clock,) = open_step(build_step(tmp_path, rank1_clock_ns=1_000_000)).report().clocks
    assert (clock.host, clock.offset_ns, clock.error_ns) == ("other", 1_000_000, 2_000)
    assert clock.closing_offset_ns == 1_000_500


def durations(report: Report) -> dict[str, float]:
    return {row.name: round(row.duration_us / 1e6, 9) for row in report.stages}


def shares(report: Report) -> dict[str, float]:
    """Return the share of the step of each row."""
    return {row.name: round(row.share, 9) for row in report.stages}


def test_a_tools_start_and_stop_are_not_the_stage(tmp_path: Path) -> None:
    """A stage of 140 ms that takes 525 with its tool is one of 140."""
    tool = [("start", 1.0, 1.2, "update_actor"), ("stop", 1.34, 1.525, "update_actor")]
    stages = [("update_actor", 1.2, 1.34)]
    workers = [
        Worker("actor", rank, stages=stages, tool=tool, mode="discrete") for rank in range(2)
    ]
    report = report_of(tmp_path, [("update_actor", 1.0, 1.525), ("reward", 2, 3)], workers)
    assert durations(report) == {
        "update_actor": 0.14,
        "reward": 1.0,
        CAPTURE_CALLS: 0.385,
        OUTSIDE_STAGES: 8.475,
    }
    engine = Worker("rollout", replica=0, tool=[("stop", 4, 6, "rollout")], mode="discrete")
    report = report_of(tmp_path, [("rollout", 0, 4.5), ("update_actor", 4, 8)], [engine])
    assert durations(report) == {
        "rollout": 4.0,
        "update_actor": 3.5,
        CAPTURE_CALLS: 0.5,
        OUTSIDE_STAGES: 2.0,
    }


def test_stages_side_by_side_share_their_time(tmp_path: Path) -> None:
    """Half of a second belongs to each of two;
    a nested stage is in the row of the one around it.
    """
    stages = [("rollout", 0, 6), ("update_actor", 4, 9), ("mini_batch", 5, 6, 1)]
    report = report_of(tmp_path, stages, [])
    assert durations(report) == {
        "rollout": 6.0,
        "update_actor": 5.0,
        "mini_batch": 1.0,
        OUTSIDE_STAGES: 1.0,
    }
    assert shares(report) == {
        "rollout": 0.5,
        "update_actor": 0.4,
        "mini_batch": 0.1,
        OUTSIDE_STAGES: 0.1,
    }
    stages = [("rollout", 0, 4), ("update_actor", 3, 9), ("mini_batch", 5, 6, 1), ("reward", 9, 10)]
    report = report_of(tmp_path, stages, [])
    assert [(span.name, span.row, span.depth) for span in report.gantt] == [
        ("rollout", 0, 0),
        ("update_actor", 1, 0),
        ("mini_batch", 1, 1),
        ("reward", 0, 0),
    ]


SPANS = st.tuples(
    st.sampled_from("abcd"), st.integers(-2, 12), st.integers(0, 6), st.sampled_from((0, 0, 1))
)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(SPANS, min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 4), st.sampled_from("abx")), max_size=4),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 4)), max_size=3),
)
def test_outermost_rows_add_up_to_the_step(
    stages: list[tuple[str, int, int, int]],
    tool: list[tuple[int, int, str]],
    calls: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(
            "actor", tool=[("stop", a, a + b, stage) for a, b, stage in tool], mode="discrete"
        )
        report = report_of(
            Path(folder),
            [(name, a, a + b, depth) for name, a, b, depth in stages],
            [worker],
            calls=[("stop_capture", a, a + b) for a, b in calls],
        )
    assert sum(row.share for row in report.stages if row.depth == 0) == pytest.approx(1.0)
    assert all(0 <= row.share * report.span_us <= row.duration_us + 1e-3 for row in report.stages)


def test_a_stage_of_the_worker_alone_counts_where_it_must_be_waited_for(tmp_path: Path) -> None:
    actor = Worker(
        "actor",
        tool=[("start", 0, 1, "compute_ref"), ("stop", 6, 7, "compute_ref")],
        mode="discrete",
    )
    report = report_of(
        tmp_path, [("ref_log_prob", 0, 4), ("update_actor", 5, 8), ("rollout", 5, 9)], [actor]
    )
    assert durations(report)["ref_log_prob"] == 3.0
    assert durations(report)[CAPTURE_CALLS] == 1.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a step in which actor rank 0 recorded two numbers."""
    folder = with_facts(build_step(tmp_path_factory.mktemp("run")))
    return open_step(folder).report()


def test_workers_have_their_numbers_and_cost(report: Report) -> None:
    """A number of no stage has none."""
    assert report.measures == [
        MeasureRow(
            worker="actor_rank0", stage="update_actor", name="process_peak_rss_bytes", value=3e9
        ),
        MeasureRow(worker="actor_rank0", stage="", name="throughput", value=2.0),
    ]
    costs = {row.worker: row for row in report.costs}
    assert costs["actor_rank0"] == CostRow(worker="actor_rank0", start_s=0.25, stop_s=1.5)


def test_numbers_are_shown_in_their_units(report: Report) -> None:
    """On the terminal; TensorBoard marks the step and has the largest of the workers."""
    shown = printed(report)
    assert re.search(r"actor_rank0 +update_actor +process_peak_rss_bytes +3 GB", shown)
    assert re.search(r"actor_rank0 +250 ms +1.50 s\b", shown)
    found = dict(scalars(report))
    assert found["profiled"] == 1
    assert found["peak/update_actor/process_peak_rss_bytes"] == 3e9
    assert found["peak/throughput"] == 2


@pytest.mark.parametrize(
    ("elapsed_s", "ahead_ms", "noted"),
    [
        (10, 250.0, True),
        (10, -250.0, True),
        (10, 0.5, False),
        (100, 50.0, False),
        (0.001, 0.9, False),
    ],
    ids=["forward", "back", "within a millisecond", "slewed by NTP", "short"],
)
def test_a_clock_that_was_set_is_noted(
    elapsed_s: float, ahead_ms: float, noted: bool, tmp_path: Path
) -> None:
    """Unix time that ran apart from monotonic time during the capture puts a lane
    in the wrong place.
    """
    folder = build_step(tmp_path)
    elapsed, ahead = round(elapsed_s * 1e9), round(ahead_ms * 1e6)
    anchors = [ClockAnchor(10**18, 500), ClockAnchor(10**18 + elapsed + ahead, 500 + elapsed)]
    rewrite_worker(folder, "actor_rank0", anchors=anchors)
    notes = [note for note in open_step(folder).report().notes if "clock of" in note]
    assert [f"set by {ahead_ms:+.0f} ms " in note for note in notes] == [True] * noted


KNOWN = {"worker", "replica", "requests", "failed", "validation"}


def request(**changes: Any) -> Request:
    """Return a request of 100 ms: 10 on the way, 20 queued, 30 prefill, 35 decode,
    5 on the way back.
    """
    times = {"begin_ns": 0, "arrival_ns": 10, "scheduled_ns": 30}
    times |= {"first_token_ns": 60, "last_token_ns": 95, "end_ns": 100}
    ms = {name: changes.get(name, at) for name, at in times.items()}
    ns = {name: 0 if at is None else BASE + at * MS for name, at in ms.items()}
    facts = {"prompt_tokens": 8, "response_tokens": 8, "cached_tokens": 2, "preemptions": 0}
    return Request(**{"replica": 0, "id": "r", **facts, **changes, **ns})


def replicas(folder: Path, *served: Request) -> list[ReplicaRow]:
    drawn_inputs(folder, [("rollout", 0, 10)], [Worker("rollout", replica=0)])
    rewrite_worker(folder, "rollout0", requests=list(served))
    return open_step(folder).report().replicas


def test_validation_behind_the_step_is_no_part_of_its_rollout(tmp_path: Path) -> None:
    """One-step-off trainers of verl validate before the capture stops."""
    spans = [(1, 3), (11, 12)]
    requests = [(1, 3, 4), (11, 12, 9)]
    served = engine(0, *spans, requests=requests, recorded=(0.0, 13.0))
    drawn_inputs(tmp_path, [("rollout", 0, 4), ("update_actor", 4, 10)], [served])
    rewrite(tmp_path, around_the_step=[StageSpan("validate", ns(10.5), ns(12.5))])
    report = open_step(tmp_path).report()
    [replica], [row], [work] = report.replicas, report.engines, report.work
    assert (replica.requests, replica.validation) == (1, 1)
    assert (row.iterations, row.finish_us) == (1, 3e6)
    assert (work.samples, work.tokens, work.duration_us) == (1, 14, 2e6)
    assert report.tail is not None
    assert (report.tail.requests, report.tail.last_finish_us) == (1, 3e6)


@pytest.mark.parametrize(
    ("changes", "to_first", "per_token"),
    [
        ({"last_token_ns": None}, 60_000, 40_000 / 7),
        ({"first_token_ns": None}, None, None),
        ({"response_tokens": 1}, 60_000, None),
        ({"response_tokens": 0}, 60_000, None),
    ],
)
def test_times_by_token_are_of_what_is_known(
    changes: dict[str, Any], to_first: float | None, per_token: float | None, tmp_path: Path
) -> None:
    """Without the engine's last token the response's end counts;
    one token has no time behind it.
    """
    [row] = replicas(tmp_path, request(**changes))
    assert (row.to_first_token_p50_us, row.per_token_p50_us) == (to_first, per_token)


def test_a_replica_has_its_percentiles_and_its_sums(tmp_path: Path) -> None:
    """Times are of whole requests, cached tokens and preemptions of all."""
    served = [
        request(first_token_ns=60 + number, last_token_ns=95 + number, end_ns=200)
        for number in range(100)
    ]
    served += [request(failed=True, first_token_ns=99, cached_tokens=8, preemptions=3)]
    [row] = replicas(tmp_path, *served)
    assert (row.worker, row.requests, row.failed, row.preemptions) == ("rollout0", 101, 1, 3)
    assert (row.queued_p50_us, row.queued_p99_us) == (20_000, 20_000)
    assert (row.to_first_token_p50_us, row.to_first_token_p99_us) == pytest.approx(
        (109_500, 158_010)
    )
    assert row.per_token_p50_us == row.per_token_p99_us == 5_000
    assert row.cache_hit_share == pytest.approx((100 * 2 + 8) / (101 * 8))
    assert (
        "rollout0: 1 of 101 requests failed or were aborted" in open_step(tmp_path).report().notes
    )


def test_what_the_engine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    """It is not zero, and requests that tell are not thinned by those that do not."""
    told = request(cached_tokens=4)
    unknown = {"arrival_ns": 0, "scheduled_ns": 0, "first_token_ns": 0, "last_token_ns": 0}
    silent = msgspec.structs.replace(told, **unknown, cached_tokens=None, preemptions=None)
    [row] = replicas(tmp_path, silent, silent)
    found = {name for name, value in msgspec.structs.asdict(row).items() if value is None}
    assert found == {*ReplicaRow.__struct_fields__} - KNOWN
    [row] = replicas(tmp_path, told, silent)
    assert (row.cache_hit_share, row.preemptions, row.queued_p50_us) == (0.5, 0, 20_000)
    assert replicas(tmp_path) == []


def test_the_page_leaves_out_a_queue_that_is_not_known(tmp_path: Path) -> None:
    report = whole_step(tmp_path / "step_000001", ranks=2, replicas=2)
    unknown = dict.fromkeys(("queued_p50_us", "queued_p99_us"))
    silent = [msgspec.structs.replace(row, **unknown) for row in report.replicas]
    page = render_html(msgspec.structs.replace(report, replicas=silent))
    assert "queued p99" not in page
    assert 'id="replicas"' not in render_html(msgspec.structs.replace(report, replicas=[]))


def test_requests_are_on_the_clock_of_the_controller(tmp_path: Path) -> None:
    drawn_inputs(tmp_path, [], [Worker("rollout", replica=0)])
    far = WorkerIdentity(role="rollout", replica=0, host="far", clock_domain="far")
    rewrite_worker(tmp_path, "rollout0", identity=far, requests=[request()])
    rewrite(tmp_path, clocks=[HostClock(host="far", clock_domain="far", offset_ns=4 * MS)])
    [row] = open_step(tmp_path).to_frame("requests").to_dict("records")
    assert [row[f"{name}_us"] for name in ("begin", "arrival", "end")] == [-4_000, 6_000, 96_000]
    assert (row["to_first_token_us"], row["per_token_us"]) == (60_000, 5_000)
