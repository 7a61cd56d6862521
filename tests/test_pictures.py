"""The documentation's pictures: taken of what a user sees, by a browser, from a real capture."""

from __future__ import annotations

import os
import re
import shutil
import struct
from io import StringIO
from pathlib import Path

import pytest
from browser import needs_browser, run_script, served
from rich.console import Console

from verl_profiling.analysis import CapturedStep
from verl_profiling.cli import main
from verl_profiling.commands.top import LiveRun
from verl_profiling.commands.view import bundled_ui
from verl_profiling.report.html import render_html
from verl_profiling.report.run_page import RUN_PAGE
from verl_profiling.report.watch_frame import watch_frame
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.step import StepInputs

PICTURES = os.environ.get("VERL_PROFILING_PICTURES", "")
RUN, AGENT, WATCHED = (
    Path(os.environ.get(f"VERL_PROFILING_PICTURES_OF{name}", ""), "profiling")
    for name in ("", "_AGENT", "_WATCH")
)

pytestmark = [
    *needs_browser,
    pytest.mark.skipif(not PICTURES, reason="takes the documentation's pictures"),
]


@pytest.fixture
def steps() -> list[StepInputs]:
    return find_steps(RUN)


@pytest.fixture
def step(steps: list[StepInputs]) -> StepInputs:
    return steps[-1]


@pytest.fixture
def folder() -> Path:
    return Path(PICTURES).resolve()


def size_of(picture: Path) -> tuple[int, int]:
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


def photographed(step: StepInputs, folder: Path, picture: Path, *rows: str) -> list[str]:
    """Take a picture of a step's timeline as Perfetto shows it; return the lanes that are on it."""
    CapturedStep(step).merge(folder / "t.json.gz")
    with served(folder, bundled_ui()) as server:
        seen = run_script("timeline.js", server.timeline_address("t.json.gz"), str(picture), *rows)
    return list(seen["lanes"])


def page_of(step: StepInputs, script: str, tmp_path: Path, folder: Path) -> None:
    """Take the pictures of a step's page, with nothing on the browser's console."""
    page = tmp_path / "report.html"
    page.write_text(render_html(CapturedStep(step).report()), encoding="utf-8")
    assert run_script(script, str(page), str(folder))["problems"] == []


def test_the_report(step: StepInputs, folder: Path, tmp_path: Path) -> None:
    """As it is and with its parts numbered."""
    page_of(step, "report.js", tmp_path, folder)
    assert (
        size_of(folder / "report-light.png")[0]
        == size_of(folder / "report-numbered.png")[0]
        == 1240
    )


def test_the_rollout(folder: Path, tmp_path: Path) -> None:
    [step] = find_steps(AGENT)
    page_of(step, "rollout.js", tmp_path, folder)
    assert size_of(folder / "rollout.png")[0] > 1000


def test_the_timeline(step: StepInputs, folder: Path, tmp_path: Path) -> None:
    """The controller's stages on top, one lane for each worker below."""
    lanes = list(dict.fromkeys(source.lane for source in step.sources))
    assert photographed(step, tmp_path, folder / "timeline.png") == ["controller stages", *lanes]
    assert size_of(folder / "timeline.png")[0] == 2 * 1150


def test_the_trajectories(folder: Path, tmp_path: Path) -> None:
    """What one process of an agent did: who blocked its event loop,
    and some of its trajectories.
    """
    [step] = find_steps(AGENT)
    rows = ["loop AsyncIO Thread: default blocked", *(f"trajectories {row}" for row in range(6))]
    shown = photographed(
        step, tmp_path, folder / "trajectories.png", "agent_loop_rank0 trajectories", *rows
    )
    assert shown == ["controller stages", *rows]
    assert size_of(folder / "trajectories.png")[0] == 2 * 1150


def draw_top(run: Path, file: Path) -> str:
    """Draw the frame of ``top`` as it is now; return what was drawn."""
    console = Console(record=True, width=100, file=StringIO(), force_terminal=True, highlight=False)
    console.print(watch_frame(LiveRun(run).read()))
    picture = console.export_svg(title="verl-profiling top")
    picture = re.sub(
        r"@font-face \{.*?\}", "", picture, flags=re.DOTALL
    )  # those are loaded from elsewhere
    lines = [line.rstrip() for line in picture.splitlines() if line.strip()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return picture


def test_top(folder: Path) -> None:
    picture = draw_top(WATCHED, folder / "top.svg")
    assert "rollout" in picture
    assert picture.count("http") == picture.count("http://www.w3.org/") + picture.count(
        "https://www.textualize.io"
    )


def test_the_page_of_the_run(folder: Path, tmp_path: Path) -> None:
    """Its first screen: a run in which a replica became slow."""
    page = tmp_path / "grpo_tiny"
    shutil.copytree(WATCHED, page)
    assert main(["report", str(page), "--save"]) == 0
    seen = run_script("watch.js", str(page / RUN_PAGE), str(folder / "run-light.png"))
    assert seen["problems"] == []
    assert seen["marks"] == len(seen["links"])
    assert size_of(folder / "run-light.png")[0] == 1240
