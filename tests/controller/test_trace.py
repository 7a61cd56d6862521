"""The controller's trace: stages, calls and every worker's stages on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from example_loops import read_trace
from hypothesis import given
from hypothesis import strategies as st

from verl_profiling.controller.trace import write_controller_trace
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, HostClock, Manifest, Rpc, StageSpan

BASE_NS = 1_800_000_000_123_456_789


def manifest(**parts: Any) -> Manifest:
    """Return a manifest of a step that begins at ``BASE_NS``."""
    return Manifest(
        run_id="run",
        capture_id="run-1",
        step=3,
        steps=[3],
        begin_ns=BASE_NS,
        end_ns=BASE_NS + 10_000_000,
        controller=WorkerIdentity(role="controller", host="h", pid=7),
        **parts,
    )


def written(folder: Path, described: Manifest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the trace; return it, and its complete events."""
    write_controller_trace(folder, described)
    trace = read_trace(folder / "controller.trace.json.gz")
    return trace, [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    """Return the names of processes or threads."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == kind
    }


def test_stages_calls_and_workers_have_named_lanes(tmp_path: Path) -> None:
    """The controller is a process, each worker is one; each worker's calls are a thread."""
    actors = [
        CaptureResult(
            identity=WorkerIdentity(role="actor", rank=rank),
            stages=[StageSpan("update_actor", BASE_NS + 2000, BASE_NS + 3000)],
        )
        for rank in (0, 1)
    ]
    trace, events = written(
        tmp_path,
        manifest(
            stages=[StageSpan("update_actor", BASE_NS + 1000, BASE_NS + 4000)],
            rpcs=[
                Rpc("actor_rank0", "start_capture", BASE_NS, BASE_NS + 10),
                Rpc("actor_rank1", "start_capture", BASE_NS, BASE_NS + 20, ok=False),
                Rpc("actor_rank0", "stop_capture", BASE_NS + 5000, BASE_NS + 5010),
            ],
            workers=actors,
        ),
    )
    assert list(names(trace, "process_name").values()) == ["controller", "actor_rank0", "actor_rank1"]
    assert set(names(trace, "thread_name").values()) == {"stages", "rpc actor_rank0", "rpc actor_rank1"}
    assert trace["verl_profiling"] == {"run_id": "run", "capture_id": "run-1", "step": 3}
    calls = [(e["name"], e["args"]["worker"], e["args"]["ok"]) for e in events if e["cat"] == "rpc"]
    assert calls == [
        ("start_capture", "actor_rank0", True),
        ("start_capture", "actor_rank1", False),
        ("stop_capture", "actor_rank0", True),
    ]
    assert [e["pid"] for e in events if e["cat"] == "stage"] == [1, 2, 3]


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """They are relative to the base, never absolute microseconds in a double."""
    trace, [event] = written(
        tmp_path, manifest(stages=[StageSpan("reward", BASE_NS + 1_234_567, BASE_NS + 2_234_568)])
    )
    assert trace["baseTimeNanoseconds"] == BASE_NS
    assert round(event["ts"] * 1000) == 1_234_567
    assert round(event["dur"] * 1000) == 1_000_001


def test_calls_before_the_step_have_positive_times(tmp_path: Path) -> None:
    """The base is the earliest call, which opened the capture before the step began."""
    trace, [call] = written(
        tmp_path, manifest(rpcs=[Rpc("actor_rank0", "start_capture", BASE_NS - 5000, BASE_NS)])
    )
    assert trace["baseTimeNanoseconds"] == BASE_NS - 5000
    assert (call["ts"], call["dur"]) == (0, 5)


def test_a_workers_clock_is_corrected(tmp_path: Path) -> None:
    """Its spans are put on the controller's clock; those of other workers stay."""
    far = WorkerIdentity(role="actor", rank=1, clock_domain="far")
    offset = 3_600_000_000_000
    _, events = written(
        tmp_path,
        manifest(
            clocks=[HostClock(host="far", clock_domain="far", offset_ns=offset)],
            workers=[
                CaptureResult(
                    identity=far, stages=[StageSpan("a", BASE_NS + offset + 2000, BASE_NS + offset + 3000)]
                ),
                CaptureResult(
                    identity=WorkerIdentity(role="actor"),
                    stages=[StageSpan("b", BASE_NS + 2000, BASE_NS + 3000)],
                ),
            ],
        ),
    )
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [("a", 2, 1), ("b", 2, 1)]


def test_what_runs_beside_a_stage_has_a_lane_of_its_own(tmp_path: Path) -> None:
    """An update in the time of a rollout beside it is not drawn inside; its own mini-batch is."""
    stages = [
        StageSpan("rollout", BASE_NS, BASE_NS + 9000),
        StageSpan("update_actor", BASE_NS + 1000, BASE_NS + 5000),
        StageSpan("mini_batch", BASE_NS + 1000, BASE_NS + 5000, depth=1),
        StageSpan("advantage", BASE_NS + 6000, BASE_NS + 7000),
    ]
    trace, events = written(tmp_path, manifest(stages=stages))
    assert {event["name"]: event["tid"] for event in events} == {
        "rollout": 1,
        "update_actor": 2,
        "mini_batch": 2,
        "advantage": 2,
    }
    assert set(names(trace, "thread_name").values()) == {"stages", "stages 2"}


def test_a_failed_stage_is_marked(tmp_path: Path) -> None:
    """What raised can be found in the timeline."""
    _, [event] = written(tmp_path, manifest(stages=[StageSpan("a", BASE_NS, BASE_NS + 1000, failed=True)]))
    assert event["args"] == {"failed": True}


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from("abc")), min_size=1, max_size=12
    )
)
def test_spans_on_one_thread_nest_or_follow_each_other(intervals: list[tuple[int, int, str]]) -> None:
    """Overlapping stages of threads and tasks get lanes of their own, and none is lost."""
    import tempfile

    stages = [
        StageSpan(name, BASE_NS + begin * 1000, BASE_NS + (begin + length) * 1000)
        for begin, length, name in intervals
    ]
    with tempfile.TemporaryDirectory() as folder:
        _, events = written(Path(folder), manifest(stages=stages))
    assert sorted((e["name"], e["ts"], e["dur"]) for e in events) == sorted(
        (name, begin, length) for begin, length, name in intervals
    )
    for one in events:
        for other in events:
            if one is not other and one["tid"] == other["tid"]:
                first, second = sorted((one, other), key=lambda e: (e["ts"], -e["dur"]))
                first_end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
                assert first_end <= second["ts"] or second_end <= first_end
