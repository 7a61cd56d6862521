"""Names of other programs are shown as they are,
move no cursor and lead out of no folder; units fit.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_summaries import summary
from hypothesis import given
from hypothesis import strategies as st
from step_folders import STEP, build_step, rewrite, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest, write_result
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import NsysRange
from verl_profiling.units import byte_size, duration, visible
from verl_profiling.watch.log_writer import WatchLog

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
    """A step folder whose stages and reasons have names that a terminal or a spreadsheet would
    obey.

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
        (-1.1e-16, "0 s"),
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


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a link that leads out": lambda path: path.symlink_to("/etc/hostname"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
}


def around(folder: Path) -> set[Path]:
    return {path for path in folder.parent.parent.rglob("*") if folder not in path.parents}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_no_command_opens_a_special_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """It is named, and nobody waits for what has no end or no writer."""
    folder = build_step(tmp_path)
    victim = folder / read_manifest(folder).workers[0].artifacts[0].path
    victim.unlink()
    SPECIAL[kind](victim)
    for command in ("report", "merge"):
        assert main([command, str(folder)]) in (0, 1, 2)
        assert "localhost" not in capsys.readouterr().out
    assert main(["check", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "unreadable" in printed
    assert victim.name in printed


@pytest.mark.parametrize("path", ["../../x.torch.json.gz", "/etc/hostname", "a\0b", "", ".."])
def test_a_manifest_cannot_name_what_is_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A path that leads out is refused; nothing appears beside the step folder."""
    folder = build_step(tmp_path / "a" / "run")
    worker = read_manifest(folder).workers[0]
    artifacts = [msgspec.structs.replace(artifact, path=path) for artifact in worker.artifacts]
    rewrite_worker(folder, worker.name, artifacts=artifacts)
    before = around(folder)
    for command in ("check", "report", "merge"):
        assert main([command, str(folder)]) != 0 or command in ("report", "merge")
        assert around(folder) == before
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"path": "x" * 5000},
        {"path": "/etc/hostname"},
        {"lane": "../../x"},
        {"process": 1 << 40},
        {"link": "/etc/hostname"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_result_of_a_process_costs_its_own_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    """Whatever a result file names, the other workers are used, and nothing is written outside."""
    folder = build_step(tmp_path / "run")
    manifest = read_manifest(folder)
    worker, named = (
        manifest.workers[0],
        {key: change[key] for key in ("path", "lane") if key in change},
    )
    gone = msgspec.structs.replace(ProcessId.current(), pid=change.get("process", 1), started="0")
    result = msgspec.structs.replace(
        worker,
        capture_id=manifest.capture_id,
        process=gone,
        artifacts=[msgspec.structs.replace(worker.artifacts[0], status="pending", **named)],
    )
    write_result(folder, result)
    if "link" in change:
        (folder / "actor_rank0.result.json").unlink()
        (folder / "actor_rank0.result.json").symlink_to(change["link"])
    before = around(folder)
    assert main(["check", str(folder.parent)]) == (1 if "path" in change else 0)
    assert "ok          step_000012/actor_rank1.torch.json.gz" in capsys.readouterr().out
    for command in ("report", "merge"):
        assert main([command, str(folder.parent)]) in (0, 1)
    assert around(folder) == before


@pytest.mark.parametrize(
    ("folder", "artifact"), [("..", "victim"), ("step_000001", "../../victim")]
)
def test_a_note_of_nsys_cannot_overwrite_a_file_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, artifact: str
) -> None:
    """``collect`` moves a report into a step folder of the run, or nowhere."""
    run = tmp_path / "run"
    (run / "nsys").mkdir(parents=True)
    (run / "step_000001").mkdir()
    (tmp_path / "victim").write_text("precious")
    noted = NsysRange(number=1, folder=folder, artifact=artifact, begin_ns=1, end_ns=2)
    (run / "nsys" / "actor.7.ranges.jsonl").write_bytes(msgspec.json.encode(noted) + b"\n")
    (run / "nsys" / "actor.7.nsys-rep").write_text("report")
    assert main(["collect", str(run)]) != 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert "Traceback" not in capsys.readouterr().err
