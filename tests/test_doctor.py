"""``verl-profiling doctor``: what it finds."""

from __future__ import annotations

import pytest
import torch

from verl_profiling.cli import main
from verl_profiling.commands.doctor import examine_machine
from verl_profiling.tools import TOOLS


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """It names this torch and every tool; a missing tool is not a failure by itself."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    for name in TOOLS:
        assert f"tool {name}" in printed
    states = {finding.subject: finding.state for finding in examine_machine()}
    assert states["tool torch"] == states["tool spans"] == "available"
