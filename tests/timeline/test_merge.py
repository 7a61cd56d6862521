"""The timeline holds every event, on one clock, with names, order and arrows."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_folders import (
    WORKERS,
    build_step,
    read_events,
    recordings,
    rewrite,
    rewrite_worker,
    unix_ns,
)

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import StageSpan, ToolSpan
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.step import Keep
from verl_profiling.timeline.merge import MergeResult, merge, stage_windows

CLOCK_NS = 1_234_567_891


def merged(folder: Path, **options: object) -> tuple[MergeResult, list[dict]]:
    """Merge a folder that holds one step and return the result and the timeline's events."""
    (inputs,) = find_steps(folder)
    result = merge(inputs, **options)
    return result, read_events(result.path)


def process_names(events: list[dict]) -> dict[int, str]:
    """Return the name of each process of a timeline."""
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_every_event_is_in_the_timeline(tmp_path: Path, mode: str) -> None:
    """Nothing but the old names of processes is lost; added are what the manifest says,
    and arrows.
    """
    folder = build_step(tmp_path, mode=mode)
    manifest = read_manifest(folder)
    stages = [*manifest.stages, *(span for worker in manifest.workers for span in worker.stages)]
    drawn = Counter(
        [("X", span.name) for span in stages] + [("X", rpc.method) for rpc in manifest.rpcs]
    )
    result, events = merged(folder)
    inputs = Counter(
        (event["ph"], event["name"])
        for path in folder.glob("*.json.gz")
        if path.name != "timeline.json.gz"
        for event in read_events(path)
        if event["ph"] != "M"
    )
    arrows = {("s", "causes"): 3, ("f", "causes"): 3}
    assert Counter(
        (e["ph"], e["name"]) for e in events if e["ph"] != "M"
    ) == inputs + drawn + Counter(arrows)
    assert result.events == sum(inputs.values()) + len(stages) + len(manifest.rpcs) + 6


def test_times_differ_by_the_hosts_offset_and_by_nothing_else(tmp_path: Path) -> None:
    """With a host 1.234567891 s ahead, each event lands on the controller's clock
    to the nanosecond.
    """
    folder = build_step(tmp_path, rank1_clock_ns=CLOCK_NS)
    result, events = merged(folder)
    base = json.loads(gzip.decompress(result.path.read_bytes()))["baseTimeNanoseconds"]
    names = process_names(events)
    for lane in WORKERS:
        pids = {pid for pid, name in names.items() if name.split()[0] == lane}
        found: dict[str, list[int]] = {}
        for event in events:
            if event["pid"] in pids and event["ph"] == "X" and event.get("cat") != "stage":
                found.setdefault(event["name"], []).append(base + round(event["ts"] * 1000))
        expected = unix_ns(recordings()[lane].trace)
        assert {name: sorted(times) for name, times in found.items()} == {
            name: sorted(times) for name, times in expected.items()
        }


DAY_NS = 24 * 3600 * 10**9


@settings(max_examples=25, deadline=None)
@given(
    begins=st.lists(
        st.tuples(st.integers(0, DAY_NS), st.integers(0, 2**40)), min_size=1, max_size=20
    ),
    begin_ns=st.integers(0, 92 * DAY_NS),
    base_ns=st.integers(10**18, 2**60),
)
def test_every_time_is_exact_whatever_the_base(
    tmp_path_factory: pytest.TempPathFactory,
    begins: list[tuple[int, int]],
    begin_ns: int,
    base_ns: int,
) -> None:
    """Times since a quarter begins become times of the timeline, to the nanosecond;
    flows stay apart.
    """
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    times = [(begin_ns + ns, number) for ns, number in begins]
    texts = (
        f'{{"ph":"s","id":{number},"cat":"c","name":"n","pid":1,"tid":1,'
        f'"ts":{ns // 1000}.{ns % 1000:03}}}'
        for ns, number in times
    )
    path.write_text(f'{{"baseTimeNanoseconds":{base_ns},"traceEvents":[{",".join(texts)}]}}')
    text = gzip.decompress(open_step(path).merge().path.read_bytes())
    timeline = json.loads(text, parse_float=Decimal)
    events = [event for event in timeline["traceEvents"] if event["ph"] == "s"]
    found = [timeline["baseTimeNanoseconds"] + event["ts"] * 1000 for event in events]
    assert found == [base_ns + ns for ns, _ in times]
    assert len({event["id"] for event in events}) == len({number for _, number in times})


def test_lanes_are_named_sorted_and_hold_valid_events(tmp_path: Path) -> None:
    """The controller first, ranks, then engines; stages lie in the process of the operators."""
    _, events = merged(build_step(tmp_path))
    names = process_names(events)
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    lanes = list(
        dict.fromkeys(names[pid].split()[0] for pid in sorted(names, key=order.__getitem__))
    )
    assert lanes == ["controller", *WORKERS]
    assert {event["pid"] for event in events} == names.keys()
    stages = {names[e["pid"]] for e in events if e["ph"] == "X" and e.get("cat") == "stage"}
    assert stages == {"controller", *WORKERS}
    assert {names[e["pid"]] for e in events if e.get("cat") == "cpu_op"} == set(WORKERS)
    needed = {"X": {"name", "ts", "dur"}, "i": {"name", "ts", "s"}, "M": {"name", "args"}}
    needed |= {phase: {"name", "cat", "id", "ts"} for phase in "stf"}
    for event in events:
        assert needed[event["ph"]] | {"pid", "tid"} <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event.get("dur", 0) >= 0
        assert event.get("ts", 0) >= 0


def test_arrows_lead_from_the_controllers_stage_into_the_workers(tmp_path: Path) -> None:
    """Each arrow begins with a stage of the controller and ends with the same stage of a worker."""
    _, events = merged(build_step(tmp_path, rank1_clock_ns=CLOCK_NS))
    names = process_names(events)
    stages = {
        (e["pid"], e["tid"], e["ts"]): e["name"]
        for e in events
        if e["ph"] == "X" and e.get("cat") == "stage"
    }
    starts = {e["id"]: e for e in events if e["name"] == "causes" and e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["name"] == "causes" and e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    led_to = set()
    for number, start in starts.items():
        end = ends[number]
        stage = stages[start["pid"], start["tid"], start["ts"]]
        assert stages[end["pid"], end["tid"], end["ts"]] == stage
        assert start["ts"] <= end["ts"]
        assert names[start["pid"]] == "controller"
        led_to.add((names[end["pid"]], stage))
    assert led_to == {
        ("actor_rank0", "update_actor"),
        ("actor_rank1", "update_actor"),
        ("rollout0_rank0", "rollout"),
    }


def test_stages_that_cross_get_threads_of_their_own(tmp_path: Path) -> None:
    """In an asynchronous loop one stage begins in another and outlives it;
    slices on a thread must nest.
    """
    folder = build_step(tmp_path)
    begin = read_manifest(folder).begin_ns
    spans = [
        ("rollout", 0, 10, 0),
        ("inner", 1, 2, 1),
        ("update_actor", 5, 15, 0),
        ("update_weights", 12, 20, 0),
    ]
    rewrite(
        folder,
        stages=[
            StageSpan(name, begin + a * 1000, begin + b * 1000, depth=d) for name, a, b, d in spans
        ],
    )
    _, events = merged(folder)
    names = process_names(events)
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    rows = {
        e["name"]: threads[e["pid"], e["tid"]]
        for e in events
        if e["ph"] == "X" and e.get("cat") == "stage" and names[e["pid"]] == "controller"
    }
    assert rows == {
        "rollout": "stages",
        "inner": "stages",
        "update_actor": "stages 2",
        "update_weights": "stages",
    }


def test_a_tools_start_and_stop_have_a_lane(tmp_path: Path) -> None:
    """In the worker's process, on a thread of their own, with the stage that was recorded."""
    folder = build_step(tmp_path, rank1_clock_ns=CLOCK_NS)
    manifest = read_manifest(folder)
    begin = manifest.begin_ns + CLOCK_NS
    tool = [
        ToolSpan("start", begin - 9_000, begin, "s"),
        ToolSpan("stop", begin + 5_000, begin + 7_000),
    ]
    rewrite_worker(folder, "actor_rank1", tool_spans=tool)
    result, events = merged(folder)
    base = json.loads(gzip.decompress(result.path.read_bytes()))["baseTimeNanoseconds"]
    names = process_names(events)
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    shown = [e for e in events if e.get("cat") == "capture"]
    assert {(names[e["pid"]], threads[e["pid"], e["tid"]]) for e in shown} == {
        ("actor_rank1", "tool")
    }
    assert [(e["name"], e["dur"], e["args"]) for e in shown] == [
        ("start of the tool", 9.0, {"stage": "s"}),
        ("stop of the tool", 2.0, {}),
    ]
    assert base + round(shown[0]["ts"] * 1000) == manifest.begin_ns - 9_000


@pytest.mark.parametrize(
    "number", ["5", "1704161511434171181", '"717259538431"', "-1", '"\\ud800"']
)
def test_flow_ids_of_any_kind_stay_apart(tmp_path: Path, number: str) -> None:
    """Of a large number or a text, as torch_npu writes them, both ends get one id,
    exact as a double.
    """
    ends = ",".join(
        f'{{"ph":"{phase}","name":"n","cat":"c","id":{number},"pid":1,"tid":1,"ts":1}}'
        for phase in "sf"
    )
    for rank in range(2):
        text = f'{{"baseTimeNanoseconds":1,"traceEvents":[{ends}]}}'
        (tmp_path / f"rank{rank}.json").write_text(text)
    _, events = merged(tmp_path)
    ids = Counter(event["id"] for event in events if event["ph"] in "sf")
    assert sorted(ids.values()) == [2, 2]
    assert all(isinstance(number, int) and number < 1 << 53 for number in ids)


def test_two_processes_write_the_same_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many processes merge does not show in the result."""
    (inputs,) = find_steps(build_step(tmp_path))
    alone = merge(inputs, tmp_path / "alone.json.gz").path
    monkeypatch.setattr("verl_profiling.steps.parallel_reads._SPAWN_BYTES", 0)
    together = merge(inputs, tmp_path / "together.json.gz", jobs=2).path
    assert together.read_bytes() == alone.read_bytes()


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    """As joined files are, and timelines: ``check`` and ``merge`` read them to their end."""
    text = recordings()["actor_rank0"].trace.encode()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(text[:9_999]) + gzip.compress(text[9_999:]))
    result, events = merged(path)
    names = {event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"}
    assert names <= {event["name"] for event in events}
    assert result.problems == []
    assert main(["check", str(path), str(result.path)]) == 0


def test_what_is_raw_or_left_out_is_told(tmp_path: Path) -> None:
    """A raw file of a pending artifact is read; a slimmed timeline says how much it lacks."""
    folder = build_step(tmp_path)
    whole, _ = merged(folder)
    path = folder / "actor_rank0.torch.json.gz"
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    result, _ = merged(folder)
    assert result.events == whole.events
    result, events = merged(folder, keep=Keep(min_us=50.0))
    assert 0 < result.left_out == sum(member.left_out for member in result.members)
    assert result.events + result.left_out == whole.events
    operators = [event["dur"] for event in events if event.get("cat") == "cpu_op"]
    assert min(operators) >= 50.0
    result, events = merged(folder, max_bytes=whole.bytes // 2)
    assert result.path.stat().st_size <= whole.bytes // 2
    assert max(operators) in {event["dur"] for event in events if event.get("cat") == "cpu_op"}
    (inputs,) = find_steps(folder)
    result, events = merged(folder, keep=Keep(windows_ns=stage_windows(inputs, ["rollout"])))
    kept = {member.path.name.partition(".")[0]: member.events for member in result.members}
    assert kept["rollout0_rank0"] > 100 > 10 > kept["actor_rank1"]


HOST, DEVICE = 4242, 1
ARROW = {
    "ph": "f",
    "cat": "ac2g",
    "name": "ac2g",
    "pid": DEVICE,
    "tid": 7,
    "ts": 5.0,
    "id": 1,
    "bp": "e",
}
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "gemm",
    "pid": DEVICE,
    "tid": 7,
    "ts": 5.0,
    "dur": 2.0,
}
OPERATOR = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": HOST,
    "tid": 9,
    "ts": 1.0,
    "dur": 3.0,
}
CANN = {"ph": "X", "name": "AscendCL@aclnnMatmul", "pid": 77, "tid": 9, "ts": 1.5, "dur": 1.0}


def labelled(pid: int, label: str, name: str = "python") -> list[dict[str, Any]]:
    """Return the metadata that kineto writes of a process."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_labels",
            "pid": pid,
            "tid": 0,
            "ts": 0,
            "args": {"labels": label},
        },
    ]


def merged_names(folder: Path, events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the name of the process of each named event of a merged trace."""
    trace = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(trace))
    (inputs,) = find_steps(folder)
    merged = read_events(merge(inputs, folder / "timeline.json.gz").path)
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    return {e["name"]: names[e["pid"]] for e in merged if e["ph"] in "Xf"}


@pytest.mark.parametrize(
    "events",
    [
        [ARROW, KERNEL, OPERATOR],
        [KERNEL, OPERATOR, ARROW],
        [CANN, OPERATOR, ARROW, KERNEL],
        [{**OPERATOR, "ph": "i"}, ARROW, OPERATOR, KERNEL],
    ],
)
def test_the_first_event_of_a_process_does_not_name_it(
    events: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An arrow that ends on a device, or a process of calls,
    may come before the host's own events.
    """
    names = merged_names(tmp_path, events)
    assert names["gemm"] == names["ac2g"] == "worker_rank0 GPU 1"
    assert names["aten::mm"] == "worker_rank0"
    assert names.get("AscendCL@aclnnMatmul", "worker_rank0 77") == "worker_rank0 77"


def test_a_device_has_the_name_of_its_label(tmp_path: Path) -> None:
    """Whatever the accelerator is and whatever its number:
    texts for processes are none of the host.
    """
    work = {**KERNEL, "cat": "mtia_ccp_events"}
    names = merged_names(tmp_path, [*labelled(DEVICE, "MTIA 1", "MTIA 1"), OPERATOR, work])
    assert names == {"gemm": "worker_rank0 MTIA 1", "aten::mm": "worker_rank0"}
    own = {**OPERATOR, "cat": "overhead", "pid": -1, "name": "Activity Buffer Request"}
    names = merged_names(
        tmp_path, [{**KERNEL, "pid": "[TP00] 0"}, own, {**OPERATOR, "cat": "", "pid": 9}]
    )
    assert names["gemm"] == "worker_rank0 [TP00] 0"
    assert "-1" not in names["Activity Buffer Request"]


def test_names_have_a_bounded_length(tmp_path: Path) -> None:
    """Metadata that repeats counts once, and a name of any length is cut where nobody reads on."""
    other = {**OPERATOR, "pid": 88, "cat": "", "name": "call"}
    names = merged_names(tmp_path, [OPERATOR, other, *(labelled(88, "CPU", "x" * 5000) * 100)])
    assert names["call"].startswith("worker_rank0 xxx")
    assert len(names["call"]) == 120
    repeated = merged_names(tmp_path, [OPERATOR, other, *(labelled(88, "CPU", "CANN") * 100)])
    assert repeated["call"] == "worker_rank0 CANN CPU"


def test_a_process_is_not_told_by_its_device(tmp_path: Path) -> None:
    """Two processes of one rank, each of which names its device first, are two lanes."""
    for pid in (1001, 1002):
        about = [*labelled(DEVICE, "GPU 1"), *labelled(pid, "CPU"), {**OPERATOR, "pid": pid}]
        trace = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": about}
        (tmp_path / f"part{pid}.json").write_text(json.dumps(trace))
    (inputs,) = find_steps(tmp_path)
    assert [source.lane for source in inputs.sources] == ["worker_rank0", "worker_rank0.2"]


def test_a_trace_without_a_base_is_reduced_to_a_size(tmp_path: Path) -> None:
    """Its times begin at 0, and the timeline's clock does not begin before that."""
    brief = [{**OPERATOR, "ts": float(at), "dur": 0.25} for at in range(3)]
    (tmp_path / "rank0.json").write_text(
        json.dumps({"traceEvents": [*brief, {**OPERATOR, "dur": 2e7}]})
    )
    _, events = merged(tmp_path, max_bytes=1)
    assert [event["dur"] for event in events if event["ph"] == "X"] == [2e7]


def test_long_events_are_never_dropped_for_the_size(tmp_path: Path) -> None:
    """Also where no smaller limit fits the wanted size."""
    long = [{**OPERATOR, "ts": 3e7 * at, "dur": 2e7} for at in range(3)]
    (tmp_path / "rank0.json").write_text(
        json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": [OPERATOR, *long]})
    )
    _, events = merged(tmp_path, max_bytes=1)
    assert [event["dur"] for event in events if event["ph"] == "X"] == [2e7] * 3
