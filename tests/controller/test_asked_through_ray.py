"""A running loop is asked through the Ray cluster: a real actor, real loops, askers in other processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray
from example_loops import settings
from fleet import TrainWorker

from verl_profiling import ProfilingCallback
from verl_profiling.aim import Aim
from verl_profiling.cli import main
from verl_profiling.commands.asking import find_job_through_ray
from verl_profiling.errors import ProfilingError, TraceFormatError
from verl_profiling.ray_mailbox import NAMESPACE
from verl_profiling.run_files import read_manifest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("ray_cluster", "session")


numbers = count()


class Loop:
    """A loop whose run is behind a URL, with a local worker; the test steps it by hand."""

    def __init__(self, tmp_path: Path, run_id: str = "", **given: Any) -> None:
        self.run_id = run_id or f"run{next(numbers)}"
        self.url = f"file://{tmp_path}/store/run"
        asked: dict[str, Any] = {
            "schedule": {"steps": []},
            "watch": {"enable": True},
            "tool": "spans",
            "remote": {"staging": str(tmp_path / "staging")},
        }
        config = settings(**{**asked, "save_path": self.url, "run_id": self.run_id, **given})
        worker = TrainWorker()
        worker.set_up(config)
        self.callback = ProfilingCallback(config)
        self.callback.add_workers("actor", worker)
        self.callback.on_train_begin()
        self.at = 0

    def step(self) -> None:
        """Run a step of 10 ms."""
        self.at += 1
        self.callback.on_step_begin(self.at)
        time.sleep(0.01)
        self.callback.on_step_end()

    def until(self, holds: Callable[[], object], seconds: float = 60.0) -> None:
        """Run steps until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            self.step()

    def end(self) -> None:
        """End training, and the actor as the end of the process would."""
        self.callback.on_train_end()
        for name in self.names():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    def names(self) -> list[str]:
        """Return the names of its actors."""
        return [name for name in names() if name.startswith(f"{self.run_id}-")]

    def actor(self) -> Any:
        """Return the actor that is asked."""
        [name] = self.names()
        return ray.get_actor(name, namespace=NAMESPACE)


def names() -> list[str]:
    """Return the names of all mailboxes."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE]


def address() -> str:
    """Return the address of the cluster."""
    found: str = ray.get_runtime_context().gcs_address
    return found


def environment() -> dict[str, str]:
    """Return that of a process which may connect to the cluster, as this one may."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"}


def asking(*arguments: str) -> subprocess.Popen[str]:
    """Begin to ask in another process."""
    return subprocess.Popen(
        [sys.executable, "-m", "verl_profiling.cli", "trigger", *arguments, "--ray-address", address()],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """A loop that nobody has asked for anything yet."""
    started = Loop(tmp_path)
    yield started
    started.end()


def test_another_process_asks_and_is_answered(loop: Loop, tmp_path: Path) -> None:
    """By the URL: done, the folders named by it, and the manifest says who asked."""
    asker = asking(loop.url, "--steps", "2", "--wait", "60")
    loop.until(lambda: asker.poll() is not None)
    said, _ = asker.communicate()
    assert asker.returncode == 0, said
    assert "the job runs (pid" in said
    assert f"done: {loop.url}/step_" in said
    loop.callback.on_train_end()
    steps = sorted((tmp_path / "store" / "run").glob("step_*"))
    triggers = [read_manifest(step).trigger for step in steps]
    assert [trigger.kind for trigger in triggers] == ["demand", "demand"]
    assert "@" in triggers[0].by


def test_requests_are_listed_cancelled_and_refused(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a folder: what waits, what is unknown, and what is left when training has ended."""
    assert main(["trigger", loop.run_id, "--ray", "--at", "1000", "--json"]) == 0
    request = json.loads(capsys.readouterr().out)["request"]
    assert main(["trigger", loop.url, "--list"]) == 0
    assert f"{request}" in (listed := capsys.readouterr().out)
    assert "not taken yet" in listed
    loop.until(find_job_through_ray(loop.run_id).answers)
    assert main(["trigger", loop.url, "--cancel", request]) == 0
    loop.until(lambda: find_job_through_ray(loop.run_id).answers()[0].state == "cancelled")
    assert main(["trigger", loop.url, "--cancel", request]) == 2
    assert main(["trigger", loop.url, "--at", "1000"]) == 0
    assert main(["trigger", loop.url, "--roles", "actr"]) == 0
    loop.until(lambda: find_job_through_ray(loop.run_id).answers()[-1].state == "refused")
    loop.callback.on_train_end()
    assert main(["trigger", loop.url, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "did you mean 'actor'" in listed
    assert f"refused: training ended after step {loop.at}" in listed
    assert main(["trigger", loop.url]) == 2
    assert "no job runs here: training ended" in capsys.readouterr().err


def test_of_too_many_requests_the_last_are_refused_at_once(loop: Loop) -> None:
    """The mailbox holds no more than the job would accept."""
    codes = [main(["trigger", loop.url, "--at", "1000", "--wait", "0"]) for _ in range(34)]
    assert codes == [1] * 32 + [2] * 2


NO_REQUESTS = (
    b"",
    b"{",
    b"[" * 20_000,
    b'{"id":"0123456789ab","by":"' + b"x" * 20_000 + b'"}',
    b'{"id":"../../../x"}',
    b'{"id":"0123456789ab","command":"rm"}',
    b'{"id":"0123456789ab","steps":1000000}',
    b'{"id":"0123456789ab","at":1e400}',
    b"\xff\xfe\x00",
    "text",
    None,
    {"id": "0123456789ab"},
)


def test_what_is_no_request_is_refused_and_said_once(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """To who sent it, and in the log; the loop goes on, and the next request is met."""
    actor = loop.actor()
    for data in NO_REQUESTS:
        assert ray.get(actor.ask.remote(data)) != ""
    ray.get([actor.cancel.remote(wrong) for wrong in ("../x", None, b"0123456789ab")])
    loop.until(lambda: [text for text in caplog.messages if "is no request for a capture" in text])
    assert ray.get(actor.ask.remote(b"")) != ""
    assert ray.get(actor.waiting.remote()) == []
    asked = find_job_through_ray(loop.run_id)
    demand = asked.ask(Aim(), 1, None)
    loop.until(lambda: (answer := asked.answer(demand.id)) is not None and answer.state == "done")
    assert len([text for text in caplog.messages if "is no request for a capture" in text]) == 1


def test_two_runs_at_once_are_told_apart(
    loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their ids, or the URLs that they came to; what they share names both."""
    other = Loop(tmp_path)
    assert main(["trigger", loop.url]) == 2
    said = capsys.readouterr().err
    assert f"several runs are here, name one with --run: {loop.url} (run {loop.run_id})" in said
    assert f", {loop.url}/run_2 (run {other.run_id})" in said
    assert main(["trigger", loop.url, "--run", other.run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == f"{loop.url}/run_2"
    assert len(find_job_through_ray(other.run_id).waiting()) == 1
    assert find_job_through_ray(loop.run_id).waiting() == []
    other.end()


def test_runs_of_one_name_in_two_places_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two people call theirs the same: neither hides the other, and the place says which is meant."""
    loops = [Loop(tmp_path / place, "same") for place in ("a", "b")]
    assert main(["trigger", "same", "--ray"]) == 2
    said = capsys.readouterr().err
    assert all(loop.url in said for loop in loops)
    for loop in loops:
        assert main(["trigger", loop.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == loop.url
    assert [len(find_job_through_ray(loop.url).waiting()) for loop in loops] == [1, 1]
    for loop in loops:
        loop.end()


def test_an_asker_that_goes_leaves_its_request(loop: Loop, tmp_path: Path) -> None:
    """Killed while it waits; the capture is made, and the answer is kept."""
    at = 1000
    asker = asking(loop.url, "--at", str(at), "--wait")
    loop.step()
    deadline = time.monotonic() + 60
    while not find_job_through_ray(loop.run_id).waiting():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asker.kill()
    asker.communicate()
    loop.until(find_job_through_ray(loop.run_id).answers)
    loop.at = at - 1
    loop.step()
    [answer] = find_job_through_ray(loop.run_id).answers()
    assert (answer.state, answer.folders) == ("done", [f"step_{at:06d}"])


def test_an_actor_that_is_gone_ends_nothing(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, who asks is told, and the signal works."""
    asked = find_job_through_ray(loop.run_id)
    ray.kill(loop.actor())
    loop.until(lambda: [text for text in caplog.messages if "through Ray any more" in text])
    for _ in range(3):
        loop.step()
    assert len([text for text in caplog.messages if "through Ray any more" in text]) == 1
    with pytest.raises(ProfilingError, match="gone"):
        asked.ask(Aim(), 1, None)
    with pytest.raises(TraceFormatError, match="no job in the Ray cluster can be asked for it"):
        find_job_through_ray(loop.run_id)
    os.kill(os.getpid(), signal.SIGUSR2)
    loop.step()
    assert loop.callback.last_folder is not None


def test_a_folder_that_only_the_job_sees_is_no_obstacle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``watch.ray`` the run is asked by its id as well; the log names both ways."""
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        loop = Loop(tmp_path, save_path=str(run), watch={"enable": True, "ray": True})
    assert f"trigger {run} or verl-profiling trigger --ray {loop.run_id} or SIGUSR2" in caplog.text
    for way in ([loop.run_id, "--ray"], [str(run)], [str(run), "--ray"]):
        assert main(["trigger", *way]) == 0
    asked = find_job_through_ray(loop.run_id)
    loop.until(lambda: [answer.state for answer in asked.answers()] == ["done"] * 3)
    capsys.readouterr()
    loop.end()
    assert main(["trigger", str(run), "--list"]) == 0
    assert capsys.readouterr().out.count("  done: ") == 3


def test_without_being_asked_to_a_run_in_a_folder_makes_no_actor(tmp_path: Path) -> None:
    """Nor one behind a URL whose settings forbid it."""
    for number, given in enumerate(
        ({"save_path": str(tmp_path / "run")}, {"watch": {"enable": True, "ray": False}})
    ):
        Loop(tmp_path, f"none{number}", **given).end()
    assert {name for name in names() if name.startswith("none")} == set()


# Jobs of other processes

JOB = """
import sys, time, ray
from test_asked_through_ray import Loop
from pathlib import Path

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
loop = Loop(Path(sys.argv[2]), "again")
print("begun", flush=True)
while True:
    loop.step()
"""


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a loop in a process that is a job of its own; return when it has begun."""
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, address(), str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    return job


def test_a_killed_job_is_known_to_be_gone_and_its_next_start_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The actor dies with the job; of two starts of one run the later one is asked."""
    job = started(tmp_path)
    url = f"file://{tmp_path}/store/run"
    assert main(["trigger", url, "--at", "1000000", "--wait", "0"]) == 1
    first = find_job_through_ray("again")
    job.kill()
    job.communicate()
    again = started(tmp_path)
    try:
        asked = find_job_through_ray("again")
        assert asked.state.begun_ns > first.state.begun_ns
        assert asked.state.process.pid == again.pid
        assert (asked.answers(), asked.waiting()) == ([], [])
        assert main(["trigger", url, "--wait", "60"]) == 0
    finally:
        again.kill()
        again.communicate()
        for part in tmp_path.rglob(".*.part"):  # what was being written
            part.unlink()
    capsys.readouterr()
    deadline = time.monotonic() + 30
    while main(["trigger", url]) != 2:
        assert time.monotonic() < deadline
    said = capsys.readouterr().err
    assert "is gone" in said or "no job in the Ray cluster can be asked" in said


LEFT = """
import sys
import ray
from example_loops import settings
from fleet import TrainWorker, WorkerGroup
from verl_profiling import ProfilingCallback

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
watch = {"enable": True, "ray": True, "every": 100}
config = settings(save_path=sys.argv[2], schedule={"steps": []}, watch=watch, tool="spans")
actor, other = (ray.remote(num_cpus=0)(TrainWorker).remote() for _ in range(2))
profiling = ProfilingCallback(config)
profiling.add_workers("actor", actor)
profiling.add_workers("critic", WorkerGroup([other]))
with profiling:
    for step in range(1, 6):
        profiling.on_step_begin(step)
        if step == 3:
            ray.shutdown()
        profiling.on_step_end()
assert not ray.is_initialized()
"""


def test_a_loop_that_has_left_its_cluster_starts_no_other(tmp_path: Path) -> None:
    """A call to an actor would: neither the actor that is asked is called, nor the workers."""
    left = [sys.executable, "-c", LEFT, address(), str(tmp_path)]
    done = subprocess.run(left, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("captures cannot be asked for through Ray any more") == 1
    assert "read_watch raised RuntimeError: this process has left its Ray cluster" in done.stderr


@pytest.mark.parametrize("where", ["file:///nowhere/run", "s3://bucket/run", "x"])
def test_no_such_run_is_said_with_those_that_there_are(
    loop: Loop, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """At once."""
    assert main(["trigger", where, "--ray"]) == 2
    said = capsys.readouterr().err
    assert f"{where}: no job in the Ray cluster can be asked for it" in said
    assert f"{loop.run_id} ({loop.url})" in said


def test_no_cluster_is_said_at_once() -> None:
    """Where none runs, nothing is started, and an address of which nobody answers is not waited for."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "verl_profiling.cli", "trigger", "x", "--ray-address", "127.0.0.1:9"],
        env={**environment(), "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "trigger: no Ray cluster at 127.0.0.1:9" in done.stderr
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - begin < 15
