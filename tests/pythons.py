"""The suites on every interpreter that is found: ``make test-pythons``; it ends in a table.

Each version that setup.cfg names gets an environment with what the analysis needs, and runs the light suite
(see :mod:`tests.light`). The oldest and the newest for which torch and Ray come without CUDA run the
default suite too. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Run", "Suite", "cuda_packages", "find", "read_suite", "table", "versions"]

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "outputs" / "pythons"
NOT_FOUND = "no interpreter found"


@dataclass
class Suite:
    """What became of a suite on one interpreter.

    Attributes:
        counts: Tests by outcome: ``passed``, ``skipped``, ``failed``.
        skipped: Why tests were skipped, with how many each time.
        reason: Why the suite was not run, or did not come to its end.
        failed: Whether that, or a test, is a failure.
    """

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    failed: bool = False

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[name]} {name}" for name in ("passed", "failed", "skipped"))
        if self.failed:
            return f"FAILED: {self.reason or counts}"
        return f"not run: {self.reason}" if self.reason else counts


@dataclass
class Run:
    """One interpreter, or that there is none, and its suites."""

    version: str
    light: Suite
    default: Suite


def versions() -> list[str]:
    """Return the versions of Python that setup.cfg says the package runs on, the oldest first."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    found = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def find(version: str, environment: Mapping[str, str]) -> Path | None:
    """Return an interpreter of that version: from PATH, or one that pyenv or uv installed."""
    home = Path(environment.get("HOME", "/"))
    roots = (
        Path(environment.get("PYENV_ROOT", home / ".pyenv")) / "versions",
        Path(environment.get("UV_PYTHON_INSTALL_DIR", home / ".local/share/uv/python")),
    )
    installed = [
        path
        for root in roots
        for path in sorted(root.glob(f"*{version}.*/bin/python{version}"), reverse=True)
    ]
    on_path = shutil.which(f"python{version}", path=environment.get("PATH"))
    return next((path for path in (*([Path(on_path)] if on_path else []), *installed) if _runs(path)), None)


def _runs(python: Path) -> bool:
    """Return whether it runs: pyenv leaves a shim on PATH for versions that are not chosen."""
    done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return done.returncode == 0


def cuda_packages(report: Mapping[str, list[dict[str, dict[str, list[str]]]]]) -> list[str]:
    """Return what pip's installation report says that the packages need for CUDA, extras left aside."""
    needs = (need for package in report["install"] for need in package["metadata"].get("requires_dist", []))
    names = {re.split(r"[\s\[;<=>!~(]", need)[0] for need in needs if "extra ==" not in need}
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def read_suite(junit: Path) -> Suite:
    """Return what a JUnit report of pytest says; a report without tests, or half of one, is a failure."""
    try:
        cases = list(ET.parse(junit).iter("testcase"))
    except (ET.ParseError, FileNotFoundError) as error:
        return Suite(reason=f"no report of pytest: {error}", failed=True)
    suite = Suite(failed=not cases)
    for case in cases:
        skipped = case.find("skipped")
        if skipped is not None:
            suite.skipped[skipped.get("message", "")] += 1
        bad = case.find("failure") is not None or case.find("error") is not None
        suite.counts["failed" if bad else "passed" if skipped is None else "skipped"] += 1
    suite.failed |= suite.counts["failed"] > 0
    return suite


def table(runs: Sequence[Run]) -> str:
    """Return who ran what in Markdown, then what was skipped and why."""
    lines = ["| Python | light suite | default suite |", "|---|---|---|"]
    lines += [f"| {run.version} | {run.light} | {run.default} |" for run in runs]
    for run in runs:
        for name, suite in (("light", run.light), ("default", run.default)):
            lines += [f"{run.version}, {name}: {n} skipped: {why}" for why, n in suite.skipped.most_common()]
    return "\n".join(lines) + "\n"


def _run(python: Path, name: str, arguments: Sequence[str]) -> Suite:
    """Build an environment by the Makefile's rule, unless it is there, and run pytest in it."""
    done = subprocess.run(["make", f"{name}/.ready", f"PYTHON={python}"], cwd=ROOT, check=False)
    if done.returncode:
        return Suite(reason=f"make {name}/.ready", failed=True)
    junit = OUTPUTS / f"{name.removeprefix('.venv-')}.xml"
    junit.unlink(missing_ok=True)
    command = [ROOT / name / "bin" / "python", "-m", "pytest", "-q", "--continue-on-collection-errors"]
    done = subprocess.run([*command, f"--junitxml={junit}", *arguments], cwd=ROOT, check=False)
    suite = read_suite(junit)
    suite.failed |= done.returncode != 0
    return suite


def _no_torch(python: Path) -> str:
    """Return why an interpreter gets no torch without CUDA, or no Ray, from this index; empty if it does."""
    asked = ["-r", "requirements/torch-cpu.txt", "ray"]
    command = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [python, *command, "--quiet", "--report", "-", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    found = cuda_packages(json.loads(done.stdout))
    return f"this index has torch with CUDA only: {', '.join(found)}" if found else ""


def _runs_of(found: Mapping[str, Path], markers: str, arguments: Sequence[str]) -> Iterator[Run]:
    arguments = ["-m", markers, *arguments]
    reasons = {version: _no_torch(python) for version, python in found.items()}
    able = [version for version, reason in reasons.items() if not reason]
    for version, python in found.items():
        light = _run(python, f".venv-py{version}", ["-p", "tests.light", *arguments])
        default = Suite(reason=reasons[version] or "only on the oldest and the newest that have torch")
        if version in (*able[:1], *able[-1:]):
            default = _run(python, f".venv-py{version}-full", arguments)
        yield Run(version, light, default)


def main() -> int:
    """Run what can be run; the exit code is 1 where something failed, and where nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markers", default="", help="which tests, as for pytest's -m")
    parser.add_argument("arguments", nargs="*", help="more arguments for pytest")
    options = parser.parse_args()
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    located = {version: find(version, os.environ) for version in versions()}
    found = {version: python for version, python in located.items() if python is not None}
    ran = {run.version: run for run in _runs_of(found, options.markers, options.arguments)}
    none = Suite(reason=NOT_FOUND)
    runs = [ran.get(version, Run(version, none, none)) for version in versions()]
    print(table(runs), end="")
    return int(not found or any(suite.failed for run in runs for suite in (run.light, run.default)))


if __name__ == "__main__":
    sys.exit(main())
