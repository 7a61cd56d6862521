"""`report` says of real traces and of drawn steps what it said when their figures were written.

``PYTHONPATH=.:tests python -m tests.report.test_frozen_figures`` writes those of drawn steps again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import FAULTS, whole_step

from verl_profiling.cli import main

DATA = Path(__file__).parents[1] / "data"
DRAWN = DATA / "drawn_figures.json"
LANE = ("busy_us", "idle_us", "waiting_us", "exposed_communication_us", "host_bound_us")
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


def drawn_figures(folder: Path, fault: str) -> dict[str, float]:
    """Return the figures of a drawn step in microseconds: stages, lanes, causes, tokens, findings."""
    report = whole_step(folder, ranks=4, replicas=2, fault=fault)
    found = {"step": report.span_us}
    found |= {f"stage {row.name}": row.duration_us for row in report.stages}
    found |= {f"{row.name} {key}": getattr(row, key) for row in report.workers for key in LANE}
    found |= {f"lost {row.cause}": row.seconds * 1e6 for row in report.lost}
    found |= {f"waiting in {row.stage}": row.behind_us for row in report.stragglers}
    found |= {f"{row.worker} per token": row.per_token_p50_us or 0.0 for row in report.replicas}
    return found | {" ".join(["finding", row.rule, *row.lanes]): row.seconds * 1e6 for row in report.findings}


@pytest.mark.parametrize("fault", FAULTS)
def test_figures_of_drawn_steps_are_what_they_were(tmp_path: Path, fault: str) -> None:
    """Within a hundredth, or a microsecond, whatever the way to them."""
    were = json.loads(DRAWN.read_text())[fault]
    assert drawn_figures(tmp_path, fault) == pytest.approx(were, rel=0.01, abs=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as parent:
        figures = {fault: drawn_figures(Path(parent, fault), fault) for fault in FAULTS}
    DRAWN.write_text(json.dumps(figures, indent=1) + "\n")
