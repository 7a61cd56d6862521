"""The HTML report: one file, complete, and it works in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from browser import needs_browser, run_script
from step_folders import WORKERS, build_step

from verl_profiling.report.build import build_report
from verl_profiling.report.html import render_html
from verl_profiling.report.model import GanttSpan, Report
from verl_profiling.timeline.inputs import find_steps


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a real capture."""
    (inputs,) = find_steps(build_step(tmp_path_factory.mktemp("run"), rank1_clock_ns=5_000))
    return build_report(inputs)


class _Elements(HTMLParser):
    """Collects elements that are left open, and everything that points out of the file."""

    void = {"meta", "link", "line", "rect", "path"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [v for k, v in attrs if k in ("src", "href") and not (v or "").startswith("data:")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(report: Report) -> None:
    """Every element is closed, and nothing is fetched from anywhere."""
    page = render_html(report)
    elements = _Elements()
    elements.feed(page)
    assert elements.open == []
    assert elements.outside == []
    assert not re.search(r"@import|url\((?!data:)", page)


def test_what_the_loop_reported_is_on_the_page(report: Report) -> None:
    """Every number that the loop logged for the step is next to what was measured."""
    metrics = {"critic/score/mean": 0.25, "timing_s/<step>": 12.5}
    page = render_html(msgspec.structs.replace(report, metrics=metrics))
    section = page.partition('id="reported-by-the-loop"')[2].partition("</section>")[0]
    assert "critic/score/mean" in section
    assert "0.250" in section
    assert "timing_s/&lt;step&gt;" in section


def test_names_cannot_break_out_of_the_page(report: Report) -> None:
    """The name of a stage or kernel is shown as it is, with any characters."""
    nasty = '</script><img src=x onerror=alert(1)>"&'
    spans = [GanttSpan(lane="controller", name=nasty, begin_us=0, end_us=9, depth=0)]
    page = render_html(msgspec.structs.replace(report, gantt=spans, notes=[nasty]))
    assert "<img" not in page


def test_64_ranks_stay_below_1_mb(report: Report) -> None:
    """The page of a large step is small enough to send to somebody."""
    row = report.workers[0]
    workers = [msgspec.structs.replace(row, name=f"actor_rank{i}", rank=i) for i in range(64)]
    gantt = [msgspec.structs.replace(s, lane=f"actor_rank{i}") for i in range(64) for s in report.gantt * 4]
    load = [i % 101 for i in range(120)]
    workers = [msgspec.structs.replace(worker, load=load) for worker in workers]
    page = render_html(msgspec.structs.replace(report, workers=workers, gantt=gantt))
    assert len(page.encode()) < 1_000_000


@pytest.fixture(scope="module")
def seen(report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Open the page in Chromium, click, sort, switch the theme, and return what was seen."""
    for mark in needs_browser:
        if mark.args[0]:
            pytest.skip(mark.kwargs["reason"])
    page = tmp_path_factory.mktemp("html") / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return run_script("report.js", str(page))


def test_the_browser_has_nothing_to_complain_about(seen: dict) -> None:
    """No error on the console, and no request but the page itself."""
    assert seen["problems"] == []
    assert len([url for url in seen["requests"] if not url.startswith("data:")]) == 1


def test_all_sections_are_there(seen: dict) -> None:
    """What the capture holds is shown; sections without content are not."""
    assert {"Step", "Step anatomy", "Idle time by cause", "Workers", "Rollout engines"} <= set(
        seen["sections"]
    )
    assert {"Engine iterations", "Rollout tail", "Stragglers", "Kernels by self time"} <= set(
        seen["sections"]
    )
    assert seen["title"].startswith("Step 12")
    assert any(label.startswith("update_actor: ") for label in seen["stages"])


def test_the_theme_switches_by_button_and_by_key(seen: dict) -> None:
    """It starts with the system's preference, and switching changes the colours."""
    assert seen["theme"] == ["light", "dark", "light"]
    assert len(set(seen["paper"])) == 2


def test_tables_sort_by_click_and_by_keyboard(seen: dict) -> None:
    """The first press on a number sorts the largest to the top, the second turns it round."""
    values = [float(value) for value in seen["descending"]]
    assert values == sorted(values, reverse=True)
    assert seen["ascending"] == seen["descending"][::-1]
    assert seen["sorted"] == ["ascending"]
    assert seen["names"] == [name for name in WORKERS if name.startswith("actor")]


def test_stages_can_be_reached_with_the_keyboard(seen: dict) -> None:
    """A focused stage says its name and duration."""
    assert seen["focused"] == seen["stages"][0]


def test_a_phone_scrolls_no_page_sideways(seen: dict) -> None:
    """Wide tables scroll inside themselves."""
    assert seen["overflow"] <= 0
