"""Captures on stand-in CANN libraries, by scenarios that run in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def outcomes_of(
    module: str, folders: pytest.TempPathFactory, *packages: Path, **environment: str
) -> dict[str, Any]:
    """Run a module's scenarios with the real torch_npu; return what came out."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed; `make test-npu` builds an environment with it")
    if missing := [name for name in ("cc", "nm", "readelf") if shutil.which(name) is None]:
        pytest.skip(f"the stand-in CANN cannot be built without {', '.join(missing)}")
    from tests.npu.cann_stub import build

    cann, target = folders.mktemp("cann"), folders.mktemp("captures")
    build(cann)
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(cann),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *packages))),
        **environment,
    }
    command = [sys.executable, "-m", f"tests.npu.{module}", str(target)]
    done = subprocess.run(
        command, cwd=target, env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((target / "outcomes.json").read_text())
    return found


def artifacts_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the path and the status of each artifact of a result."""
    return [(artifact["path"], artifact["status"]) for artifact in result["artifacts"]]
