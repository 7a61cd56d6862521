"""Pauses of Python's garbage collector: real collections of a heap that takes long enough."""

from __future__ import annotations

import gc
from pathlib import Path
from time import perf_counter, sleep

import pytest
from example_loops import read_trace, settings

from verl_profiling import ProfilingCallback
from verl_profiling.analysis import open_step
from verl_profiling.clock import now_ns
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import CaptureResult
from verl_profiling.testing import record_step
from verl_profiling.workers import AgentLoopCaptureMixin

SPANS = settings(tool="spans")


@pytest.fixture(scope="module")
def heap() -> list[list[object]]:
    """Objects that a collection passes in 50 ms or more."""
    found: list[list[object]] = []
    took = 0.0
    while took < 0.05:
        found += ([found] for _ in range(200_000))
        begin = perf_counter()
        gc.collect()
        took = perf_counter() - begin
    return found


def test_a_long_collection_is_a_pause_of_the_capture(heap: list[object], tmp_path: Path) -> None:
    """With begin and end, on the timeline, and no stage;
    before and after a capture nothing listens.
    """
    before = list(gc.callbacks)
    gc.collect()
    with record_step(SPANS, tmp_path) as recorded:
        assert len(gc.callbacks) == len(before) + 1
        begin_ns = now_ns()
        gc.collect()
        end_ns = now_ns()
    assert gc.callbacks == before
    result = recorded.result
    assert isinstance(result, CaptureResult)
    (pause,) = [one for one in result.pauses if begin_ns <= one.begin_ns <= one.end_ns <= end_ns]
    assert pause.name == "gc"
    assert pause.end_ns - pause.begin_ns >= 10_000_000
    assert not result.stages


def test_loop_and_agent_loop_record_their_own(heap: list[object], tmp_path: Path) -> None:
    """Each in its part of the manifest, in a captured step alone; ``merge`` draws both."""
    before = list(gc.callbacks)
    callback = ProfilingCallback(
        {**SPANS.to_dict(), "save_path": str(tmp_path), "schedule": {"steps": [2]}}
    )
    agents = AgentLoopCaptureMixin()
    agents.init_capture(callback.config)
    with callback as profiling:
        profiling.add_workers("agent_loop", [agents])
        for step in (1, 2):
            profiling.on_step_begin(step)
            assert (gc.callbacks != before) == (step == 2)
            gc.collect()
            profiling.on_step_end()
    assert gc.callbacks == before
    folder = tmp_path / "step_000002"
    manifest = read_manifest(folder)
    (worker,) = manifest.workers
    assert worker.pauses
    assert {span.name for span in (*manifest.pauses, *worker.pauses)} == {"gc"}
    events = read_trace(open_step(folder).merge(folder / "timeline.json.gz").path)["traceEvents"]
    drawn = {event["pid"] for event in events if event.get("cat") == "pause"}
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(titles[pid] for pid in drawn) == ["agent_loop_rank0", "controller"]


def test_the_watch_sums_them_in_every_step(heap: list[object], tmp_path: Path) -> None:
    """Once for a process, in ``watch.jsonl`` and for trackers, until training ends."""
    before = list(gc.callbacks)
    given = {"save_path": str(tmp_path), "watch": {"enable": True}, "schedule": {"steps": []}}
    with ProfilingCallback({"enable": True, **given}) as profiling:
        for step in (1, 2, 3):
            profiling.on_step_begin(step)
            if step == 2:
                gc.collect()
            sleep(0.05)  # the watch sums by slices of 20 ms
            profiling.on_step_end()
    assert gc.callbacks == before
    spans = {
        line.step: {total.name: total for total in line.spans}
        for line in WatchLogReader(tmp_path).read()
    }
    assert spans[2]["gc"].runs >= 1
    assert spans[2]["gc"].seconds >= 0.01
