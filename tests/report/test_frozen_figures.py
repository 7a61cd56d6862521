"""`report` says of real traces, drawn steps and demos what it said
when their figures were written.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import FAULTS, whole_step

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.report.model import Report

DATA = Path(__file__).parents[1] / "data"
DRAWN = DATA / "drawn_figures.json"
DEMOS = DATA / "demo_figures.json"
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
    collectives = {
        row["name"]: [row["calls"], row["wait_us"], row["late"]] for row in report["collectives"]
    }
    lost = {row["cause"]: row["seconds"] for row in report["lost"]}
    assert {name: kernels[name] for name in were["kernels"]} == were["kernels"]
    assert collectives == were["collectives"]
    assert {cause: lost[cause] for cause in were["lost"]} == pytest.approx(were["lost"])


def figures_of(report: Report) -> dict[str, float]:
    """Return the figures of a step in microseconds: stages, lanes, causes, tokens, findings."""
    found = {"step": report.span_us}
    found |= {f"stage {row.name}": row.duration_us for row in report.stages}
    found |= {f"{row.name} {key}": getattr(row, key) for row in report.workers for key in LANE}
    found |= {f"lost {row.cause}": row.seconds * 1e6 for row in report.lost}
    found |= {f"waiting in {row.stage}": row.behind_us for row in report.stragglers}
    found |= {f"{row.worker} per token": row.per_token_p50_us or 0.0 for row in report.replicas}
    return found | {
        " ".join(["finding", row.rule, *row.lanes]): row.seconds * 1e6 for row in report.findings
    }


def drawn_figures(folder: Path, fault: str) -> dict[str, float]:
    return figures_of(whole_step(folder, ranks=4, replicas=2, fault=fault))


def demo_figures(folder: Path) -> dict[str, dict[str, float]]:
    """Return the figures of the demos' steps by demo, and of the trajectories by cause."""
    with tarfile.open(DATA / "demo_steps.tar.gz") as steps:
        steps.extractall(folder, filter="data")
    found = {}
    for step in sorted(folder.iterdir()):
        report = open_step(step).report()
        found[step.name] = figures_of(report)
        if report.rollout is not None:
            found[step.name] |= {
                f"cause {row.cause}": row.seconds * 1e6 for row in report.rollout.causes
            }
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_figures_of_drawn_steps_are_what_they_were(tmp_path: Path, fault: str) -> None:
    """Within a hundredth, or a microsecond, whatever the way to them."""
    were = json.loads(DRAWN.read_text())[fault]
    assert drawn_figures(tmp_path, fault) == pytest.approx(were, rel=0.01, abs=1)


def test_figures_of_the_demos_captures_are_what_they_were(tmp_path: Path) -> None:
    """Steps of `make demo-discrete` and `make demo-agent`: figures within a hundredth,
    or a microsecond.
    """
    found = demo_figures(tmp_path)
    were = json.loads(DEMOS.read_text())
    assert found.keys() == were.keys()
    for demo, figures in found.items():
        assert figures == pytest.approx(were[demo], rel=0.01, abs=1), demo


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as parent:
        figures = {fault: drawn_figures(Path(parent, fault), fault) for fault in FAULTS}
    DRAWN.write_text(json.dumps(figures, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as parent:
        DEMOS.write_text(json.dumps(demo_figures(Path(parent)), indent=1) + "\n")
