"""``diff`` says what changed, by how much, and whether that is more than the noise."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary
from rich.console import Console
from step_folders import build_step

from verl_profiling.analysis import load_reports, open_step
from verl_profiling.cli import main
from verl_profiling.errors import TraceFormatError
from verl_profiling.numbers.report_columns import LostRow, StageRow
from verl_profiling.report.diff import Diff, compare, print_diff
from verl_profiling.report.model import Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return open_step(build_step(tmp_path_factory.mktemp("run"))).report()


def with_stage(report: Report, seconds: float, step_seconds: float = 10.0) -> Report:
    """Return the report with one stage of a given duration."""
    row = StageRow(name="update_actor", runs=1, begin_us=0, duration_us=seconds * 1e6, share=0.1)
    return msgspec.structs.replace(report, stages=[row], span_us=step_seconds * 1e6)


def stage(diff: Diff) -> msgspec.Struct:
    (change,) = (change for change in diff.changes if change.kind == "stage")
    return change


@pytest.mark.parametrize(
    ("before", "after", "step_s", "share", "fails"),
    [
        (1.0, 1.2, 10.0, 0.05, True),
        (1.0, 1.2, 10.0, 0.25, False),
        (0.010, 0.022, 0.1, 0.05, True),
        (0.010, 0.018, 0.1, 0.05, False),  # the floor, in seconds
        (0.01, 0.09, 10.0, 0.05, False),  # below 1% of the step
    ],
)
def test_a_slower_stage_fails_above_the_limits(
    report: Report, before: float, after: float, step_s: float, share: float, fails: bool
) -> None:
    """Of its share, and of seconds; a tiny stage is not what CI should stop for."""
    diff = compare([with_stage(report, before, step_s)], [with_stage(report, after, step_s)])
    assert stage(diff).change_share == pytest.approx(after / before - 1)
    assert [change.name for change in diff.slower_than(share)] == ["update_actor"] * fails


def test_noise_excuses_a_change(report: Report) -> None:
    """Of steps between 0.8 s and 1.2 s; a stage that a step does not have took no time in it."""
    before = [with_stage(report, seconds) for seconds in (0.8, 1.0, 1.2)]
    slightly = compare(before, [with_stage(report, 1.1)] * 2)
    clearly = compare(before, [with_stage(report, 1.5)] * 2)
    assert stage(slightly).noise_s == pytest.approx(0.2)
    assert slightly.slower_than(0.05) == []
    assert [change.name for change in clearly.slower_than(0.05)] == ["update_actor"]
    assert "medians of 3 steps before and 2 after" in clearly.basis
    without = msgspec.structs.replace(report, stages=[], span_us=1e7)
    diff = compare([without, without, with_stage(report, 4.0)], [with_stage(report, 4.0)] * 3)
    assert (stage(diff).before_s, stage(diff).after_s, stage(diff).noise_s) == (0.0, 4.0, 2.0)
    assert stage(diff).change_share is None


def test_a_lane_that_a_step_does_not_have_was_not_recorded(report: Report) -> None:
    """Its median is over the steps that do."""
    fewer = msgspec.structs.replace(report, workers=report.workers[:1])
    busy = {row.name: row.busy_us / 1e6 for row in report.workers}
    diff = compare([report, fewer, fewer], [report] * 2)
    lanes = {change.name: change for change in diff.changes if change.kind == "worker"}
    assert {name: change.before_s for name, change in lanes.items()} == busy
    assert (lanes["actor_rank0"].noise_s, lanes["actor_rank1"].noise_s) == (0.0, None)


def test_reports_and_runs_can_be_loaded(tmp_path: Path, report: Report) -> None:
    saved = tmp_path / "report.json"
    saved.write_bytes(msgspec.json.encode(report))
    assert load_reports(saved) == [report]
    for step in (1, 2):
        build_step(tmp_path / "run", step=step)
    assert [loaded.step for loaded in load_reports(tmp_path / "run")] == [1, 2]
    saved.write_text("{}")
    with pytest.raises(TraceFormatError, match="not a report"):
        load_reports(saved)


def printed(diff: Diff, width: int) -> str:
    """Return what a terminal of this width shows."""
    text = io.StringIO()
    print_diff(diff, Console(file=text, force_terminal=True, color_system=None, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_the_terminal(report: Report, width: int) -> None:
    """Changes are printed with their sign, numbers in one piece,
    and what is not shown is counted.
    """
    longer = [
        msgspec.structs.replace(row, name=f"{row.name}<{'x' * 99}>") for row in report.kernels
    ]
    diff = compare(
        [with_stage(report, 0.001), with_stage(report, 0.001)],
        [msgspec.structs.replace(with_stage(report, 0.0012), kernels=[*report.kernels, *longer])]
        * 2,
    )
    text = printed(diff, width)
    assert re.search(r"update_actor +1\.00 ms +1\.20 ms +\+200 us +\+20\.0% +±0 s", text)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert "…" in text
    more = sum(change.kind == "kernel" for change in diff.changes) - 12
    assert f"{more:,} more, with smaller changes" in text


def test_what_fails_says_what_it_rests_on(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit, the floor, the change with its largest cause and the basis;
    with JSON on standard error.
    """
    sides = []
    for name, seconds, lost_s in (("report-a.json", 1.0, 2.0), ("report-b.json", 1.1, 3.0)):
        sides.append(str(tmp_path / name))
        lost = [LostRow(cause="straggler_wait", seconds=lost_s, share=0.1)]
        made = msgspec.structs.replace(with_stage(report, seconds), lost=lost)
        (tmp_path / name).write_bytes(msgspec.json.encode(made))
    assert main(["diff", *sides, "--fail-above", "5%"]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == (
        "slower by more than 5% and 10.0 ms: update_actor (+100 ms, +10%); most by straggler wait "
        "(+1.00 s, +50%) (1 step(s) before and 1 after; the noise is unknown, because only "
        "several steps on "
        "both sides show it)"
    )
    assert main(["diff", *sides, "--fail-above", "5%", "--json"]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines() == [line]
    assert len(msgspec.json.decode(output.out, type=Diff).changes) > 40
    assert main(["diff", *sides, "--fail-above", "20%"]) == 0
    assert "slower by more than 20% and 10.0 ms: nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("captured_s", "is_said"), [(9.0, True), (11.0, False)])
def test_captures_that_changed_the_other_way_are_not_believed(
    report: Report, captured_s: float, is_said: bool
) -> None:
    """The watch has every step; a capture may have been requested because its step was slow."""
    sides = [
        [msgspec.structs.replace(with_stage(report, 1.0, seconds), directory=f"/{run}/step_000001")]
        for run, seconds in (("a", 10.0), ("b", captured_s))
    ]
    logs = [
        [[summary(step, {"update_actor": milliseconds}) for step in range(20)]]
        for milliseconds in (1000.0, 1900.0)
    ]
    diff = compare(sides[0], sides[1], logged=(logs[0], logs[1]))
    sentence = (
        "the 20 and 20 steps of the watch changed by +900 ms, and the 1 and 1 captured ones by "
        "-1.00 s: believe the watch; the parts and the tables of captures are of these steps only"
    )
    assert (sentence in " ".join(printed(diff, 100).split())) == is_said
    kinds = {change.kind for change in diff.slower_than(0.25)}
    assert kinds == ({"watch"} if is_said else set())


@pytest.mark.parametrize("value", ["nan", "-1", "much"])
def test_a_limit_is_a_number_that_can_be_exceeded(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["diff", "a", "b", f"--fail-above={value}"])
    assert left.value.code == 2
    assert f"argument --fail-above: {value!r} is not a " in capsys.readouterr().err
