"""What other programs called their things is shown as it is, and moves no cursor and no eye."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_folders import build_step, rewrite, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.run_files import read_manifest
from verl_profiling.units import visible

HOSTILE = "=cmd\x1b]0;owned\x07\x9b2J\u202egnp.exe"


@given(st.text(alphabet=st.characters()))
def test_what_is_shown_is_printable(text: str) -> None:
    """Lone surrogates too, which no UTF-8 terminal takes; printable text is left alone."""
    shown = visible(text)
    assert shown.isprintable()
    assert text.isprintable() <= (shown == text)
    shown.encode()


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A step folder whose stages and reasons have names that a terminal or a spreadsheet would obey."""
    folder = build_step(tmp_path)
    manifest = read_manifest(folder)
    failed = {"path": f"{HOSTILE}.json", "status": "failed", "reason": HOSTILE}
    artifacts = [msgspec.structs.replace(one, **failed) for one in manifest.workers[0].artifacts]
    rewrite_worker(folder, "actor_rank0", artifacts=artifacts, notes=[HOSTILE])
    stages = [msgspec.structs.replace(stage, name=HOSTILE) for stage in manifest.stages]
    rewrite(folder, stages=stages, notes=[HOSTILE])
    return folder


@pytest.mark.parametrize("command", ["report", "check", "merge"])
def test_no_command_sends_control_characters(
    hostile: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Neither to the output nor to the error stream; they are written out instead."""
    main([command, str(hostile)])
    printed = capsys.readouterr()
    for stream in (printed.out, printed.err):
        assert not set("\x1b\x07\x9b\u202e") & set(stream)
    if command in ("report", "check"):
        assert "\\x1b" in printed.out


def test_a_spreadsheet_takes_no_name_for_a_formula(hostile: Path, tmp_path: Path) -> None:
    """A cell that begins like a formula is quoted; numbers are not."""
    assert main(["report", str(hostile), "--csv", str(tmp_path / "csv")]) == 1
    cells = [
        cell
        for path in (tmp_path / "csv").glob("*.csv")
        for row in csv.reader(path.open(newline=""))
        for cell in row
    ]
    assert any(cell.startswith("'=cmd") for cell in cells)
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
