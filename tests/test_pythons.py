"""The versions of Python: one list everywhere, and a light suite that says what it left out."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

from tests.pythons import versions

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_imports_what_is_not_there(): raise ModuleNotFoundError("No module named 'torch'", name="torch")
def test_of_a_process(): assert 0, "exit status 1: No module named 'ray'"
def test_of_a_tool(): raise RuntimeError("tool 'torch' needs torch; install it with: ...")
def test_imports_our_needs(): raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")
"""


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
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole_file.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
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
