"""The ``npu`` tool: its options anywhere, and captures with the real torch_npu
where it is installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.npu import artifacts_of, outcomes_of
from verl_profiling import ToolUnavailableError
from verl_profiling.steps.check import check
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.trace import Trace
from verl_profiling.timeline.merge import merge
from verl_profiling.workers import CaptureMixin

Outcome = dict[str, Any]


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None,
    reason="torch_npu is installed: it can be imported",
)
def test_without_torch_npu_it_says_what_to_install() -> None:
    with pytest.raises(ToolUnavailableError, match="pip install torch_npu"):
        CaptureMixin().init_capture({"enable": True, "tool": "npu"}, role="actor")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Build the stand-in CANN, run every scenario, and return what came out."""
    log = tmp_path_factory.mktemp("log") / "cann"
    found = outcomes_of("scenarios", tmp_path_factory, CANN_STUB_LOG=str(log))
    return {**found, "mstx": log.read_text().splitlines()}


@pytest.mark.npu
@pytest.mark.timeout(900)
class TestRealTorchNpu:
    """What the real torch_npu and its real parser do in our hands."""

    def test_a_whole_step(self, outcomes: Outcome) -> None:
        """In e2e mode one analysed folder per worker and step is in the manifest, and is whole."""
        outcome = outcomes["e2e_with_callback"]
        [worker] = outcome["manifest"]["workers"]
        assert artifacts_of(worker) == [("actor_rank3.npu", "ok")]
        assert [span["name"] for span in worker["stages"]] == ["update_actor"]
        result = check(Path(outcome["folder"]))
        assert result.ok, result.artifacts

    def test_the_timeline_reads_what_the_parser_wrote(self, outcomes: Outcome) -> None:
        """Its trace_view.json is on the worker's lane, inside of the step,
        with our stage around the ops.
        """
        folder = Path(outcomes["e2e_with_callback"]["folder"])
        [step] = find_steps(folder)
        [source] = step.sources
        assert (source.lane, source.path.name) == ("actor_rank3", "trace_view.json")
        merged = merge(step, folder / "merged.json.gz")
        assert not merged.problems
        trace = Trace(source.path)
        events = [event for chunk in trace.chunks() for event in chunk if event.ph == "X"]
        [stage] = [event for event in events if event.name == "update_actor"]
        inside = [event for event in events if event.name == "aten::matmul"]
        assert len(inside) == 4
        for op in inside:
            assert stage.ts <= op.ts <= stage.ts + stage.dur
        span = outcomes["e2e_with_callback"]["manifest"]["workers"][0]["stages"][0]
        begin_ns = trace.base_ns + round(stage.ts * 1000)
        assert abs(begin_ns - span["begin_ns"]) < 50_000_000, (
            "the parser's clock is the session's clock"
        )

    def test_each_stage_apart(self, outcomes: Outcome) -> None:
        """In discrete mode each run of a stage has its own folder, and all are analysed."""
        assert artifacts_of(outcomes["discrete"]) == [
            ("actor_rank0.old_log_prob.npu", "ok"),
            ("actor_rank0.update_actor.npu", "ok"),
            ("actor_rank0.update_actor.2.npu", "ok"),
        ]

    def test_what_failed_is_said(self, outcomes: Outcome) -> None:
        """An unwritable folder, no data of a device,
        and an analysis that was ended at its deadline.
        """
        [artifact] = outcomes["device_asked_for"]["artifacts"]
        assert artifact["status"] == "empty"
        assert "no device data" in artifact["reason"]
        assert "CANN Profiling data does not exist" in artifact["reason"]
        [artifact] = outcomes["unwritable"]["artifacts"]
        assert artifact["status"] == "failed"
        assert "step/actor_rank0.update_actor.npu" in artifact["reason"]
        [artifact] = outcomes["analysis_too_slow"]["artifacts"]
        assert artifact["status"] == "failed"
        assert "took longer than tools.npu.analysis_s=0.5; raw data is kept" in artifact["reason"]

    def test_windows_threads_levels_and_ranges(self, outcomes: Outcome) -> None:
        """Mini-batches, a stop from another thread, every level and metric,
        and mstx ranges of our domain.
        """
        assert {"verl_profiling", "update_actor", "end"} <= set(outcomes["mstx"])
        assert outcomes["mstx"].count("end") == outcomes["mstx"].count("update_actor")
        assert artifacts_of(outcomes["mini_batches"]) == [("actor_rank0.npu", "ok")]
        assert artifacts_of(outcomes["stop_on_another_thread"]) == [("actor_rank0.npu", "ok")]
        assert outcomes["levels_and_metrics"] == {"taken": 20, "changed": []}

    def test_recorders_of_others_are_left_alone(self, outcomes: Outcome) -> None:
        """Torch's own profiler and the user's torch_npu: we refuse,
        and they keep their data and folder.
        """
        outcome = outcomes["beside_torch_profiler"]
        assert outcome["message"].startswith("CaptureStateError: actor_rank0: another profiler")
        assert not outcome["open"]
        assert outcome["ops"] > 0
        outcome = outcomes["own_profiler_running"]
        assert outcome["message"].startswith("CaptureStateError: actor_rank0: another profiler")
        assert len(outcome["own_data"]) == 1
        assert outcome["own_data"][0] > 0

    def test_the_memory_tool_beside_it(self, outcomes: Outcome) -> None:
        """The tool drives torch_npu's own allocator history, and leaves it off afterwards."""
        outcome = outcomes["memory"]
        assert (outcome["recording"], outcome["recording_after"]) == (True, False)
        assert outcome["keys"] == ["device_traces", "segments"]
        assert artifacts_of(outcome["result"]) == [
            ("actor_rank0.npu", "ok"),
            ("actor_rank0.memory.pickle", "ok"),
        ]
        # if the stage took a millisecond
        of_the_process = "stage/update_actor/process_peak_rss_bytes"
        assert set(outcome["result"]["metrics"]) - {of_the_process} == {
            "memory/allocated_bytes",
            "memory/reserved_bytes",
            "stage/update_actor/peak_allocated_bytes",
            "stage/update_actor/peak_reserved_bytes",
        }

    def test_the_memory_tool_by_stage(self, outcomes: Outcome) -> None:
        """In discrete mode each stage has a snapshot of its own."""
        assert artifacts_of(outcomes["memory_by_stage"]) == [
            ("actor_rank0.old_log_prob.memory.pickle", "ok"),
            ("actor_rank0.update_actor.memory.pickle", "ok"),
        ]
