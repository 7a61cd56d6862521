"""The report's numbers are those of the recorded stages and of the traces."""

from __future__ import annotations

import json
from pathlib import Path

import drawn_steps
import pytest
from step_folders import build_step, recordings

from verl_profiling.analysis import open_step
from verl_profiling.report.model import Report


def report_of(path: Path) -> Report:
    """Return the report of a folder with one step."""
    return open_step(path).report()


@pytest.mark.parametrize("clock_ns", [0, 1_234_567_891])
def test_busy_is_the_time_with_an_operator_running(tmp_path: Path, clock_ns: int) -> None:
    """On CPU traces busy equals the union of top-level operators, whatever the host's clock says."""
    report = report_of(build_step(tmp_path, rank1_clock_ns=clock_ns))
    for row in report.workers:
        events = json.loads(recordings()[row.name].trace)["traceEvents"]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op")
        busy, reach = 0.0, 0.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, reach))
            reach = max(reach, end)
        assert row.busy_us == pytest.approx(busy, abs=0.01 * len(spans))
        assert row.busy_us + row.idle_us == pytest.approx(row.span_us)
        assert row.span_us == pytest.approx(report.span_us)
        assert not row.device
    assert sum(kernel.self_us for kernel in report.kernels) == pytest.approx(
        sum(row.busy_us for row in report.workers), rel=1e-3
    )


def test_a_call_belongs_to_the_stage_that_it_begins_in(tmp_path: Path) -> None:
    """A stage that runs twice is one row, and outside of all stages there is one without a name."""
    stages = [("train", 1, 2), ("train", 4, 5), ("rollout", 5.5, 5.9)]
    kernels = [("mm", 0, 0.5), ("mm", 1, 3), ("mm", 4, 4.5), ("mm", 6, 6.1)]
    report = drawn_steps.report_of(tmp_path, stages, [drawn_steps.Worker("actor", kernels=kernels)])
    found = {(row.stage, row.name): (row.calls, row.self_us) for row in report.kernels}
    assert found == {("", "mm"): (2, 0.6e6), ("train", "mm"): (2, 2.5e6)}


def test_a_discrete_capture_is_measured_where_it_recorded(tmp_path: Path) -> None:
    """Outside its windows a worker was not observed, so it is not called idle there."""
    report = report_of(build_step(tmp_path, mode="discrete", rank1_clock_ns=99))
    for row in report.workers:
        recording = recordings()[row.name]
        assert row.span_us == pytest.approx((recording.end_ns - recording.begin_ns) / 1000)


def test_the_clocks_error_is_reported(tmp_path: Path) -> None:
    """A corrected clock comes with its bound and its drift."""
    (clock,) = report_of(build_step(tmp_path, rank1_clock_ns=1_000_000)).clocks
    assert (clock.host, clock.offset_ns, clock.error_ns) == ("other", 1_000_000, 2_000)
    assert clock.closing_offset_ns == 1_000_500
