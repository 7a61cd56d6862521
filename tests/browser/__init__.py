"""What the tests that drive a browser need, and why they are skipped without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.commands.view import TimelineServer

BROWSER = Path(__file__).parent
_MODULES = BROWSER / "node_modules"
_UNPACKED = _MODULES / ".chromium" / "start"
_SYSTEM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_CHROMIUM = str(_UNPACKED) if _UNPACKED.is_file() else _SYSTEM
_NODE = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
_GET = "`make browser` gets it"

needs_browser = [
    pytest.mark.skipif(_NODE is None, reason=f"needs node; {_GET}"),
    pytest.mark.skipif(
        not _MODULES.is_dir(), reason=f"needs playwright-core in tests/browser; {_GET}"
    ),
    pytest.mark.skipif(_CHROMIUM is None, reason=f"needs a Chromium; {_GET}"),
]
NO_BROWSER = next((mark.kwargs["reason"] for mark in needs_browser if mark.args[0]), "")
"""What a test in a browser lacks here; empty for nothing."""


@contextmanager
def served(folder: Path, ui: Path | None) -> Iterator[TimelineServer]:
    """Serve a folder as ``view`` does, with a user interface or with that of the internet."""
    pages = {page.name: page.read_bytes() for page in folder.glob("*.html")}
    with TimelineServer(folder / "timeline.json.gz", pages, ui, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def run_script(name: str, *arguments: str) -> Any:
    """Run one of the scripts beside this file, and return what it printed."""
    command = [str(_NODE), name, str(_CHROMIUM), *arguments]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        command,
        cwd=BROWSER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
