"""Takes the documentation's pictures of the report, from a real capture, as a user will see it.

``VERL_PROFILING_PICTURES`` names the folder to write, ``VERL_PROFILING_PICTURES_OF`` the step
folder to picture. Other tests of the browser run always; this one only when asked to.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from browser import BROWSER, CHROMIUM, needs_browser

from verl_profiling.report.build import build_report
from verl_profiling.report.html import render_html
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.sources import StepInputs

PICTURES = os.environ.get("VERL_PROFILING_PICTURES")
STEP = os.environ.get("VERL_PROFILING_PICTURES_OF")

pytestmark = [
    *needs_browser,
    pytest.mark.skipif(
        not (PICTURES and STEP), reason="takes pictures only when asked to (see the module's text)"
    ),
]


@pytest.fixture
def step() -> StepInputs:
    """The capture that is pictured."""
    (inputs,) = find_steps(Path(str(STEP)))
    return inputs


def node(script: str, *arguments: str) -> dict:
    """Run one of the browser's scripts and return what it printed."""
    command = ["node", script, str(CHROMIUM), *arguments]
    done = subprocess.run(command, cwd=BROWSER, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_report(step: StepInputs, tmp_path: Path) -> None:
    """Light, dark and on a phone, with nothing on the browser's console."""
    page = tmp_path / "report.html"
    page.write_text(render_html(build_report(step)), encoding="utf-8")
    seen = node("report.js", str(page), str(Path(str(PICTURES)).resolve()))
    assert seen["problems"] == []
    for name in ("report-light.png", "report-dark.png", "report-phone.png"):
        assert (Path(str(PICTURES)) / name).stat().st_size > 10_000
