"""What the loop did around the step is on every face, and no part of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_steps import Worker, ns, report_of
from step_folders import rewrite
from step_outcome import csv_rows, printed

from verl_profiling.analysis import open_step
from verl_profiling.manifest import StageSpan
from verl_profiling.report.diff import compare
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report

OUTSIDE = [
    StageSpan("capture_start", ns(-0.5), ns(0)),
    StageSpan("capture_stop", ns(10), ns(13.2)),
    StageSpan("write", ns(13), ns(13.2), depth=1),
    StageSpan("validate", ns(14), ns(20)),
    StageSpan("reward", ns(15), ns(16), depth=1),
    StageSpan("validate", ns(21), ns(27)),
]
WORKERS = [
    Worker("actor", stages=[("update_actor", 5, 9)], kernels=[("gemm", 5, 8.5)]),
    Worker("rollout", replica=0, kernels=[("decode", 0.5, 3)]),
    Worker("rollout", replica=1, kernels=[("decode", 0.5, 4)]),
]
STAGES = [("rollout", 0, 5), ("update_actor", 5, 9)]


def reported(folder: Path, outside: list[StageSpan]) -> Report:
    """Return the report of the drawn step with what was done around it."""
    folder.mkdir(exist_ok=True)
    report_of(folder, STAGES, WORKERS)
    rewrite(folder, outside=outside)
    return open_step(folder).report()


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return reported(tmp_path / "step", OUTSIDE)


def test_pauses_and_stages_around_the_step_are_rows_on_every_face(report: Report, tmp_path: Path) -> None:
    """A stage inside of another one is no row."""
    rows = {row.name: row for row in report.outside}
    assert list(rows) == ["capture_start", "capture_stop", "validate"]
    assert (rows["validate"].runs, rows["validate"].duration_us) == (2, 12e6)
    assert report.pause_us == pytest.approx(3.7e6)
    table = " ".join(printed(report).partition("Outside")[2].split())
    assert "capture_stop 1 3.20 s validate 2 12.0 s" in table
    assert '<td class="n" data-v="1.2e+07">12.0 s</td>' in render_html(report)
    assert csv_rows(tmp_path, report, table="outside")[1]["duration_us"] == "3200000.0"


def test_a_long_pause_is_a_finding_with_what_to_do(report: Report, tmp_path: Path) -> None:
    """From a quarter of the step on; it comes last."""
    finding = report.findings[-1]
    assert finding.rule == "pause"
    assert finding.text == (
        "The loop waited 3.70 s before and after the step (37% of its time) "
        "for the capture to start and stop."
    )
    short = [StageSpan("capture_stop", ns(10), ns(12.4))]
    assert all(finding.rule != "pause" for finding in reported(tmp_path / "short", short).findings)


def test_diff_compares_pauses_and_validation(report: Report, tmp_path: Path) -> None:
    """Each is a number of its own; a longer pause is no slower step."""
    longer = [*OUTSIDE[:1], StageSpan("capture_stop", ns(10), ns(20))]
    diff = compare([report], [reported(tmp_path / "longer", longer)])
    changes = {change.name: change.change_s for change in diff.changes if change.kind == "outside"}
    assert changes == {
        "capture_start": 0.0,
        "capture_stop": pytest.approx(6.8),
        "validate": pytest.approx(-12),
    }
    assert diff.slower_than(0.01) == []
