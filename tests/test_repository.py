"""What people expect of a repository: hooks and a workflow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from tests.pythons import versions

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> Any:
    """Return what a YAML file of the repository holds."""
    return msgspec.yaml.decode((ROOT / name).read_bytes())


def dry_run(target: str) -> list[str]:
    """Return the commands that a target of the Makefile would run, once its environment is there."""
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
    [given] = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert sorted(given.split()) == sorted(versions())
