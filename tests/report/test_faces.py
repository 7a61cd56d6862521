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
from verl_profiling.manifest import StageSpan
from verl_profiling.report.files import write_tensorboard
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.tables import TABLES
from verl_profiling.trajectory_log import Counted


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
    rewrite(folder, policy_version=5, trigger=trigger, outside=[StageSpan("validate", ns(14), ns(16))])
    rewrite_worker(folder, "actor_rank0", metrics={"throughput": 2.0})
    step = open_step(folder)
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
    assert {"profiling/step_s", "profiling/stage/update_actor_s", "profiling/lost/unexplained_s"} <= set(
        tags["scalars"]
    )
    points = loaded.Scalars("profiling/step_s")
    assert [(point.step, point.value) for point in points] == [
        (report.step, pytest.approx(report.span_us / 1e6)) for report in reports
    ]
