"""``verl-profiling doctor``: what it finds, and its verdict on a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from example_loops import settings

from verl_profiling.cli import main
from verl_profiling.commands.doctor import examine_config, examine_machine, load_config
from verl_profiling.tools import TOOLS

ROOT = Path(__file__).resolve().parent.parent


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """It names this torch and every tool; a missing tool is not a failure by itself."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    for name in TOOLS:
        assert f"tool {name}" in printed
    states = {finding.subject: finding.state for finding in examine_machine()}
    assert states["tool torch"] == states["tool spans"] == "available"


def test_a_config_that_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, and the room that is left where it writes."""
    path = tmp_path / "config.yaml"
    path.write_text(f"enable: true\ntool: torch\nmode: discrete\nsave_path: {tmp_path}/out\n")
    assert main(["doctor", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "can record with torch (discrete)" in printed
    assert "GiB free" in printed
    assert printed.endswith("can run here\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_a_config_that_cannot_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; the tool and the role that lack something are named, the others are not blamed."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "enable": True,
                "tool": "torch",
                "save_path": str(tmp_path),
                "roles": {"critic": {"tool": ["torch", "torch_memory"]}},
            }
        )
    )
    assert main(["doctor", str(path), "--json"]) == 1
    needs = json.loads(capsys.readouterr().out)["config"]
    problems = [finding for finding in needs if finding["problem"]]
    assert [finding["subject"] for finding in problems] == ["role critic"]
    assert "torch_memory" in problems[0]["state"]


def test_what_would_fail_is_found_before_training(tmp_path: Path) -> None:
    """A save path that cannot be written; a disabled config needs nothing."""
    (tmp_path / "file").write_text("")
    findings = examine_config(settings(tool="spans", save_path=str(tmp_path / "file" / "run")))
    assert findings[-1].problem
    assert "cannot be written" in findings[-1].state
    [finding] = examine_config(load_config(ROOT / "verl_profiling/conf/profiling/off.yaml"))
    assert not finding.problem


def test_settings_inside_of_a_larger_file(tmp_path: Path) -> None:
    """A trainer's file holds them under ``profiling``, a run's ``run.json`` under ``config``."""
    for key in ("profiling", "config"):
        path = tmp_path / f"{key}.json"
        path.write_text(json.dumps({"run_id": "x", key: {"enable": True, "tool": "spans"}}))
        assert load_config(path).tool == "spans"


@pytest.mark.parametrize("content", ["{", "[1]", '{"tool": "torhc", "enable": true}'])
def test_a_file_that_holds_no_settings(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that names what is wrong."""
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["doctor", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
