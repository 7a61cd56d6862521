"""The versions of Python: one list everywhere, and suites that say what they left out."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pythons import Run, Suite, cuda_packages, find, read_suite, table, versions

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_imports_what_is_not_there(): raise ModuleNotFoundError("No module named 'torch'", name="torch")
def test_of_a_process(): assert 0, "exit status 1: No module named 'ray'"
def test_of_a_tool(): raise RuntimeError("tool 'torch' needs torch; install it with: ...")
def test_imports_our_needs(): raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")
"""


def pytest_in(folder: Path, *arguments: str) -> Suite:
    """Run a test file of its own in a folder of its own, and return what became of it."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_whole_file.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--rootdir={folder}",
        "-c",
        os.devnull,
        "--junitxml=it.xml",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += ["-p", "no:cacheprovider", *arguments]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return read_suite(folder / "it.xml")


def test_readme_and_metadata_name_the_same_versions() -> None:
    """The classifiers are what is tested; the oldest is what pip asks for, and all follow one another."""
    oldest, newest = versions()[0], versions()[-1]
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["python_requires"] == f">={oldest}"
    assert f"Python {oldest} to {newest} " in (ROOT / "README.md").read_text()
    first, last = (int(version.partition(".")[2]) for version in (oldest, newest))
    assert versions() == [f"3.{minor}" for minor in range(first, last + 1)]


def test_the_light_suite_skips_by_name_what_is_not_installed(tmp_path: Path) -> None:
    """Of its own imports, of processes that it started and of whole files; any other failure stays one."""
    suite = pytest_in(tmp_path, "-p", "tests.light")
    assert suite.failed
    assert suite.counts == {"passed": 1, "failed": 2, "skipped": 4}
    assert suite.skipped["torch is not installed"] == 2
    printed = table([Run("3.99", suite, Suite(reason="this index has no torch"))])
    assert "| 3.99 | FAILED: 1 passed, 2 failed, 4 skipped | not run: this index has no torch |" in printed
    assert "3.99, light: 1 skipped: ray is not installed\n" in printed


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """As pyenv's shims: the next place is looked at, and at last there is none."""
    shim, installed = tmp_path / "shims" / "python3.99", tmp_path / "pyenv/versions/3.99.1/bin/python3.99"
    for path, content in ((shim, "#!/bin/sh\nexit 127\n"), (installed, "#!/bin/sh\nexit 0\n")):
        path.parent.mkdir(parents=True)
        path.write_text(content)
        path.chmod(0o755)
    environment = {"PATH": str(shim.parent), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert find("3.99", environment) == installed
    installed.unlink()
    assert find("3.99", environment) is None


def test_torch_that_needs_cuda_is_told_apart() -> None:
    """By what its wheel requires, extras left aside."""
    needs = ["nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'", "cuda-bindings<14,>=13.0.3", "numpy>=1"]
    report = {"install": [{"metadata": {"requires_dist": needs}}, {"metadata": {}}]}
    assert cuda_packages(report) == ["cuda-bindings", "nvidia-nccl-cu13"]
    extra = {"install": [{"metadata": {"requires_dist": ["cuda-x; extra == 'all'", "filelock"]}}]}
    assert cuda_packages(extra) == []


@pytest.mark.parametrize("content", ["", "<testsuite", "<testsuite></testsuite>"])
def test_a_report_that_was_cut_off_is_a_failure(tmp_path: Path, content: str) -> None:
    """Neither an empty nor half a report of pytest counts as passed."""
    (tmp_path / "it.xml").write_text(content)
    assert read_suite(tmp_path / "it.xml").failed
