"""A file is written whole or not at all; what a killed process leaves is cleaned by a later command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import disk_of
from step_folders import build_step

from verl_profiling.cli import main

KILLED = """
import os, signal, sys
from pathlib import Path
from verl_profiling.timeline import merge
from verl_profiling.cli import main

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

merge._join = killed
main(sys.argv[1:])
"""


def hidden(folder: Path) -> list[str]:
    """Return the names of the temporary files in a folder."""
    return sorted(path.name for path in folder.glob(".*"))


def test_the_next_command_cleans_up_after_one_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL leaves a temporary folder, which goes when it is a day old: its writer may still live."""
    step = build_step(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, "merge", str(step)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = hidden(step)
    assert main(["report", str(step)]) == 0
    assert hidden(step) == [left]
    long_ago = time.time() - 25 * 3600
    os.utime(step / left, (long_ago, long_ago))
    assert main(["report", str(step)]) == 0
    assert hidden(step) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of("4m", tmp_path / "disk") as disk:
        yield disk


def fill(ballast: Path) -> None:
    """Fill a disk but for a few bytes."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["merge", "-j", "1"], "timeline.json.gz"),
        (["report", "--save"], "report.json"),
        (["report", "--csv", "{step}/csv"], "csv/"),
    ],
)
def test_a_full_disk_is_named(
    small_disk: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str
) -> None:
    """The error is one line with the path, the exit code is 2, and no temporary file stays."""
    step = build_step(small_disk)
    fill(step / "ballast")
    first, *options = (word.format(step=step) for word in command)
    assert main([first, str(step), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-profiling: error: {step / name}")
    assert line.endswith("No space left on device")
    assert hidden(step) == []
    (step / "ballast").unlink()
    assert main(["check", str(step)]) == 0
