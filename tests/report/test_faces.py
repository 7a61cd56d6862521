"""CSV and TensorBoard hold the numbers of the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_folders import WORKERS, build_step
from step_outcome import csv_rows

from verl_profiling.analysis import load_reports
from verl_profiling.report.files import write_tensorboard
from verl_profiling.report.model import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """The reports of two steps."""
    run = tmp_path_factory.mktemp("run")
    for step in (3, 4):
        build_step(run, step=step)
    return load_reports(run)


def test_csv_has_a_row_per_lane_and_step(tmp_path: Path, reports: list[Report]) -> None:
    """The columns are those of the JSON, with the causes of idle time spread out."""
    rows = csv_rows(tmp_path / "csv", *reports, table="workers")
    assert {path.name for path in (tmp_path / "csv").iterdir()} >= {"stages.csv", "kernels.csv"}
    assert [(row["step"], row["name"]) for row in rows] == [(s, lane) for s in ("3", "4") for lane in WORKERS]
    for row in rows:
        causes = sum(float(value) for key, value in row.items() if key.startswith("lost_"))
        assert causes == pytest.approx(float(row["idle_us"]))


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
