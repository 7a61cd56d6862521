"""``diff`` says what changed, by how much, and whether that is more than the noise."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from step_folders import build_step

from verl_profiling.analysis import load_reports
from verl_profiling.errors import TraceFormatError
from verl_profiling.report.build import build_report
from verl_profiling.report.diff import Diff, compare, print_diff
from verl_profiling.report.model import Report, StageRow
from verl_profiling.timeline.inputs import find_steps


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a real step."""
    (inputs,) = find_steps(build_step(tmp_path_factory.mktemp("run")))
    return build_report(inputs)


def with_stage(report: Report, seconds: float, step_seconds: float = 10.0) -> Report:
    """Return the report with one stage of a given duration."""
    row = StageRow(name="update_actor", runs=1, begin_us=0, duration_us=seconds * 1e6, share=0.1)
    return msgspec.structs.replace(report, stages=[row], span_us=step_seconds * 1e6)


def stage(diff: Diff) -> msgspec.Struct:
    """Return the change of the stage."""
    (change,) = (change for change in diff.changes if change.kind == "stage")
    return change


def test_nothing_changes_between_a_step_and_itself(report: Report) -> None:
    """Every number is compared, and none differs."""
    diff = compare([report], [report])
    assert {change.kind for change in diff.changes} == {"step", "stage", "worker", "lost", "op"}
    assert all(change.change_s == 0 for change in diff.changes)
    assert diff.slower_than(0.0) == []


def test_a_slower_stage_fails_above_the_limit(report: Report) -> None:
    """20 % more is above 5 % and below 25 %."""
    diff = compare([with_stage(report, 1.0)], [with_stage(report, 1.2)])
    assert stage(diff).change == pytest.approx(0.2)
    assert [change.name for change in diff.slower_than(0.05)] == ["update_actor"]
    assert diff.slower_than(0.25) == []


def test_a_faster_stage_does_not_fail(report: Report) -> None:
    """Only slower is a finding."""
    assert compare([with_stage(report, 1.2)], [with_stage(report, 1.0)]).slower_than(0.0) == []


def test_noise_excuses_a_change(report: Report) -> None:
    """Steps between 0.8 s and 1.2 s: a median of 1.1 s is within the noise, one of 1.5 s is not."""
    before = [with_stage(report, seconds) for seconds in (0.8, 1.0, 1.2)]
    slightly = compare(before, [with_stage(report, 1.1)] * 2)
    clearly = compare(before, [with_stage(report, 1.5)] * 2)
    assert stage(slightly).noise_s == pytest.approx(0.2)
    assert slightly.slower_than(0.05) == []
    assert [change.name for change in clearly.slower_than(0.05)] == ["update_actor"]


def test_a_tiny_stage_cannot_fail(report: Report) -> None:
    """Below 1 % of the step a stage is not what CI should stop for."""
    assert compare([with_stage(report, 0.01)], [with_stage(report, 0.09)]).slower_than(0.05) == []


def test_what_only_one_side_has_is_shown(report: Report) -> None:
    """A new stage has no share, and counts as slower."""
    diff = compare([msgspec.structs.replace(report, stages=[], span_us=1e7)], [with_stage(report, 1.0)])
    assert (stage(diff).before_s, stage(diff).after_s, stage(diff).change) == (None, 1.0, None)
    assert [change.name for change in diff.slower_than(0.05)] == ["update_actor"]


def test_reports_and_runs_can_be_loaded(tmp_path: Path, report: Report) -> None:
    """A saved report and a run of two steps."""
    saved = tmp_path / "report.json"
    saved.write_bytes(msgspec.json.encode(report))
    assert load_reports(saved) == [report]
    for step in (1, 2):
        build_step(tmp_path / "run", step=step)
    assert [loaded.step for loaded in load_reports(tmp_path / "run")] == [1, 2]
    saved.write_text("{}")
    with pytest.raises(TraceFormatError, match="not a report"):
        load_reports(saved)


def test_the_table_fits_100_columns(report: Report) -> None:
    """Changes are printed with their sign."""
    text = io.StringIO()
    print_diff(compare([with_stage(report, 1.0)], [with_stage(report, 1.2)]), Console(file=text))
    assert "+20.0%" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 100
