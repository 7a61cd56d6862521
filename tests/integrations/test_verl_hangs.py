"""Steps of real verl that hang: told by the log, `top`, `check` and the page of the run,
while they do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from test_pictures import PICTURES, draw_top

from integrations.hanging_verl import FOLDER, SWITCH, TAKEN
from integrations.verl_runs import PLUGINS, ROOT, SCRIPT, Run, run_verl
from verl_profiling.files.step_summary import Hang, StepSummary
from verl_profiling.files.watch_log import WatchLogReader, latest_step
from verl_profiling.report.run_page import RUN_PAGE

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

AGENT = ROOT / "recipes/verl_agent_cpu/run.sh"
TWO_REPLICAS = (
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=16",
)
LONG_RESPONSES = ("data.max_response_length=384", "actor_rollout_ref.rollout.max_model_len=512")
CORE, SERVER = "VLLM::EngineCore", "ray::vLLMHttpServer"
RUNS_S, RESTS_S = 0.05, 2.5
"""How long an engine runs, and is stopped, in turns, so that tokens come slowly."""


@dataclass(frozen=True)
class Told:
    """A hang, what each command says of it, and the ids of the processes that wrote a file."""

    hang: Hang
    sentence: str
    commands: dict[str, tuple[int, str]]
    page: str
    pids: dict[str, int]


class Driven:
    """A run of verl that goes on in the background, and that somebody looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.save_path = folder, folder / "profiling"

    def lines(self) -> list[StepSummary]:
        return list(WatchLogReader(self.save_path).read())

    def until(self, holds: Callable[[], Any], seconds: float = 600) -> Any:
        until_s = time.monotonic() + seconds
        while not (found := holds()) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert found, (
            self.lines(),
            (self.folder / "output.txt").read_text(errors="replace")[-4000:],
        )
        return found

    def ended(self) -> int:
        return sum(bool(line.end_ns) for line in self.lines())

    def next_step(self, more: int = 1) -> None:
        most = self.ended() + more
        self.until(lambda: self.ended() >= most)

    def hangs(self) -> str:
        return "".join(line.hangs for line in latest_step(self.lines()))

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a name that this run has started."""
        started = psutil.Process().children(recursive=True)
        return [process for process in started if name in " ".join(process.cmdline())]

    def look(self) -> Told:
        """Return what is said, once something is."""
        sentence = self.until(self.hangs)
        if PICTURES:
            draw_top(self.save_path, ROOT / PICTURES / "top-hang.svg")
        commands = {}
        for name, more in (("top", "--once"), ("check", ""), ("report", "--save")):
            command = [sys.executable, "-m", "verl_profiling.cli", name, str(self.save_path), more]
            done = subprocess.run(
                [*filter(None, command)], capture_output=True, text=True, check=False
            )
            commands[name] = done.returncode, done.stdout + done.stderr
            print(
                f"$ verl-profiling {name}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        pids = {}
        for path in (self.save_path / "hangs").glob("[!.]*.json"):
            state = msgspec.json.decode(path.read_bytes())
            pids[state["lane"]] = state["process"]["pid"]
        page = re.sub(r"<[^>]+>", " ", (self.save_path / RUN_PAGE).read_text())
        hang = latest_step(self.lines())[0].hang
        assert hang is not None
        return Told(hang, sentence, commands, page, pids)

    def goes_on(self) -> None:
        self.until(lambda: not self.hangs())
        self.next_step()


@contextmanager
def driven(
    folder: Path, *overrides: str, script: Path = SCRIPT, plugins: str = PLUGINS
) -> Iterator[Driven]:
    """Run verl, and yield once some steps have ended; it ends by itself."""
    (folder / SWITCH).unlink(missing_ok=True)
    settings = (
        "profiling.schedule.steps=[]",
        "profiling.watch.every=1",
        "profiling.watch.hang_s=3",
        "trainer.total_epochs=4",
    )
    run, environment = Driven(folder), {"PLUGINS": plugins, FOLDER: str(folder)}
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(run_verl, folder, *settings, *overrides, script=script, **environment)
        run.until(lambda: run.ended() >= 3 or done.done())
        yield run
        result: Run = done.result()
    assert result.code == 0, result.output[-4000:]
    assert not run.hangs()


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def said_everywhere(run: Driven, told: Told) -> None:
    """Log, `top`, `check` and the page have one sentence;
    afterwards the log says that the step goes on.
    """
    log = (run.folder / "output.txt").read_text(errors="replace")
    step = re.escape(told.sentence.partition(" hangs")[0])
    assert f"watch: {told.sentence}; see " in log
    assert re.search(rf"watch: {step} goes on", log)
    whole = "".join(told.sentence.split())
    for name in ("top", "check"):
        code, said = told.commands[name]
        assert code == 1
        assert whole in "".join(said.split())
    assert "".join(told.commands["top"][1].split()).startswith(whole)
    assert whole in "".join(told.page.split())


def test_a_tool_that_never_returns(tmp_path: Path) -> None:
    """The trajectory that waits for it is named, with the tool; engines and trainers wait."""
    plugins = f"{PLUGINS},recipes.verl_agent_cpu.chosen_calls,integrations.hanging_verl"
    with driven(tmp_path, "trainer.total_training_steps=6", script=AGENT, plugins=plugins) as run:
        (tmp_path / SWITCH).touch()
        try:
            told = run.look()
        finally:
            (tmp_path / TAKEN).unlink(missing_ok=True)
        run.goes_on()
    assert told.hang.stage == "rollout"
    assert re.fullmatch(r"agent_loop_rank[01]", told.hang.lane)
    assert re.match(r"is in tool:\w+ of trajectory [-\w]+, sample [01] for ", told.hang.reason)
    said_everywhere(run, told)


def test_engines_that_are_stopped_or_slow(tmp_path: Path) -> None:
    """An engine's own process, then its server; tokens that come slowly are progress."""
    overrides = ("trainer.total_training_steps=11", *TWO_REPLICAS, *LONG_RESPONSES)
    with driven(tmp_path, *overrides) as run:
        cores, servers = run.processes(CORE), run.processes(SERVER)
        assert len(cores) == len(servers) == 2
        replica = cores[1].ppid()
        with stopped(cores[1]):
            core = run.look()
        run.goes_on()
        with stopped(servers[0]):
            server = run.look()
        run.goes_on()
        steps = run.ended()
        while run.ended() < steps + 2:  # the line of a step may come while the next one ends
            for process in cores:
                os.kill(process.pid, signal.SIGSTOP)
            time.sleep(RESTS_S)
            for process in cores:
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(RUNS_S)
        slow = max(
            [line for line in run.lines() if line.end_ns][steps:], key=lambda line: line.seconds
        )
        run.next_step()
    assert core.pids[core.hang.lane] == replica
    assert re.match(
        r"has a process that is stopped by a signal \(VLLM::EngineCor\w*, pid \d+\)",
        core.hang.reason,
    )
    assert f"pid {cores[1].pid}" in core.hang.reason
    assert re.fullmatch(r"rollout[01]_rank[01]", server.hang.lane)
    assert server.hang.reason == f"is stopped by a signal (pid {servers[0].pid})"
    for told in (core, server):
        said_everywhere(run, told)
    assert slow.exposed_s["rollout"] > 3 * (server.hang.usual_s or 0), "or it proves nothing"
    assert slow.hang is None
