"""Where the time before the first step goes, with real Ray actors and planted waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import ProfilingCallback, stage
from verl_profiling.cli import main
from verl_profiling.steps.start_up import StartUp, start_up_of
from verl_profiling.workers import CaptureMixin

SLOW_S, USUAL_S = 1.0, 0.05
WATCH = {"enable": True, "every": 1}


@pytest.fixture(scope="module")
def actors(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    import ray

    class Actor(CaptureMixin):
        def begin(self, config: dict[str, Any], rank: int, slow: tuple[str, int]) -> None:
            self.init_capture(config, role="actor", rank=rank, world_size=2)
            for name in ("modules", "weights"):
                with stage(name):
                    time.sleep(SLOW_S if (name, rank) == slow else USUAL_S)

    made = ray.remote(num_cpus=0)(Actor)
    workers = [made.remote() for _ in range(2)]
    config = {"enable": True, "save_path": str(tmp_path_factory.mktemp("first")), "watch": WATCH}
    with ProfilingCallback(config) as callback:  # only the first loop starts with this process
        ray.get([worker.begin.remote(config, 0, ("", 0)) for worker in workers])  # it imports
        callback.on_step_begin(1)
    return workers


def started(folder: Path, actors: list[Any], slow: tuple[str, int]) -> tuple[StartUp, list[float]]:
    """Return the start-up of a loop, and the least and the most time that it can have taken."""
    import ray

    config = {"enable": True, "save_path": str(folder), "schedule": {"steps": []}, "watch": WATCH}
    outer_s, took_s = time.perf_counter(), []
    with ProfilingCallback(config) as callback:
        begin_s = time.perf_counter()
        if slow == ("", 0):
            time.sleep(SLOW_S)
        calls = [actor.begin.remote(config, rank, slow) for rank, actor in enumerate(actors)]
        with callback.stage("workers"):
            ray.get(calls)
        callback.add_workers("actor", actors)
        with callback.stage("data"):
            time.sleep(SLOW_S if slow == ("data", 0) else USUAL_S)
        for step in (7, 8):
            took_s.append(time.perf_counter() - begin_s)
            callback.on_step_begin(step)
            took_s.append(time.perf_counter() - outer_s)
            callback.on_step_end()
    start_up = start_up_of(folder)
    assert start_up is not None
    return start_up, took_s[:2]


@pytest.mark.parametrize(
    ("slow", "lane", "inside"),
    [
        (("weights", 1), "actor_rank1", "workers"),
        (("modules", 0), "actor_rank0", "workers"),
        (("data", 0), "controller", ""),
        (("", 0), "controller", ""),
    ],
)
def test_what_made_the_start_slow_comes_first(
    slow: tuple[str, int], lane: str, inside: str, actors: list[Any], tmp_path: Path
) -> None:
    """With its process, and who waited for it; what nobody marked is unknown, and nobody's. All
    parts add up to the time until the first step.
    """
    start_up, (least_s, most_s) = started(tmp_path, actors, slow)
    first = start_up.path[0]
    assert (first.name, first.lane, first.inside) == (slow[0], lane, inside)
    assert first.seconds >= SLOW_S
    assert least_s < sum(part.seconds for part in start_up.path) < most_s
    assert start_up.step == 7
    names = {part.name for part in start_up.parts if part.lane == "actor_rank0"}
    names.discard("init_capture")  # of the first test in a process: it imports the tools
    assert names == {"modules", "weights"}


def test_the_start_begins_with_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it is known when the job was submitted: else with the process. ``top``, ``report`` and the
    page of the run show it.
    """
    begin_s = time.time()
    environment = {**os.environ, "VERL_PROFILING_SUBMITTED": str(begin_s - 100)}
    loop = Path(__file__).with_name("starting_loop.py")
    subprocess.run([sys.executable, loop, tmp_path], env=environment, check=True)
    start_up = start_up_of(tmp_path)
    assert start_up is not None
    seconds = {part.name: part.seconds for part in start_up.path}
    assert seconds["submit"] == pytest.approx(100, abs=0.5)
    assert 0.6 < seconds["process"] < time.time() - begin_s
    shown = "before step 1: 100 s submit of controller"
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert main(["report", str(tmp_path), "--save"]) == 0
    assert capsys.readouterr().out.count(shown) == 2
    assert shown in (tmp_path / "index.html").read_text()


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            time.sleep(12)

sys.meta_path.insert(0, Slow())
"""


def test_diff_shows_which_part_of_the_start_grew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two starts of the demo's loop, the second one with a slow import of torch."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    runs = []
    # The slow one is the first, as the second one finds the libraries in the page cache.
    for name, paths in (("slow", [str(tmp_path), *sys.path]), ("usual", sys.path)):
        (tmp_path / name).mkdir()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(
            [sys.executable, "-m", "verl_profiling.cli", "demo"],
            cwd=tmp_path / name,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        runs.insert(0, str(tmp_path / name / "outputs" / "grpo_demo"))
    assert main(["diff", *runs, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    whole, *parts = sorted(
        (row for row in document["changes"] if row["kind"] == "start"),
        key=lambda row: row["name"] != "start-up",
    )
    assert whole["change_s"] == pytest.approx(sum(row["change_s"] for row in parts))
    assert parts[0]["name"] == "import of controller"
    assert parts[0]["change_s"] > 8
    assert ", most by import of controller (+" in document["started"]
    assert main(["diff", *runs]) == 0
    shown = capsys.readouterr().out
    assert document["started"] in " ".join(shown.split())
    assert "Start-up" in shown
    step = str(tmp_path / "slow" / "outputs" / "grpo_demo" / "step_000020")
    assert main(["diff", step, step, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["started"]
