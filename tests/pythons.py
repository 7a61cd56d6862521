"""The suites on every interpreter that is found: ``make test-pythons``; it ends in a table."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions() -> list[str]:
    """Return the versions of Python that setup.cfg says the package runs on, the oldest first."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    found = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def find(version: str) -> Path | None:
    """Return an interpreter of that version: from PATH, or one that pyenv or uv installed."""
    home = Path.home()
    installed = [
        path
        for root in (home / ".pyenv/versions", home / ".local/share/uv/python")
        for path in sorted(root.glob(f"*{version}.*/bin/python{version}"), reverse=True)
    ]
    on_path = shutil.which(f"python{version}")
    for path in (*([Path(on_path)] if on_path else []), *installed):
        # pyenv leaves a shim on PATH for versions that are not chosen.
        if (
            subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode
            == 0
        ):
            return path
    return None


def no_torch(python: Path) -> str:
    """Return why an interpreter gets no torch without CUDA, or no Ray, from this index;
    empty if it does.
    """
    command = [
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--only-binary=:all:",
    ]
    asked = ["--quiet", "--report", "-", "-r", "requirements/torch-cpu.txt", "ray"]
    done = subprocess.run([python, *command, *asked], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    packages = json.loads(done.stdout)["install"]
    needs = [
        need
        for one in packages
        for need in one["metadata"].get("requires_dist", [])
        if "extra" not in need
    ]
    cuda = sorted(need.split()[0] for need in needs if need.startswith(("nvidia-", "cuda-")))
    return f"this index has torch with CUDA only: {', '.join(cuda)}" if cuda else ""


def run(python: Path, name: str, arguments: Sequence[str]) -> str:
    """Build an environment by the Makefile's rule, unless it is there, and run pytest in it."""
    if subprocess.run(["make", f"{name}/.ready", f"PYTHON={python}"], cwd=ROOT).returncode:
        return "FAILED: its environment cannot be built"
    command = [
        ROOT / name / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "--continue-on-collection-errors",
    ]
    done = subprocess.run([*command, *arguments], cwd=ROOT)
    return "passed" if done.returncode == 0 else f"FAILED: pytest exits with {done.returncode}"


def main() -> int:
    """Run what can be run; the exit code is 1 where something failed, and where nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markers", default="", help="which tests, as for pytest's -m")
    parser.add_argument("arguments", nargs="*", help="more arguments for pytest")
    options = parser.parse_args()
    found = {version: python for version in versions() if (python := find(version)) is not None}
    arguments = ["-m", options.markers, *options.arguments]
    reasons = {version: no_torch(python) for version, python in found.items()}
    able = [version for version, reason in reasons.items() if not reason]
    lines = ["| Python | light suite | default suite |", "|---|---|---|"]
    for version in versions():
        light = default = "no interpreter found"
        if version in found:
            light = run(found[version], f".venv-py{version}", ["-p", "tests.light", *arguments])
            default = reasons[version] or "only on the oldest and the newest that have torch"
            if version in (*able[:1], *able[-1:]):
                default = run(found[version], f".venv-py{version}-full", arguments)
        lines.append(f"| {version} | {light} | {default} |")
    print(*lines, sep="\n")
    return int(not found or any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
