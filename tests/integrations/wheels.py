"""Sources of packages that are not installed: downloaded once into pytest's cache,
and put on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from integrations.verl_runs import ROOT, search_path

PLUGIN = "verl_profiling.integrations.verl"


def sources(requirement: str, cache: pytest.Cache | None) -> Path:
    """Return a folder with what is in a wheel, e.g. of ``verl==0.9.0``."""
    assert cache is not None
    folder = cache.mkdir("sources") / requirement.replace("==", "-")
    if not any(folder.glob("*.whl")):
        wanted = ["--no-deps", "--only-binary=:all:", "-q", "-d", str(folder), requirement]
        run = subprocess.run(
            [sys.executable, "-m", "pip", "download", *wanted],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            pytest.skip(f"{requirement} cannot be downloaded: {run.stderr.strip()[-200:]}")
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_python(
    *arguments: str, cwd: Path, paths: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python with the plugin loaded by verl,
    and these folders in front of what is installed.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": search_path(*paths, ROOT),
            "VERL_USE_EXTERNAL_MODULES": PLUGIN,
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
