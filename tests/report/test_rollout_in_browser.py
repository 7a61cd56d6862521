"""The section "Rollout" in a real browser: its bars are as wide as what they stand for."""

from __future__ import annotations

import pytest
from browser import needs_browser, run_script
from drawn_logs import DrawnLog
from drawn_steps import Worker, report_of

from verl_profiling.analysis import open_step
from verl_profiling.report.html import render_html

pytestmark = needs_browser


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is seen of nine trajectories of which one takes twice as long, in a tool with a wild name."""
    folder = tmp_path_factory.mktemp("step")
    report_of(folder, [("rollout", 0, 8)], [Worker("rollout", replica=0, kernels=[("k", 0, 4)])], end=8)
    log = DrawnLog(end=8)
    for number in range(9):
        log.trajectory(0, 4.0 if number < 8 else 8.0, ("tool:search", 1, 2), group=f"g{number // 3}")
    log.span("tool:</i><b>\u202e" + "x" * 90, 4, 8, 8)
    log.add_to(folder)
    page = folder / "report.html"
    page.write_text(render_html(open_step(folder).report()), encoding="utf-8")
    return run_script("rollout.js", str(page))


def test_bars_are_as_wide_as_their_causes(seen: dict) -> None:
    """All trajectories, the tail, and the rollout on the wall clock."""
    titles = ["All trajectories", "The last 1 of 9", "The rollout on the wall clock"]
    assert [title.partition(", ")[0] for title in seen["titles"]] == titles
    assert all(title.endswith(" s") for title in seen["titles"]), "each says how long it is"
    every, last, _ = seen["bars"]
    whole = sum(width for _, width in every)
    assert [title.partition(":")[0] for title, _ in every] == ["own code", "tool", "tool"]
    assert [width / whole for _, width in every] == pytest.approx([27 / 40, 9 / 40, 4 / 40], abs=0.01)
    ((title, width),) = last
    assert title.endswith("x: 100.0%")
    assert width == pytest.approx(whole, abs=5)


def test_it_can_be_read_by_everyone(seen: dict) -> None:
    """Light, dark and on a phone; each cause has a colour key, and nothing is loaded."""
    assert seen["axe"] == []
    assert seen["problems"] == []
    assert len([url for url in seen["requests"] if not url.startswith("data:")]) == 1
    assert "rgba(0, 0, 0, 0)" not in seen["keys"]
    assert seen["phone"] <= 390
