"""The notebook in the docs: its cells run as they are, without a GPU and without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook" / "h100_step.ipynb"


def test_the_cells_of_the_notebook_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in its folder; it shows the page, frames, findings and a shorter step."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    monkeypatch.chdir(NOTEBOOK.parent)
    shown = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            done = shell.run_cell(cell["source"])
            done.raise_error()
            shown.append(done.result)
    report, *frames = [one for one in shown if hasattr(one, "_repr_html_")]
    assert "<iframe" in report._repr_html_()
    assert all(len(frame) for frame in frames)
    assert len(frames) == 2
    printed = capsys.readouterr().out
    assert report.findings[0].text in printed
    assert "of the step" in printed
    assert shell.user_ns["prediction"].predicted_us < shell.user_ns["prediction"].span_us
