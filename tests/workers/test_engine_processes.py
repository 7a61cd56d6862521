"""Engines that join the callback of their run, in processes of this host."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_profiling.files.run_files import read_manifest
from verl_profiling.workers import EngineProcesses
from verl_profiling.workers.processes import CALLBACK, join_run

RunPython = Callable[..., subprocess.CompletedProcess[str]]

SERVER = """
import os, time
from multiprocessing.connection import Client
from pathlib import Path
from verl_profiling import CaptureStateError
from verl_profiling.workers import EngineProcesses, RequestLog, RolloutCaptureMixin
from verl_profiling.workers.processes import join_run

replicas = []

def set_up(config, replica):
    server = RolloutCaptureMixin()
    server.init_capture(config, requests=RequestLog(), replica=replica)
    replicas.append(replica)
    return server

os.umask(0o002)
engines = EngineProcesses({"enable": True, "tool": "spans", "save_path": "run"})
"""

JOINING = """
engines = EngineProcesses({"enable": True, "tool": "spans", "save_path": "run"}, replicas=2)
for _ in range(2):
    assert join_run(Path("run"), set_up, None)
assert replicas == [0, 1]
try:
    join_run(Path("run"), set_up, None)
except CaptureStateError as error:
    assert "rank 2 is none of 2 processes" in str(error), error
else:
    raise AssertionError
"""


def test_engines_are_replicas_in_the_order_in_which_they_join(
    run_python: RunPython,
) -> None:
    """They have the callback's settings, and one too many is refused."""
    run_python(SERVER + JOINING)


def never(config: object, replica: int) -> None:
    """Fail, because an engine is set up for a callback."""
    raise AssertionError(f"replica {replica} of {config}")


@pytest.mark.parametrize("content", [None, "{", '{"address": "/nowhere"}'])
def test_a_run_without_a_callback_is_left_to_the_engine(
    content: str | None, tmp_path: Path
) -> None:
    """Also where its file is damaged."""
    if content is not None:
        (tmp_path / CALLBACK).write_text(content)
    assert not join_run(tmp_path, never, None)


def test_a_file_that_others_can_write_is_not_followed(tmp_path: Path) -> None:
    """Its socket would be trusted with the engine's process."""
    config = {"enable": True, "tool": "spans", "save_path": str(tmp_path)}
    engines = EngineProcesses(config)
    (tmp_path / CALLBACK).chmod(0o666)
    try:
        assert not join_run(tmp_path, never, None)
    finally:
        engines.close()


def test_engines_find_the_callback_in_a_folder_of_a_group(
    tmp_path: Path, run_python: RunPython
) -> None:
    """With umask 002, the usual one of many systems, a group can write the files of a run."""
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o775)
    run_python(SERVER + "assert join_run(Path('run'), set_up, None)")
    assert stat.S_IMODE((run / CALLBACK).stat().st_mode) == 0o600


GIVING_UP = """
for _ in range(20):
    with Client(engines.address) as connection:
        connection.send((None, os.getpid()))
deadline_s = time.monotonic() + 10
while True:
    try:
        assert join_run(Path("run"), set_up, None)
        break
    except CaptureStateError:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
"""


def test_an_engine_that_waits_no_longer_for_the_answer_takes_no_place(
    run_python: RunPython,
) -> None:
    """It gives up after some seconds, as its first request waits; another one may then join."""
    run_python(SERVER + GIVING_UP)


RESTARTING = (
    """
import subprocess, sys

LOOP = """
    + repr(
        """
import sys
from verl_profiling import ProfilingCallback
from verl_profiling.workers import EngineProcesses

step = int(sys.argv[1])
config = {"enable": True, "tool": "spans", "save_path": "run", "schedule": {"steps": [step]}}
engines = EngineProcesses(config)
print("ready", flush=True)
input()
with ProfilingCallback(config) as profiling:
    profiling.add_rollout(engines)
    profiling.on_step_begin(step)
    profiling.on_step_end()
"""
    )
    + """

def train(step):
    loop = subprocess.Popen([sys.executable, "-c", LOOP, step], stdin=-1, stdout=-1, text=True)
    assert loop.stdout.readline() == "ready\\n"
    known = len(replicas)
    if not known:
        assert join_run(Path("run"), set_up, None)
    while len(replicas) < known + (known > 0):
        time.sleep(0.1)
    time.sleep(1)
    loop.communicate("go\\n")
    assert loop.returncode == 0

engines.close()
train("1")
train("2")
assert replicas == [0, 0]
"""
)


def test_an_engine_joins_the_callback_of_a_loop_that_is_started_again(
    tmp_path: Path, run_python: RunPython
) -> None:
    """The steps of both loops have the engine's part."""
    run_python(SERVER + RESTARTING)
    for step in ("step_000001", "run_2/step_000002"):
        [worker] = read_manifest(tmp_path / "run" / step).workers
        assert worker.status == "ok"
