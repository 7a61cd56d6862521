"""What the tests that drive a browser need, and why they are skipped without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

BROWSER = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH"),
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(
        not (BROWSER / "node_modules").is_dir(), reason="needs `npm install` in tests/browser"
    ),
]
