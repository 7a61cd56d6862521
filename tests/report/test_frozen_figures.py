"""`report` says of real traces what it said before the package was halved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.cli import main

DATA = Path(__file__).parents[1] / "data"
FIGURES: dict[str, dict[str, Any]] = json.loads((DATA / "figures.json").read_text())


@pytest.mark.parametrize("traces", FIGURES)
def test_figures_of_real_traces_are_what_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], traces: str
) -> None:
    """Lanes' times, the dearest kernels, collectives and idle time by cause, also of two ranks."""
    for name in traces.split(" + "):
        shutil.copy(DATA / name, tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    report, were = json.loads(capsys.readouterr().out), FIGURES[traces]
    lanes = {lane["name"]: lane for lane in report["workers"]}
    assert lanes.keys() == were["workers"].keys()
    for name, figures in were["workers"].items():
        assert {key: lanes[name][key] for key in figures} == pytest.approx(figures)
    kernels = {row["name"]: [row["calls"], row["self_us"]] for row in report["kernels"]}
    collectives = {row["name"]: [row["calls"], row["wait_us"], row["late"]] for row in report["collectives"]}
    lost = {row["cause"]: row["seconds"] for row in report["lost"]}
    assert {name: kernels[name] for name in were["kernels"]} == were["kernels"]
    assert collectives == were["collectives"]
    assert {cause: lost[cause] for cause in were["lost"]} == pytest.approx(were["lost"])
