"""What the capture says of itself: peaks and cost, in the model and on every face."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from step_folders import build_step, rewrite_worker, with_facts
from step_outcome import printed

from verl_profiling.analysis import open_step
from verl_profiling.manifest import ClockAnchor
from verl_profiling.report.columns import CostRow, MeasureRow
from verl_profiling.report.files import scalars
from verl_profiling.report.model import Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a step in which actor rank 0 recorded two numbers."""
    folder = with_facts(build_step(tmp_path_factory.mktemp("run")))
    return open_step(folder).report()


def test_workers_have_their_numbers_and_cost(report: Report) -> None:
    """A number of no stage has none."""
    assert report.measures == [
        MeasureRow(worker="actor_rank0", stage="update_actor", name="process_peak_rss_bytes", value=3e9),
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
    [(10, 250.0, True), (10, -250.0, True), (10, 0.5, False), (100, 50.0, False), (0.001, 0.9, False)],
    ids=["forward", "back", "within a millisecond", "slewed by NTP", "short"],
)
def test_a_clock_that_was_set_is_noted(
    elapsed_s: float, ahead_ms: float, noted: bool, tmp_path: Path
) -> None:
    """Unix time that ran apart from monotonic time during the capture puts a lane in the wrong place."""
    folder = build_step(tmp_path)
    elapsed, ahead = round(elapsed_s * 1e9), round(ahead_ms * 1e6)
    anchors = [ClockAnchor(10**18, 500), ClockAnchor(10**18 + elapsed + ahead, 500 + elapsed)]
    rewrite_worker(folder, "actor_rank0", anchors=anchors)
    notes = [note for note in open_step(folder).report().notes if "clock of" in note]
    assert [f"set by {ahead_ms:+.0f} ms " in note for note in notes] == [True] * noted
