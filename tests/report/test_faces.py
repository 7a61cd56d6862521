"""Terminal, page, CSV, data frames and TensorBoard hold the tables of the report, all of them alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_logs import DrawnLog
from drawn_steps import ns, whole_step
from step_folders import build_step, rewrite, rewrite_worker
from step_outcome import csv_rows, printed

from verl_profiling.analysis import load_reports, open_step
from verl_profiling.capture_request import Trigger
from verl_profiling.manifest import ClockAnchor, StageSpan
from verl_profiling.report.files import write_tensorboard
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.tables import TABLES
from verl_profiling.trajectory_log import Counted


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    run = tmp_path_factory.mktemp("run")
    for step in (3, 4):
        build_step(run, step=step)
    return load_reports(run)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a step that has something to say in every table."""
    folder = tmp_path_factory.mktemp("run") / "step_000001"
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
    rewrite(folder, policy_version=5, trigger=trigger, outside=[StageSpan("validate", ns(14), ns(16))])
    rewrite_worker(
        folder,
        "actor_rank0",
        metrics={"throughput": 2.0},
        anchors=[ClockAnchor(ns(0), 5), ClockAnchor(ns(9), 9 * 10**9)],
    )
    return folder


def test_every_table_is_on_every_face(filled: Path, tmp_path: Path) -> None:
    """With its title or its file, and as many rows as the JSON has, which comes back as it was."""
    step = open_step(filled)
    report = step.report()
    text, page = printed(report), render_html(report)
    for table in TABLES.values():
        rows = table.rows(report)
        assert rows, table.name
        assert len(csv_rows(tmp_path, report, table=table.name)) == len(rows)
        assert len(step.to_frame(table.name)) == len(rows)
        if table.name != "devices":  # which are the lanes here
            assert f"\n{table.title}" in text
            assert f'<section id="{table.title.lower().replace(" ", "-")}"' in page
    assert "<b>[red]" in text
    assert "<b>[red]" not in page
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_tensorboard_has_scalars_in_one_run(tmp_path: Path, reports: list[Report]) -> None:
    """TensorBoard's own reader finds a point per step under ``profiling/``, and no sub-run."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_tensorboard(reports, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    loaded = accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = loaded.Tags()
    assert all(tag.startswith("profiling/") for tag in tags["scalars"])
    assert {"profiling/step_s", "profiling/stage/update_actor_s", "profiling/lost/unexplained_s"} <= set(
        tags["scalars"]
    )
    points = loaded.Scalars("profiling/step_s")
    assert [(point.step, point.value) for point in points] == [
        (report.step, pytest.approx(report.span_us / 1e6)) for report in reports
    ]
