"""The patches of contrib/verl, applied to the sources of verl that VERL_SOURCE names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.verl_runs import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(400)]
PATCHES = sorted((ROOT / "contrib/verl").glob("*.patch"))
TESTS = {
    "0001-plugin-warning": "tests/plugin/test_plugin_warning_on_cpu.py",
    "0002-step-callbacks": "tests/trainer/ppo/v1/test_step_callback_on_cpu.py",
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the sources of verl, without its history."""
    named = os.environ.get("VERL_SOURCE")
    if not named:
        pytest.skip("VERL_SOURCE names no sources of verl's main (make test-verl VERL_SOURCE=DIR)")
    shutil.copytree(Path(named, "verl"), tmp_path / "verl")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_and_passes_its_own_tests(patch: Path, sources: Path) -> None:
    """Each alone, so that a maintainer can take one without the other."""
    applied = run(sources, "git", "apply", str(patch))
    assert applied.returncode == 0, applied.stderr
    tested = run(sources, sys.executable, "-m", "pytest", "-q", TESTS[patch.stem])
    assert tested.returncode == 0, tested.stdout[-2000:]


def test_both_patches_apply_together(sources: Path) -> None:
    for patch in PATCHES:
        applied = run(sources, "git", "apply", str(patch))
        assert applied.returncode == 0, applied.stderr


def test_each_patch_says_why() -> None:
    """The text beside the patches has a section for each."""
    text = (ROOT / "contrib/verl/README.md").read_text()
    assert [patch.stem for patch in PATCHES] == sorted(TESTS)
    for patch in PATCHES:
        assert f"## {patch.stem[:4]}: " in text
