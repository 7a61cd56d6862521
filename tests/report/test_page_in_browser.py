"""The HTML report in a real browser: clicked, zoomed, hovered, folded, read by axe-core."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from browser import needs_browser, run_script, served
from drawn_logs import DrawnLog
from drawn_steps import Worker, report_of, whole_step

from verl_profiling.analysis import open_step
from verl_profiling.commands.view import bundled_ui
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.steps.inputs import find_steps
from verl_profiling.timeline.merge import merge

pytestmark = needs_browser


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a step of two ranks and two replicas."""
    return tmp_path_factory.mktemp("run") / "step_000001"


@pytest.fixture(scope="module")
def report(step: Path) -> Report:
    return whole_step(step, ranks=2, replicas=2)


@pytest.fixture(scope="module")
def seen(report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is seen of its page, opened as a file."""
    page = tmp_path_factory.mktemp("html") / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return run_script("report.js", str(page))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is seen of the page of 300 lanes."""
    folder = tmp_path_factory.mktemp("large")
    metrics = {f"timing_s/{i}": float(i) for i in range(30)} | {
        "actor/clip_low": 0.1,
        "actor/clip_high": 0.2,
    }
    report = whole_step(folder / "step_000001", ranks=256, replicas=44, fault="slow rank")
    page = folder / "report.html"
    page.write_text(render_html(msgspec.structs.replace(report, metrics=metrics)), encoding="utf-8")
    return run_script("large.js", str(page))


def test_a_browser_and_axe_find_nothing(seen: dict, large: dict) -> None:
    """No error, no request but the page; contrast, labels and roles in light,
    dark and on a phone.
    """
    for page in (seen, large):
        assert page["problems"] == []
        assert len([url for url in page["requests"] if not url.startswith("data:")]) == 1
    assert seen["axe"] == []
    assert large["axe"] == []
    assert seen["overflow"] <= 0
    assert large["overflow"] <= 0


def test_the_first_screen_has_five_figures_and_the_picture(seen: dict, report: Report) -> None:
    """Each with title, number, unit and a line; below are the sections that have content."""
    titles, numbers, lines = zip(*seen["figures"], strict=True)
    assert titles == (
        *("Step", "Tokens per second", "Requests a replica"),
        *("Accelerators busy", "Lost"),
    )
    assert all(re.match(r"(over |about |at most )?\d", number) for number in numbers)
    assert lines[1].startswith(
        f"{report.throughput.tokens_per_s_per_device:,.0f} per second and lane"
    )
    assert seen["pictureFrom"] < 460
    assert {"Lanes over time", "Stages", "Lost", "Workers"} <= set(seen["sections"])
    assert {"Stragglers", "Kernels"} <= set(seen["sections"])
    assert "Engines" not in seen["sections"]  # two that do not differ
    assert "Reported by the loop" not in seen["sections"]
    assert seen["title"].startswith("Step 1 ")


def test_the_theme_switches_and_paper_is_white(seen: dict) -> None:
    """It starts with the system's preference; the picture is printed as wide as paper."""
    assert seen["theme"] == ["light", "dark", "light"]
    assert len(set(seen["paper"])) == 2
    screen, paper, after = seen["printed"]
    assert paper == 680
    assert screen == after > paper
    assert seen["printedPaper"] == ["dark", "rgb(255, 255, 255)"]


def test_tables_sort_by_click_and_by_keyboard(seen: dict) -> None:
    """The first press on a number sorts the largest to the top, the second turns it round."""
    values = [float(value) for value in seen["descending"]]
    assert values == sorted(values, reverse=True)
    assert seen["ascending"] == seen["descending"][::-1]
    assert seen["sorted"] == ["ascending"]
    assert seen["names"][:2] == ["actor_rank0", "actor_rank1"]


def test_the_pointer_says_what_is_under_it(seen: dict) -> None:
    """The stage, the lane, its time and how busy it was; away from the picture, nothing."""
    stage, lane, took, busy, *_ = seen["hovered"]
    assert (stage, lane) == ("old_log_prob", "actor_rank0")
    assert ", from " in took
    assert ": busy " in busy
    assert "communication alone" in busy
    assert seen["left"] is None


def test_the_picture_is_zoomed_panned_and_selected(seen: dict) -> None:
    """By wheel once it was clicked, by dragging and by buttons;
    a click selects a stage in all lanes.
    """
    assert seen["wheelOutside"][0] == seen["whole"]
    assert seen["wheel"] != seen["whole"]
    assert seen["dragged"] == pytest.approx(120, abs=2)
    assert seen["stillSelected"] == seen["selected"]
    assert seen["reset"] == seen["whole"]
    assert len({tuple(seen[name]) for name in ("whole", "panned", "zoomed")}) == 3
    assert seen["selected"] == ["old_log_prob"]
    assert seen["dimmed"] == seen["stages"] - 4
    assert seen["cleared"] == 0


def test_a_file_says_how_to_come_to_the_timeline(seen: dict, step: Path) -> None:
    """A page opened from the disk has no timeline beside it that it could open."""
    assert seen["link"] is None
    assert f"verl-profiling view {step}" in seen["command"]


ELSEWHERE = ("javascript:alert(1)", "https://evil.example/#!/?url=x", "//evil.example/#!/", "")


def test_a_served_page_links_into_the_timeline_alone(
    report: Report, step: Path, tmp_path: Path
) -> None:
    """To the range that is shown, in nanoseconds of the timeline; the real Perfetto opens it there.

    Whoever sends the page's address with another timeline in it leads nobody there.
    """
    (inputs,) = find_steps(step)
    page, timeline = tmp_path / "report.html", tmp_path / "timeline.json.gz"
    page.write_text(render_html(report), encoding="utf-8")
    merge(inputs, timeline)
    with served(tmp_path, bundled_ui()) as server:
        others = [f"{server.address(page.name)}#timeline={other}" for other in ELSEWHERE]
        links = run_script("link.js", server.page_address(page.name, timeline.name), *others)
        assert links[1:] == [[None, None]] * len(ELSEWHERE)
        whole, part = links[0]
        zero = report.timeline_begin_ns or 0
        begin = zero + round(min(span.begin_us for span in report.gantt) * 1000)
        end = zero + round(max(span.end_us for span in report.gantt) * 1000)
        base = server.timeline_address(timeline.name)
        assert unquote(whole) == f"{base}&visStart={begin}&visEnd={end}"
        first, last = (int(at) for at in part.partition("&visStart=")[2].split("&visEnd="))
        assert begin < first < last < end
        if bundled_ui():
            opened = run_script("visible.js", part)
            assert opened == pytest.approx([first, last], abs=(last - first) * 0.02)


def test_a_large_role_is_folded_with_those_first_who_stand_out(large: dict) -> None:
    """A button unfolds and folds it and keeps the focus."""
    assert large["folded"][1:4] == ["lane controller", "group actor", "lane actor_rank160"]
    assert len(large["folded"]) < 12
    assert large["button"] == ["all 256", "all 256 lanes of actor"]
    assert sum(row.startswith("lane actor_rank") for row in large["unfolded"]) == 256
    assert large["unfolded"][3] == "lane actor_rank160"
    assert large["focus"] == "true"
    assert large["refolded"] == large["folded"]
    assert 0 < large["unfoldS"] < 10
    assert 0 < large["zoomS"] < 10


def test_long_tables_and_metrics_are_folded(large: dict) -> None:
    """Ten rows, all on request, and ten again, also of another order; metrics by prefix."""
    assert large["workers"] == [10, 300, 10]
    assert large["fold"] == " all 300"
    assert large["first"].startswith("rollout")
    assert large["sortedRows"] == 10
    assert large["metrics"] == [10, " all 32"]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is seen of nine trajectories of which one takes twice as long,
    in a tool with a wild name.
    """
    folder = tmp_path_factory.mktemp("step")
    report_of(
        folder, [("rollout", 0, 8)], [Worker("rollout", replica=0, kernels=[("k", 0, 4)])], end=8
    )
    log = DrawnLog(end=8)
    for number in range(9):
        log.trajectory(
            0, 4.0 if number < 8 else 8.0, ("tool:search", 1, 2), group=f"g{number // 3}"
        )
    log.span("tool:</i><b>\u202e" + "x" * 90, 4, 8, 8)
    log.add_to(folder)
    page = folder / "report.html"
    page.write_text(render_html(open_step(folder).report()), encoding="utf-8")
    return run_script("rollout.js", str(page))


def test_bars_are_as_wide_as_their_causes(rollout: dict) -> None:
    """All trajectories, the tail, and the rollout on the wall clock."""
    titles = ["All trajectories", "The last 1 of 9", "The rollout on the wall clock"]
    assert [title.partition(", ")[0] for title in rollout["titles"]] == titles
    assert all(title.endswith(" s") for title in rollout["titles"]), "each says how long it is"
    every, last, _ = rollout["bars"]
    whole = sum(width for _, width in every)
    assert [title.partition(":")[0] for title, _ in every] == ["own code", "tool", "tool"]
    assert [width / whole for _, width in every] == pytest.approx(
        [27 / 40, 9 / 40, 4 / 40], abs=0.01
    )
    ((title, width),) = last
    assert title.endswith("x: 100.0%")
    assert width == pytest.approx(whole, abs=5)


def test_it_can_be_read_by_everyone(rollout: dict) -> None:
    """Light, dark and on a phone; each cause has a colour key, and nothing is loaded."""
    assert rollout["axe"] == []
    assert rollout["problems"] == []
    assert len([url for url in rollout["requests"] if not url.startswith("data:")]) == 1
    assert "rgba(0, 0, 0, 0)" not in rollout["keys"]
    assert rollout["phone"] <= 390
