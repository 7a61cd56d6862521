"""Self time is duration less nested calls, on each thread by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from drawn_steps import Worker, report_of
from step_folders import recordings

from verl_profiling.report import intervals
from verl_profiling.report.intervals import nested_times


@pytest.mark.parametrize("length", [1, 7, 1 << 16])
def test_self_times_of_a_real_trace_add_up(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """On each thread they add up to the time with any operator running, however they are sliced."""
    monkeypatch.setattr(intervals, "_SLICE", length)
    events = [
        e for e in json.loads(recordings()["actor_rank0"].trace)["traceEvents"] if e.get("cat") == "cpu_op"
    ]
    base = min(event["ts"] for event in events)
    spans = np.array([[round((e["ts"] - base) * 1000), 0] for e in events], np.int64)
    spans[:, 1] = spans[:, 0] + [round(e["dur"] * 1000) for e in events]
    threads = np.array([e["tid"] for e in events], np.int64)
    own = nested_times(spans, threads)
    for thread in np.unique(threads):
        covered, reach = 0, 0
        for begin, end in sorted(spans[threads == thread].tolist()):
            covered += max(0, end - max(begin, reach))
            reach = max(reach, end)
        assert own[threads == thread].sum() == pytest.approx(covered, abs=2 * len(events))
        assert (own >= -2).all()


def test_a_call_belongs_to_the_stage_that_it_begins_in(tmp_path: Path) -> None:
    """A stage that runs twice is one row, and outside of all stages there is one without a name."""
    stages = [("train", 1, 2), ("train", 4, 5), ("rollout", 5.5, 5.9)]
    kernels = [("mm", 0, 0.5), ("mm", 1, 3), ("mm", 4, 4.5), ("mm", 6, 6.1)]
    report = report_of(tmp_path, stages, [Worker("actor", kernels=kernels)])
    found = {(row.stage, row.name): (row.calls, row.self_us) for row in report.kernels}
    assert found == {("", "mm"): (2, 0.6e6), ("train", "mm"): (2, 2.5e6)}
