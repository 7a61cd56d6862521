"""Terminal, page, CSV, data frames and TensorBoard hold the tables of the report,
all of them alike.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_logs import DrawnLog
from drawn_steps import Worker, ns, report_of, whole_step
from step_folders import build_step, rewrite, rewrite_worker
from step_outcome import csv_rows, printed

from tests.report.test_limit import QWEN, write_run
from verl_profiling.analysis import load_reports, open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.files.trajectory_log import Counted
from verl_profiling.manifest import StageSpan, ToolSpan, Work
from verl_profiling.report.diff import compare
from verl_profiling.report.exports import write_csv, write_tensorboard
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.tables import TABLES


def test_every_table_is_on_every_face(tmp_path: Path) -> None:
    """With its title or its file, and as many rows as the JSON has, which comes back as it was."""
    folder = tmp_path / "step_000001"
    whole_step(folder, ranks=4, replicas=2, fault="slow rank")
    log = DrawnLog(end=13)
    for sample in range(2):
        log.trajectory(0, 4 - sample, ("tool:<b>[red]", 1, 2), min_version=4, max_version=5)
    log.trajectory(0, 3, group="h", status="failed", error="it broke")
    log.block(1, 2, 0, "tools.search (tools.py:3)")
    log.log.counts.append(Counted("queue", log.ns(1), 3))
    log.add_to(folder)
    suspects = {"suspects": ["actor_rank2"], "peers": ["actor_rank0"]}
    trigger = Trigger(kind="anomaly", sign="leader", stage="update_actor", **suspects)
    rewrite(
        folder,
        policy_version=5,
        trigger=trigger,
        around_the_step=[StageSpan("validate", ns(14), ns(16))],
    )
    write_run(tmp_path, {"model": QWEN})
    work = Work(
        samples=4, tokens=100, tokens_squared=2500, lessons={"": {"equal rewards": 25, "": 75}}
    )
    rewrite_worker(
        folder,
        "actor_rank0",
        stages=[StageSpan("update_actor", ns(8), ns(9), work=work)],
        metrics={"throughput": 2.0},
        tool_spans=[ToolSpan("start", ns(-1), ns(0))],
    )
    step = open_step(folder)
    report = step.report()
    text, page = printed(report), render_html(report)
    write_csv([report], tmp_path)
    for table in TABLES.values():
        rows = table.rows(report)
        assert rows, table.name
        assert len(csv_rows(tmp_path, table=table.name)) == len(rows)
        assert len(step.to_frame(table.name)) == len(rows)
        if table.rows_shown(report):  # else there is nothing to compare
            assert f"\n{table.title}" in text
            assert f'<section id="{table.title.lower().replace(" ", "-")}"' in page
    assert "<b>[red]" in text
    assert "<b>[red]" not in page
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_tensorboard_has_scalars_in_one_run(tmp_path: Path) -> None:
    """TensorBoard's own reader finds a point per step under ``profiling/``, and no sub-run."""
    for step in (3, 4):
        build_step(tmp_path / "run", step=step)
    reports, curves = load_reports(tmp_path / "run"), tmp_path / "curves"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_tensorboard(reports, curves)
    assert [path.name for path in curves.iterdir() if path.is_dir()] == []
    loaded = accumulator.EventAccumulator(str(curves)).Reload()
    tags = loaded.Tags()
    assert all(tag.startswith("profiling/") for tag in tags["scalars"])
    assert {
        "profiling/step_s",
        "profiling/stage/update_actor_s",
        "profiling/lost/unexplained_s",
    } <= set(tags["scalars"])
    points = loaded.Scalars("profiling/step_s")
    assert [(point.step, point.value) for point in points] == [
        (report.step, pytest.approx(report.span_us / 1e6)) for report in reports
    ]


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
    rewrite(folder, around_the_step=outside)
    return open_step(folder).report()


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return reported(tmp_path / "step", OUTSIDE)


def test_what_the_loop_did_around_the_step_is_on_every_face(report: Report, tmp_path: Path) -> None:
    """A stage inside of another one is no row;
    a pause of a quarter of the step is the last finding.
    """
    rows = {row.name: row for row in report.around_the_step}
    assert list(rows) == ["capture_start", "capture_stop", "validate"]
    assert (rows["validate"].runs, rows["validate"].duration_us) == (2, 12e6)
    assert report.pause_us == pytest.approx(3.7e6)
    table = " ".join(printed(report).partition("Around the step")[2].split())
    assert "capture_stop 1 3.20 s validate 2 12.0 s" in table
    assert ' data-v="1.2e+07">12.0 s</td>' in render_html(report)
    assert csv_rows(tmp_path, report, table="around_the_step")[1]["duration_us"] == "3200000.0"
    assert report.findings[-1].text == (
        "The loop waited 3.70 s before and after the step (37% of its time) "
        "for the capture to start and stop."
    )
    short = [StageSpan("capture_stop", ns(10), ns(12.4))]
    assert all(finding.rule != "pause" for finding in reported(tmp_path / "short", short).findings)


def test_diff_compares_pauses_and_validation(report: Report, tmp_path: Path) -> None:
    """Each is a number of its own; a longer pause is no slower step."""
    longer = [*OUTSIDE[:1], StageSpan("capture_stop", ns(10), ns(20))]
    diff = compare([report], [reported(tmp_path / "longer", longer)])
    changes = {change.name: change.change_s for change in diff.changes if change.kind == "around"}
    assert changes == {
        "capture_start": 0.0,
        "capture_stop": pytest.approx(6.8),
        "validate": pytest.approx(-12),
    }
    assert diff.slower_than(0.01) == []
