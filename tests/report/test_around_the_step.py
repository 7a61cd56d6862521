"""What the loop did around the step is on every face, and no part of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_steps import Worker, ns, report_of
from step_folders import rewrite
from step_outcome import csv_rows, printed

from verl_profiling.analysis import open_step
from verl_profiling.manifest import Rpc, StageSpan
from verl_profiling.report.diff import compare
from verl_profiling.report.files import scalars
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
CALLS = [
    Rpc("actor_rank0", "start_capture", ns(-0.4), ns(-0.1)),
    Rpc("actor_rank0", "stop_capture", ns(10), ns(11)),
    Rpc("rollout0", "stop_capture", ns(10), ns(11.5)),
    Rpc("rollout1", "stop_capture", ns(10.1), ns(12.9)),
]
WORKERS = [
    Worker("actor", stages=[("update_actor", 5, 9)], kernels=[("gemm", 5, 8.5)]),
    Worker("rollout", replica=0, kernels=[("decode", 0.5, 3)]),
    Worker("rollout", replica=1, kernels=[("decode", 0.5, 4)]),
]
STAGES = [("rollout", 0, 5), ("update_actor", 5, 9)]


def reported(folder: Path, outside: list[StageSpan], calls: list[Rpc] = CALLS) -> Report:
    """Return the report of the drawn step with what was done around it."""
    folder.mkdir(exist_ok=True)
    report_of(folder, STAGES, WORKERS)
    rewrite(folder, outside=outside, rpcs=calls)
    return open_step(folder).report()


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return reported(tmp_path / "step", OUTSIDE)


def test_pauses_and_stages_around_the_step_are_rows_on_every_face(report: Report, tmp_path: Path) -> None:
    """A pause has the time until each role's slowest answer, and writing; a stage has the stages in it."""
    rows = {row.name: row for row in report.outside}
    assert list(rows) == ["capture_start", "capture_stop", "validate"]
    assert rows["capture_start"].parts == {"actor": pytest.approx(0.3)}
    assert rows["capture_stop"].parts == {
        "rollout": pytest.approx(2.9),
        "actor": pytest.approx(1.0),
        "write": pytest.approx(0.2),
    }
    assert list(rows["capture_stop"].parts) == ["rollout", "actor", "write"]
    assert (rows["validate"].runs, rows["validate"].duration_us) == (2, 12e6)
    assert rows["validate"].parts == {"reward": 1.0}
    assert report.pause_us == pytest.approx(3.7e6)
    assert report.capture_us == pytest.approx(3.7e6)
    shown = printed(report)
    table = " ".join(shown.partition("Outside")[2].split())
    assert "capture_stop 1 3.20 s rollout 2.90 s actor 1.00 s write 200 ms" in table
    assert "validate 2 12.0 s reward 1" in table
    assert '<td class="n" data-v="12">12.0 s</td>' in render_html(report)
    found = csv_rows(tmp_path, report, table="outside")
    assert found[1]["parts"] == "rollout 2.9; actor 1; write 0.2"
    numbers = dict(scalars(report))
    assert numbers["pause_s"] == pytest.approx(3.7)
    assert numbers["outside/validate_s"] == pytest.approx(12)


def test_a_long_pause_is_a_finding_with_what_to_do(report: Report, tmp_path: Path) -> None:
    """From a quarter of the step on; it names the role that was waited for longest, and comes last."""
    finding = report.findings[-1]
    assert finding.rule == "pause"
    assert finding.text == (
        "The loop waited 3.70 s around the step (37% of it) for the capture to start and stop, longest for "
        "rollout (2.90 s)."
    )
    assert "rollout.count" in finding.advice
    short = [StageSpan("capture_stop", ns(10), ns(12.4))]
    assert all(finding.rule != "pause" for finding in reported(tmp_path / "short", short).findings)
    alone = [StageSpan("capture_stop", ns(10), ns(12.6))]
    assert reported(tmp_path / "alone", alone, []).findings[-1].text.endswith("to start and stop.")


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
