"""Loops of processes that Python started: all lanes, the slow one, and those that are lost."""

from __future__ import annotations

import gzip
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from verl_profiling import ProfilingCallback, analysis, stage
from verl_profiling.capture.session import Session
from verl_profiling.errors import ConfigError
from verl_profiling.files.process_record import ProcessRecord, read_records
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import CaptureResult, Manifest
from verl_profiling.workers import CaptureMixin, WorkerProcesses, join_callback

PROGRAM = ROOT / "recipes" / "processes_tiny" / "train.py"
DRAW = random.Random(43)


def settings(path: Path, steps: list[Any], **watch: Any) -> dict[str, Any]:
    """Return settings that record stages alone."""
    return {
        "enable": True,
        "tool": "spans",
        "save_path": str(path),
        "schedule": {"steps": steps},
        "watch": {"enable": True, **watch},
        "timeouts": {"start_s": 20.0, "stop_s": 20.0},
    }


def program(given: dict[str, Any], *options: object) -> subprocess.Popen[str]:
    """Start the program of docs/processes.md."""
    command = [sys.executable, PROGRAM, json.dumps(given), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def eventually(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true value that ``look`` returns."""
    deadline_s = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(0.05)
    return value


def captured(path: Path, step: int) -> Manifest:
    return read_manifest(path / f"step_{step:06}")


def results(manifest: Manifest) -> dict[str, CaptureResult]:
    return {worker.name: worker for worker in manifest.workers}


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """A captured step has a lane of each process with its stages, in the report and the timeline;
    the watch logs the worker that becomes slow.
    """
    step, slow_from = DRAW.randint(2, 9), DRAW.randint(26, 30)
    given = settings(tmp_path, [step], trigger={"max_captures": 1})
    loop = program(given, "--steps", slow_from + 8, "--slow-from", slow_from)
    _, output = loop.communicate(timeout=200)
    assert loop.returncode == 0, output

    found = results(captured(tmp_path, step))
    assert {name: worker.status for name, worker in found.items()} == {
        "actor_rank0": "ok",
        "actor_rank1": "ok",
        "reward_rank0": "ok",
    }
    assert len({worker.process for worker in found.values()}) == 3
    timeline = analysis.open_step(tmp_path / f"step_{step:06}").merge().path
    lanes = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    named = {lane["args"]["name"] for lane in lanes if lane["name"] == "process_name"}
    assert {name for name in found if any(lane.startswith(name) for lane in named)} == {*found}
    assert "pass the same settings" not in output
    logged = re.findall(r"step (\d+).* stage update_actor.*longest there: (\w+)", output)
    assert "actor_rank1" in {lane for at, lane in logged if int(at) >= slow_from}, output
    lines = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    leaders = {row["name"]: row.get("leader") for row in lines[-1]["exposed"]}
    assert leaders["update_actor"] == "actor_rank1"
    assert leaders["reward"] == "reward_rank0"


def test_a_stopped_and_a_killed_worker(tmp_path: Path) -> None:
    """A worker that is stopped is said to be waited for; once it is killed, the loop ends, and the
    manifest says which process is lost.
    """
    first = DRAW.randint(2, 5)
    given = settings(tmp_path, [*range(first, 3000)], hang_s=1.0, first_hang_s=2.0)
    loop = program(given, "--steps", 3000)
    eventually((tmp_path / f"step_{first:06}" / "actor_rank1.result.json").exists)
    worker = results(captured(tmp_path, first))["actor_rank1"].process
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    log = tmp_path / "watch.jsonl"
    eventually(log.exists)
    hang = eventually(
        lambda: re.search(r'"lane":"(\w+)","reason":"(is stopped[^"]*)"', log.read_text())
    )
    os.kill(worker.pid, signal.SIGKILL)
    _, output = loop.communicate(timeout=100)
    assert hang.groups() == ("actor_rank1", f"is stopped by a signal (pid {worker.pid})"), output
    assert loop.returncode == 1
    assert "Traceback" in output, "the loop's own error passes"
    last = max(tmp_path.glob("step_*"))
    manifest = captured(tmp_path, int(last.name.removeprefix("step_")))
    assert not manifest.complete
    lost = results(manifest)["actor_rank1"]
    assert (lost.status, lost.reason) == ("failed", f"its process has ended (pid {worker.pid})")
    assert results(manifest)["actor_rank0"].status == "ok"


def test_a_process_that_joins_after_the_callback_leaves_a_record(tmp_path: Path) -> None:
    """As in the program of docs/processes.md. So the one that is killed went first, and no watched
    process counts among the children of the loop's process.
    """
    loop = program(settings(tmp_path, []), "--steps", 3000)

    def records() -> dict[str, ProcessRecord]:
        return {record.lane: record for record in read_records(tmp_path / "processes")}

    try:
        lanes = {"actor_rank0", "actor_rank1", "controller", "reward_rank0"}
        eventually(lambda: {*records()} >= lanes, 30.0)
        seen = records()
        eventually(lambda: records()["controller"].at_ns > seen["controller"].at_ns)
        assert records()["controller"].use.children < seen["actor_rank0"].use.own
        time.sleep(2.5)  # until the loop's process has seen the others' records
        os.kill(seen["actor_rank1"].process.pid, signal.SIGKILL)
        _, output = loop.communicate(timeout=100)
    finally:
        loop.kill()
    [check] = [one for one in analysis.open_run(tmp_path).check().artifacts if one.reason]
    assert check.reason.startswith("actor_rank1 went first"), output
    assert check.reason.endswith("killed by SIGKILL"), output


def _joined(given: dict[str, Any], address: str, rank: int, tasks: Any) -> None:
    logging.basicConfig(level=logging.ERROR)
    worker = CaptureMixin()
    worker.init_capture(given, role="actor", rank=rank)
    join_callback(worker, address, rank)
    tasks.send("joined")
    while tasks.recv():
        with stage("update_actor"):
            time.sleep(0.02)
        tasks.send("done")


@contextmanager
def process(
    *arguments: Any, starts_by: str = "spawn"
) -> Iterator[tuple[multiprocessing.process.BaseProcess, Any]]:
    """Run a worker; it has tried to join."""
    processes: Any = multiprocessing.get_context(starts_by)
    pipe, tasks = processes.Pipe()
    started = processes.Process(target=_joined, args=(*arguments, tasks))
    started.start()
    tasks.close()
    assert pipe.recv() == "joined"
    yield started, pipe
    if started.is_alive():
        pipe.send(False)
    started.join()


def test_processes_that_join_late_or_never(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is said to be missing, with the remedy; a late one is in the next capture, a second
    process of a rank is refused, and one that has ended is replaced by another.
    """
    given = settings(tmp_path, [2, 4, 6, 8], hang_s=1.0, first_hang_s=1.0)
    actors = WorkerProcesses(3)
    with ProfilingCallback(given) as profiling, process(given, actors.address, 0) as (first, pipe):
        profiling.add_workers("actor", actors)

        def step(number: int, *pipes: Any) -> dict[str, tuple[str, str]]:
            profiling.on_step_begin(number)
            for task in pipes:
                task.send(True)
            for task in pipes:
                assert task.recv() == "done"
            profiling.on_step_end()
            if number % 2:
                return {}
            found = results(captured(tmp_path, number))
            return {name: (worker.status, worker.reason) for name, worker in found.items()}

        never = "its process has not joined: call join_callback(worker, address, rank=...) in it"
        step(1, pipe)
        assert step(2, pipe) == {
            "actor_rank0": ("ok", ""),
            "actor_rank1": ("failed", never),
            "actor_rank2": ("failed", never),
        }
        with process(given, actors.address, 1, starts_by="fork") as (_, late):
            for rank in (1, 7):
                with process(given, actors.address, rank):
                    pass
            step(3, pipe, late)
            assert step(4, pipe, late)["actor_rank1"] == ("ok", "")
            first.kill()
            first.join()
            step(5, late)
            found = step(6, late)
            assert found["actor_rank0"] == ("failed", f"its process has ended (pid {first.pid})")
            assert found["actor_rank1"] == ("ok", "")
            profiling.on_step_begin(7)
            eventually(lambda: "hangs: " in caplog.text)
            profiling.on_step_end()
            with process(given, actors.address, 0) as (_, again):
                assert step(8, again, late)["actor_rank0"] == ("ok", "")
    actors.close()
    lines = "\n".join(record.getMessage() for record in caplog.records)
    assert f"it waits for actor_rank0, which has ended (pid {first.pid})" in lines
    assert "rank 1 has joined already (pid" in lines
    assert "rank 7 is none of 3 processes" in lines
    assert (
        "watch: actor rank 2 (which has never replied) is not read: its process has not joined"
        in lines
    )


def test_without_a_callback_a_process_goes_on(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """An address at which nobody listens is an error in the log."""
    worker = CaptureMixin()
    worker.init_capture(settings(tmp_path, [1]), role="actor")
    join_callback(worker, str(tmp_path / "nobody"), 0)
    assert "no callback listens at" in caplog.text
    assert "start the loop first, or correct the address" in caplog.text


def _lost_loop(given: dict[str, Any], pipe: Any) -> None:
    actors, profiling = WorkerProcesses(1), ProfilingCallback(given)
    profiling.add_workers("actor", actors)
    pipe.send(actors.address)
    pipe.recv()
    profiling.on_step_begin(1)
    if not os.fork():  # a child that outlives the loop
        time.sleep(5.0)
        os._exit(0)
    pipe.send("captured")
    pipe.recv()


def test_a_worker_records_no_longer_than_its_loop(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the process of the loop is killed in a captured step, the capture ends in the worker,
    with its result; nobody listens any more, even if a child of the loop lives.
    """
    given = settings(tmp_path, [1])
    processes = multiprocessing.get_context("spawn")
    pipe, others = processes.Pipe()
    loop = processes.Process(target=_lost_loop, args=(given, others))
    loop.start()
    worker = CaptureMixin()
    worker.init_capture(given, role="actor", rank=0)
    address = pipe.recv()
    join_callback(worker, address, rank=0)
    pipe.send("joined")
    assert pipe.recv() == "captured"
    assert worker.capture.recording
    loop.kill()
    eventually(lambda: not worker.capture.recording)
    eventually((tmp_path / "step_000001" / "actor_rank0.result.json").exists)
    loop.join()
    join_callback(worker, address, rank=0)
    assert "Connection refused" in caplog.text


def test_a_stopped_worker_does_not_stop_the_loop(tmp_path: Path, session: Session) -> None:
    """The loop sends any number of calls, and the worker answers all once it runs again."""
    given = settings(tmp_path, [1])
    actors = WorkerProcesses(1)
    with process(given, actors.address, 0) as (worker, _):
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        calls = []
        for _ in range(DRAW.randint(600, 900)):
            calls += actors.execute_all_async("stop_capture")
        assert not any(call.done() for call in calls)
        os.kill(worker.pid, signal.SIGCONT)
        assert {call.result(60).result.identity.rank for call in calls} == {0}
    actors.close()


def test_wrong_numbers_are_refused(session: Session) -> None:
    """A rank or a size that is no such number is an error at once; a second close is none."""
    actors = WorkerProcesses(1)
    for rank in (None, "first", 0.5):
        with pytest.raises(ConfigError, match=r"join_callback: rank"):
            join_callback(CaptureMixin(), actors.address, rank)  # type: ignore[arg-type]
    for size in (0, -1, None):
        with pytest.raises(ConfigError, match=r"WorkerProcesses"):
            WorkerProcesses(size)  # type: ignore[arg-type]
    actors.close()
    eventually(lambda: not Path(actors.address).exists())
    actors.close()
