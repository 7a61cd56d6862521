"""Names of other programs are shown as they are and move no cursor; numbers have the unit that fits."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import summary
from hypothesis import given
from hypothesis import strategies as st
from step_folders import STEP, build_step, rewrite, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.run_files import read_manifest
from verl_profiling.units import byte_size, duration, visible
from verl_profiling.watch.log import WatchLog

HOSTILE = "=cmd[/x]\x1b]0;owned\x07\x9b2J\u202egnp.exe"


@given(st.text(alphabet=st.characters()))
def test_what_is_shown_is_printable(text: str) -> None:
    """Lone surrogates too, which no UTF-8 terminal takes; printable text is left alone."""
    shown = visible(text)
    assert shown.isprintable()
    assert text.isprintable() <= (shown == text)
    shown.encode()


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A step folder whose stages and reasons have names that a terminal or a spreadsheet would obey.

    A stage in the log of the watch has such a name, too.
    """
    folder = build_step(tmp_path)
    log = WatchLog(tmp_path)
    for number in range(2):
        log(summary(number, {HOSTILE: 5000}))
    manifest = read_manifest(folder)
    failed = {"path": f"{HOSTILE}.json", "status": "failed", "reason": HOSTILE}
    artifacts = [msgspec.structs.replace(one, **failed) for one in manifest.workers[0].artifacts]
    rewrite_worker(folder, "actor_rank0", artifacts=artifacts, notes=[HOSTILE])
    stages = [msgspec.structs.replace(stage, name=HOSTILE) for stage in manifest.stages]
    rewrite(folder, stages=stages, notes=[HOSTILE])
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["report", "STEP"],
        ["report", "RUN"],
        ["check", "STEP"],
        ["merge", "STEP"],
        ["what-if", "STEP"],
        ["what-if", "STEP", "--scale", f"{HOSTILE}=0.5"],
        ["diff", "STEP", "LONGER"],
        ["diff", "RUN", "RUN"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_no_command_sends_control_characters(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Neither to the output nor to the error stream; they are written out instead."""
    if "LONGER" in command:
        longer = build_step(tmp_path, step=STEP + 1)
        manifest = read_manifest(longer)
        end_ns = 2 * manifest.end_ns - manifest.begin_ns
        stage = msgspec.structs.replace(manifest.stages[-1], name=HOSTILE, end_ns=end_ns)
        rewrite(longer, stages=[*manifest.stages[:-1], stage], end_ns=end_ns)
    paths = {"STEP": hostile, "RUN": tmp_path, "LONGER": tmp_path / f"step_{STEP + 1:06}"}
    main([str(paths.get(word, word)) for word in command])
    printed = capsys.readouterr()
    for stream in (printed.out, printed.err):
        assert not set("\x1b\x07\x9b\u202e") & set(stream)
    if command[0] != "merge":
        assert "\\x1b" in printed.out
        assert "[/x]" in printed.out


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (74520067.4, "74,520,067 s"),
        (9.996, "10.0 s"),
        (0.99951, "1.00 s"),
        (0.9994, "999 ms"),
        (0.00014, "140 us"),
        (3.2e-7, "320 ns"),
        (3e-12, "0.003 ns"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_a_time_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    """Rounding is done before the unit is chosen, so there are no 1000 ms; a change has a sign."""
    assert duration(seconds) == text
    assert duration(seconds, signed=True) == ("+" * (seconds > 0) + text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999_600, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (12_345 * 10**12, "12,345 TB"),
    ],
)
def test_a_size_has_three_digits_and_the_unit_that_fits(size: int, text: str) -> None:
    assert byte_size(size) == text
