"""The page of a run: all captured steps side by side, with links to their pages."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from browser import NO_BROWSER, needs_browser, run_script
from drawn_steps import whole_step
from drawn_summaries import summary
from html_elements import Elements
from step_folders import build_step, rewrite

from verl_profiling.capture_request import Trigger
from verl_profiling.cli import main
from verl_profiling.files.run_files import HangStacks, write_json_atomically
from verl_profiling.files.step_summary import Hang, SpanTotal
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.run_page import render_run
from verl_profiling.report.run_steps import RunCapture
from verl_profiling.report.watch_frame import CaptureHead, RunView
from verl_profiling.steps.deaths import Death
from verl_profiling.units import visible_text_of
from verl_profiling.watch.log_writer import WatchLog


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Six steps, of which the fourth has a long tail and the last a slow rank."""
    run = tmp_path_factory.mktemp("run")
    faults = ("healthy", "healthy", "healthy", "long tail", "healthy", "slow rank")
    found = []
    for number, fault in enumerate(faults, start=10):
        report = whole_step(run / f"step_{number:06d}", ranks=4, replicas=2, fault=fault)
        found.append(msgspec.structs.replace(report, step=number))
    return found


def page_of(steps: list[Report], folder: Path) -> str:
    """Return the page of a run whose steps have their pages in folders below it."""
    captures = []
    for report in steps:
        name = f"step_{report.step:06d}"
        captures.append(RunCapture(name, CaptureHead(), f"{name}/report.html", report=report))
    return render_run(RunView(run=folder), captures)


def text_of(page: str, section: str) -> str:
    """Return the text of a section of a page."""
    return re.sub(r"<[^>]+>", "", page.partition(f'id="{section}"')[2].partition("</section>")[0])


def test_it_says_which_step_is_slowest(steps: list[Report], tmp_path: Path) -> None:
    """With their stage, and relative links to their pages,
    so that the run's folder can be moved.
    """
    page = page_of(steps, tmp_path)
    figures = text_of(page, "figures")
    assert "Step, median9.15 s" in figures
    assert "SlowestStep 1313.9 s, +4.80 s over the median, most in rollout (+4.80 s)" in figures
    elements = Elements(page)
    assert set(elements.outside) == {f"step_{r.step:06d}/report.html" for r in steps}


def test_hostile_names_stay_text(steps: list[Report], tmp_path: Path) -> None:
    """Of runs, stages, processes, reasons, spans and stacks; in attributes, too."""
    nasty = '</script><img src=x onerror=alert(1)>"&\x1b[31m\u202e'
    asked = Trigger(kind="anomaly", sign="slow_stage", reason=nasty, noticed=3, stage=nasty)
    asked = msgspec.structs.replace(asked, suspects=[nasty], value=9.0, median=1.0)
    hang = Hang(nasty, 30.0, None, nasty, nasty, [nasty])
    watch = [summary(number, {nasty: 5000.0}, leader=nasty) for number in range(1, 6)]
    watch[1].hang = hang
    watch[2].noticed, watch[2].waits = asked, nasty
    watch[4].spans = [SpanTotal(nasty, 1, 1)]
    stacks = HangStacks("loop", nasty, {nasty: [nasty]})
    for folder in (tmp_path / "hangs", tmp_path / "hangs" / "step_000002"):
        folder.mkdir()
        write_json_atomically(folder / "loop.json", stacks)
    report = msgspec.structs.replace(
        steps[3], stages=[msgspec.structs.replace(steps[3].stages[0], name=nasty)]
    )
    captures = [
        RunCapture("x", CaptureHead(trigger=asked), link, report=visible_text_of(report))
        for link in ("x/r", '"><img>')
    ]
    view = RunView(run=tmp_path, watch=watch, hangs=nasty, state=nasty)
    for page in (
        render_run(msgspec.structs.replace(view, death=Death(lane=nasty)), captures),
        render_run(msgspec.structs.replace(view, hangs=""), captures),
    ):
        assert "\\x1b[31m\\u202e" in page
        assert not {"\x1b", "\u202e"} & set(page)
        assert "img" not in Elements(page).tags
        assert set(Elements(page).outside) == {"x/r", '"><img>'}


def test_the_command_writes_it_into_the_folder_of_the_run(tmp_path: Path) -> None:
    """Of all its steps, of each run its own; plain traces have none,
    a step alone leaves it as it is.
    """
    for step in (3, 4):
        build_step(tmp_path / "run", step=step)
    assert main(["report", str(tmp_path / "run" / "step_000003"), "--save"]) == 0
    assert not (tmp_path / "run" / "index.html").exists()
    assert main(["report", str(tmp_path / "run"), "--save"]) == 0
    page = (tmp_path / "run" / "index.html").read_text()
    for step in (3, 4):
        assert f'href="step_{step:06d}/report.html"' in page
        assert (tmp_path / "run" / f"step_{step:06d}" / "report.html").is_file()
    assert main(["report", str(tmp_path / "run" / "step_000003"), "--save"]) == 0
    assert (tmp_path / "run" / "index.html").read_text() == page
    a, b, traces = (tmp_path / name for name in ("a", "b", "traces"))
    for run, step in ((a, 1), (a, 2), (b, 3)):
        build_step(run, step=step)
    traces.mkdir()
    shutil.copy(a / "step_000001" / "actor_rank0.torch.json.gz", traces)
    assert main(["report", str(a), str(b), str(traces), "--save"]) == 0
    links = {
        run: set(re.findall(r'href="(step_\d+)/', (run / "index.html").read_text()))
        for run in (a, b)
    }
    assert links == {a: {"step_000001", "step_000002"}, b: {"step_000003"}}
    assert not (traces / "index.html").exists()
    assert not (tmp_path / "index.html").exists()


class TestInABrowser:
    """What a browser shows."""

    pytestmark = needs_browser

    def test_steps_are_bars_that_lead_to_their_pages(
        self, steps: list[Report], tmp_path: Path
    ) -> None:
        """By click and by Enter; a bar is as high as its step is long, its label has all stages."""
        for report in steps:
            folder = tmp_path / f"step_{report.step:06d}"
            folder.mkdir()
            (folder / "report.html").write_text(render_html(report), encoding="utf-8")
        (tmp_path / "index.html").write_text(page_of(steps, tmp_path), encoding="utf-8")
        seen = run_script("run.js", str(tmp_path / "index.html"))
        assert seen["problems"] == []
        assert seen["axe"] == []
        assert seen["overflow"] <= 0
        assert len(seen["bars"]) == len(steps)
        assert seen["bars"][3].startswith("step 13: 13.9 s, rollout 9.20 s, update_actor 3.00 s")
        ratio = seen["heights"][3] / seen["heights"][0]
        assert ratio == pytest.approx(steps[3].span_us / steps[0].span_us, rel=0.02)
        assert seen["clicked"].startswith("Step 13")
        assert seen["entered"].startswith("Step 10")


class TestEveryStep:
    """What the watch has logged, beside the captured steps."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """A run of 20 steps, of which step 12 was captured because it was slow."""
        run = tmp_path / "run"
        asked = Trigger(kind="anomaly", reason="rollout took 9.00 s")
        rewrite(build_step(run, step=12), trigger=asked)
        log = WatchLog(run)
        for number in range(20):
            slow = {"rollout": 9000.0} if number == 12 else {}
            captured = "step_000012" if number == 12 else ""
            log(
                summary(
                    number, {"rollout": 5000.0, "update_actor": 3000.0, **slow}, captured=captured
                )
            )
        return run

    def test_the_page_shows_them_with_the_captures_marked(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As a picture and as a table, with links to the captured ones;
        the terminal says one line.
        """
        assert main(["report", str(run), "--save"]) == 0
        said = (
            "20 steps logged, 0 to 19; median 8.50 s, longest step 12 with 12.5 s (rollout +4.00 s)"
        )
        assert f"watch of {run}: {said}" in capsys.readouterr().out
        page = (run / "index.html").read_text()
        text = text_of(page, "the-latest-steps,-the-last-first")
        assert "all 20" in text
        assert text.index("Step 19") < text.index("Step 0")
        assert "1212.5 s9.00 s3.00 s500 mscaptured: anomaly: rollout took 9.00 s" in text
        assert 'id="every-step"' in page
        assert set(Elements(page).outside) == {"step_000012/report.html"}

    def test_the_figures_are_those_of_the_watch(self, run: Path) -> None:
        """Of all steps, and not of the captured one; without a captured step, too."""
        WatchLog(run)(summary(20, {"update_actor": 59_500.0}))
        assert main(["report", str(run), "--save"]) == 0
        page = (run / "index.html").read_text()
        figures = text_of(page, "figures")
        assert "Step, median8.50 sof 21 steps, from 8.50 s to 60.0 s" in figures
        assert (
            "SlowestStep 2060.0 s, +51.5 s over the median, most in update_actor (+56.5 s)"
            in figures
        )
        shutil.rmtree(run / "step_000012")
        assert main(["report", str(run), "--save"]) == 0
        assert text_of((run / "index.html").read_text(), "figures") == figures

    def test_a_first_step_that_warms_up_flattens_no_chart(self, tmp_path: Path) -> None:
        """The axis ends with the other steps; the figures say both."""
        log = WatchLog(tmp_path)
        for number in range(1, 21):
            ms = {1: 56_500.0, 12: 9000.0}.get(number, 5000.0)
            log(summary(number, {"rollout": ms, "update_actor": 3000.0}))
        assert main(["report", str(tmp_path), "--save"]) == 0
        page = (tmp_path / "index.html").read_text()
        assert '<div class="trend"><span>12.5 s</span>' in page
        said = (
            "SlowestStep 1212.5 s, +4.00 s over the median, most in rollout (+4.00 s); "
            "the first took 60.0 s"
        )
        assert said in text_of(page, "figures")

    def test_a_long_run_has_a_bounded_page(self, run: Path) -> None:
        """Bars are means of several steps; the last steps have a bar and a row each."""
        view = RunView(run=run, watch=[summary(number) for number in range(20_000)])
        begin_s = time.monotonic()
        page = render_run(view, [])
        assert time.monotonic() - begin_s < 5  # 0.4 s on an idle machine
        assert len(page) < 1_000_000
        assert 'title="step 0 to 66, mean: 9.50 s' in page
        steps = [int(number) for number in re.findall(r'title="step (\d+): ', page)]
        assert steps == list(range(19_940, 20_000))

    def test_a_log_that_is_none_costs_its_section_alone(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (run / "watch.jsonl").unlink()
        (run / "watch.jsonl").mkdir()
        assert main(["report", str(run), "--save"]) == 0
        assert "watch.jsonl: cannot be read" in capsys.readouterr().err
        assert 'id="every-step"' not in (run / "index.html").read_text()

    @pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)
    def test_the_picture_in_a_browser(self, run: Path) -> None:
        """A bar for each step; the captured one is marked, says why, and leads to its page."""
        assert main(["report", str(run), "--save"]) == 0
        seen = run_script("watch.js", str(run / "index.html"))
        assert seen["problems"] == []
        assert seen["axe"] == []
        assert seen["overflow"] <= 0
        assert (seen["bars"], seen["marks"]) == (20, 1)
        assert seen["links"] == [
            "step 12: 12.5 s, captured: anomaly: rollout took 9.00 s, rollout 9.00 s, "
            "update_actor 3.00 s, "
            "(in no stage) 500 ms"
        ]
        assert seen["heights"][12] / seen["heights"][0] == pytest.approx(12.5 / 8.5, rel=0.1)
        assert seen["entered"].startswith("Step 12")
        WatchLog(run)(summary(20, {"update_actor": 600_000.0}))
        assert main(["report", str(run), "--save"]) == 0
        seen = run_script("watch.js", str(run / "index.html"))
        assert (seen["problems"], seen["axe"]) == ([], [])
        assert (seen["bars"], seen["beyond"]) == (21, 1)
        assert seen["heights"][12] / seen["heights"][0] == pytest.approx(12.5 / 8.5, rel=0.1)
        assert seen["heights"][12] <= seen["heights"][20] < 1.5 * seen["heights"][12]
