"""A running loop is asked for captures, through the folder of its run: real loops, real files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from conftest import Pool
from example_loops import settings
from fleet import TrainWorker

from verl_profiling import ProfilingCallback, ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import CaptureRequest, CaptureSelection, Trigger
from verl_profiling.cli import main
from verl_profiling.commands.trigger import find_job
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.run import Run
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest
from verl_profiling.settings.schedule import Decision, StepRange


def wait_until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def configured(tmp_path: Path, **given: Any) -> ProfilingConfig:
    """Return settings of a job that captures what it is asked for."""
    asked = {"schedule": {"steps": []}, "watch": {"enable": True}, "tool": "spans"}
    return settings(**{"save_path": str(tmp_path / "run"), **asked, **given})


@dataclass(frozen=True)
class Request:
    """A request that was sent to a run."""

    run: Path
    id: str

    @property
    def captures(self) -> list[Manifest]:
        """The captures that were made of it, in order."""
        found = map(read_manifest, sorted(self.run.glob("step_*")))
        return [manifest for manifest in found if manifest.trigger.request == self.id]

    @property
    def steps(self) -> list[int]:
        return [step for manifest in self.captures for step in manifest.steps]

    @property
    def refusal(self) -> str:
        file = self.run / "requests" / f"{self.id}.refused"
        return file.read_text() if file.exists() else ""


class Job:
    """A loop with a local worker that the test steps by hand."""

    def __init__(self, config: ProfilingConfig, *, worker: Any = None) -> None:
        self.run = Path(config.save_path)
        self.callback = ProfilingCallback(config)
        if worker is None:
            worker = TrainWorker()
            worker.set_up(config)
        self.callback.add_workers("actor", worker)
        self.callback.on_train_begin()
        self.at = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.at += 1
            self.callback.on_step_begin(self.at, policy_version=10 + self.at)
            with self.callback.stage("update_actor"):
                pass
            self.callback.on_step_end()

    def ask(self, selection: CaptureSelection | None = None, steps: int = 1) -> Request:
        return Request(self.run, find_job(self.run).ask(selection or CaptureSelection(), steps))

    @contextlib.contextmanager
    def stepping_once_asked(self, times: int = 1) -> Iterator[None]:
        """Run steps beside what the block does, as soon as a request is there."""

        def step() -> None:
            wait_until(lambda: list(self.run.glob("requests/*.json")))
            self.step(times)

        stepping = threading.Thread(target=step)
        stepping.start()
        try:
            yield
        finally:
            stepping.join()

    def captured(self) -> list[int]:
        return [int(path.name[5:11]) for path in sorted(self.run.glob("step_*"))]


@pytest.fixture
def job(tmp_path: Path, session: Session) -> Iterator[Job]:
    """A job that nobody has asked for anything yet."""
    started = Job(configured(tmp_path))
    yield started
    started.callback.on_train_end()


def test_the_next_step_is_captured(job: Job) -> None:
    """By whom and why is in the manifest; the file goes when it is taken."""
    job.step(2)
    request = job.ask()
    job.callback.on_step_begin(3)
    assert list((job.run / "requests").iterdir()) == []
    job.callback.on_step_end()
    [manifest] = request.captures
    assert (manifest.step, manifest.complete) == (3, True)
    assert manifest.trigger.kind == "demand"
    assert "@" in manifest.trigger.by


def test_who_asks_for_a_stage_that_only_the_loop_marks_reads_why_nothing_is_recorded(
    tmp_path: Path, session: Session
) -> None:
    """The loop's stages are in the manifest, but no worker's tool can record them apart."""
    job = Job(configured(tmp_path, tool="torch"))
    request = job.ask(CaptureSelection(stages=("update_actor",)))
    job.step()
    job.callback.on_train_end()
    [worker] = request.captures[0].workers
    assert (worker.status, worker.artifacts) == ("skipped", [])
    assert worker.reason == (
        "no selected stage ran (selected: update_actor; ran: none): the loop's own stages do "
        "not count; "
        "mark one in the worker with verl_profiling.stage"
    )


@pytest.mark.parametrize("continuous", [False, True])
def test_several_steps_are_captured_as_the_schedule_has_them(
    tmp_path: Path, session: Session, continuous: bool
) -> None:
    """One after another: a folder each, or one for all."""
    job = Job(configured(tmp_path, schedule={"steps": [], "continuous": continuous}))
    job.step(2)
    request = job.ask(steps=2)
    job.step(4)
    job.callback.on_train_end()
    assert request.steps == [3, 4]
    assert job.captured() == ([3] if continuous else [3, 4])


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        (CaptureSelection(roles=("actr",)), "did you mean 'actor'"),
        (CaptureSelection(tools=("os:system",)), "unknown tool 'os:system'"),
        (CaptureSelection(tools=("torch", "nsys")), "cannot record together"),
        (CaptureSelection(ranks=(7,)), "ranks: no worker has 7; there are 0 to 0"),
        (CaptureSelection(replicas=(1,)), "replicas: no worker has 1; there are none"),
        (CaptureSelection(stages=("a",), mode="e2e"), "discrete mode"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_reason(
    job: Job, caplog: pytest.LogCaptureFixture, selection: CaptureSelection, reason: str
) -> None:
    """At the next step's begin; the loop goes on, and says it once."""
    request = job.ask(selection)
    job.step(2)
    assert reason in request.refusal
    assert job.captured() == []
    assert len([message for message in caplog.messages if "is refused" in message]) == 1


def test_what_training_does_not_come_to_is_refused(job: Job) -> None:
    """Also the rest of several steps, and what nobody has taken."""
    many = job.ask(steps=5)
    job.step(2)
    late = job.ask()
    job.callback.on_train_end()
    assert [many.refusal, late.refusal] == ["training ended after step 2"] * 2
    assert many.steps == [1, 2]


def test_requests_get_one_step_after_another(job: Job) -> None:
    requests = [job.ask(), job.ask(CaptureSelection(mode="discrete")), job.ask()]
    job.step(4)
    assert [request.steps for request in requests] == [[1], [2], [3]]


def test_the_schedule_comes_first_and_a_request_joins_it(tmp_path: Path, session: Session) -> None:
    """Without a selection; one with a selection takes the next step
    that the schedule leaves alone.
    """
    job = Job(configured(tmp_path, schedule={"steps": [1, 2]}))
    plain, aimed = job.ask(), job.ask(CaptureSelection(mode="discrete"))
    job.step(4)
    job.callback.on_train_end()
    [joined], [other] = plain.captures, aimed.captures
    assert (joined.step, joined.trigger.kind, joined.workers[0].mode) == (1, "schedule", "e2e")
    assert (other.step, other.trigger.kind, other.workers[0].mode) == (3, "demand", "discrete")


def test_a_schedule_of_every_step_starves_nobody(tmp_path: Path, session: Session) -> None:
    """A request with a selection takes the place of the schedule's capture."""
    job = Job(configured(tmp_path, schedule={"every": 1}))
    request = job.ask(CaptureSelection(mode="discrete"), steps=2)
    job.step(3)
    job.callback.on_train_end()
    assert request.steps == [1, 2]
    assert [manifest.workers[0].mode for manifest in request.captures] == ["discrete"] * 2
    assert job.captured() == [1, 2, 3]


def test_a_request_goes_on_after_the_scheduled_capture_that_it_joins(
    tmp_path: Path, session: Session
) -> None:
    job = Job(configured(tmp_path, schedule={"steps": [2], "continuous": True}))
    job.step()
    request = job.ask(steps=3)
    job.step(4)
    job.callback.on_train_end()
    assert [manifest.steps for manifest in request.captures] == [[2], [3, 4]]


def test_a_person_comes_before_the_watch_which_waits(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One capture a step: the watch gets the next one."""
    due = [
        Decision(
            StepRange(3, 3),
            Trigger(kind="anomaly", reason="it is slow"),
            CaptureSelection(mode="discrete"),
        )
    ]
    monkeypatch.setattr(
        Anomalies, "asks", lambda _, step, scheduled: due.pop() if step > 1 and due else None
    )
    job = Job(configured(tmp_path, watch={"enable": True, "trigger": {}}))
    job.step()
    job.ask()
    job.step(2)
    job.callback.on_train_end()
    found = [read_manifest(job.run / f"step_{step:06d}") for step in (2, 3)]
    assert [one.trigger.kind for one in found] == ["demand", "anomaly"]
    assert [one.workers[0].mode for one in found] == ["e2e", "discrete"]


def test_a_capture_that_goes_on_is_not_interrupted(tmp_path: Path, session: Session) -> None:
    """A request waits until it is over; a warm-up, which would be discarded, gives way."""
    job = Job(configured(tmp_path, schedule={"steps": [1, 2, 3], "continuous": True}))
    job.step()
    request = job.ask()
    job.step(4)
    job.callback.on_train_end()
    assert request.steps == [4]
    assert read_manifest(job.run / "step_000001").steps == [1, 2, 3]
    warm = {"warmup": 1, "wait": 0, "active": 1, "repeat": 1}
    job = Job(configured(tmp_path, save_path=str(tmp_path / "warm"), schedule=warm))
    job.ask()
    job.step(2)
    job.callback.on_train_end()
    assert job.captured() == [1, 2]


def _no_space(*given: object, **others: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at", ["begin", "end", "limit"])
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The capture is lost, and who asked is told at once; the loop goes on."""
    job = Job(configured(tmp_path, limits={"min_free_bytes": "1000000TB"} if at == "limit" else {}))
    request = job.ask()
    with monkeypatch.context() as full:
        if at == "begin":
            full.setattr(Path, "mkdir", _no_space)
        elif at == "end":
            full.setattr(Run, "write", _no_space)
        job.step()
    reason = {
        "begin": "could not begin: [Errno 28]",
        "end": "could not be written",
        "limit": "min_free_bytes",
    }
    assert reason[at] in request.refusal
    job.step()
    job.callback.on_train_end()
    assert job.captured() == ([1] if at == "end" else [])


def test_a_signal_captures_the_next_step(tmp_path: Path, session: Session) -> None:
    """And no other; the manifest says that it was one.
    The folder of requests may be gone by then.
    """
    job = Job(configured(tmp_path))
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
    job.step()
    (job.run / "requests").rename(job.run / "moved")
    job.step()
    os.kill(os.getpid(), signal.SIGUSR2)
    job.step(2)
    assert job.captured() == [3]
    assert read_manifest(job.run / "step_000003").trigger.by == "SIGUSR2"
    job.callback.on_train_end()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("watched", [True, False])
def test_a_handler_of_the_user_stays(tmp_path: Path, session: Session, watched: bool) -> None:
    """And none is set without the watch, which would listen; nor is there a folder then."""
    mine: Any = (lambda *_: None) if watched else signal.SIG_DFL
    signal.signal(signal.SIGUSR2, mine)
    try:
        job = Job(
            configured(
                tmp_path, watch={"enable": watched}, schedule={"steps": [] if watched else [9]}
            )
        )
        job.step()
        assert signal.getsignal(signal.SIGUSR2) is mine
        job.callback.on_train_end()
        assert signal.getsignal(signal.SIGUSR2) is mine
        assert job.run.exists() == watched
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_ray_actors_record_what_was_asked_for(tmp_path: Path, pool: Pool) -> None:
    """Rank 1 alone, by stage; the others are not in the capture."""
    config = configured(tmp_path, tool="torch")
    ray.get([worker.set_up.remote(config, "actor", rank) for rank, worker in enumerate(pool.sync)])
    job = Job(config, worker=pool.sync)
    job.ask(CaptureSelection(ranks=(1,), stages=("update_actor",)))
    job.callback.on_step_begin(1)
    ray.get([worker.work.remote() for worker in pool.sync])
    job.callback.on_step_end()
    job.callback.on_train_end()
    manifest = read_manifest(job.run / "step_000001")
    assert manifest.trigger.stage == "update_actor"
    [result] = manifest.workers
    assert (result.name, result.status) == ("actor_rank1", "ok")
    assert [artifact.path for artifact in result.artifacts] == [
        "actor_rank1.update_actor.torch.json.gz"
    ]


def put(job: Job, name: str, data: bytes) -> Path:
    path = job.run / "requests" / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 20_000,
        b'{"id":"0123456789ab","selection":' + b'{"mode":' * 900 + b"}",
        b'{"id":"0123456789ab","by":"' + b"x" * 20_000 + b'"}',
        b'{"id":"../../../x"}',
        b'{"id":"0123456789ac"}',
        b'{"id":"0123456789ab","command":"rm"}',
        b'{"id":"0123456789ab","steps":1000000}',
        b'{"id":"0123456789ab","steps":1e400}',
        b'{"id":"0123456789ab","selection":{"tools":"torch"}}',
        b"\xff\xfe\x00",
    ],
)
def test_what_is_no_request_is_refused(
    job: Job, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    put(job, "0123456789ab.json", data)
    job.step(3)
    [refusal] = (job.run / "requests").iterdir()
    assert refusal.name == "0123456789ab.refused"
    assert refusal.read_text().startswith("the file is no request for a capture: ")
    assert len([message for message in caplog.messages if "is no request" in message]) == 1
    assert job.captured() == []
    request = job.ask()
    job.step()
    assert request.steps == [job.at]


def test_links_pipes_and_folders_are_not_opened(job: Job, tmp_path: Path) -> None:
    """A link to a good request neither; a pipe would be waited for without an end."""
    requests = job.run / "requests"
    good = tmp_path / "0123456789ab.json"
    good.write_text('{"id":"0123456789ab"}')
    (requests / good.name).symlink_to(good)
    os.mkfifo(requests / "pipe.json")
    (requests / "folder.json").mkdir()
    job.step(2)
    assert (job.captured(), good.exists()) == ([], True)
    request = job.ask()
    job.step()
    assert request.steps == [job.at]


def test_nothing_is_removed_behind_a_link(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who may write the folder may ask, and cannot have the job's user empty another folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0.json").write_text("mine")
    (job.run / "requests").rename(tmp_path / "moved")
    (job.run / "requests").symlink_to(elsewhere)
    job.step(3)
    job.callback.on_train_end()
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("0.json", "mine")]
    assert "is a link" in caplog.text


def test_what_is_logged_of_a_request_is_one_line(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks writes no line of their own into the log, and no control characters."""
    put(job, "a\nERROR\x1b[31m.json", b"x")
    demand = CaptureRequest(
        id="0123456789ab", by="me\nERROR\x1b[31m", selection=CaptureSelection(roles=("no\nbody",))
    )
    put(job, f"{demand.id}.json", msgspec.json.encode(demand))
    job.step()
    assert len(caplog.messages) == 2
    assert all(text.isprintable() for text in caplog.messages)


def test_a_job_is_alive_then_ended(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.step(2)
    assert main(["trigger", str(job.run)]) == 0
    assert "the job runs (pid" in capsys.readouterr().out
    job.callback.on_train_end()
    assert main(["trigger", str(job.run)]) == 2
    assert "no job runs here: training ended after step 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said", "code"),
    [
        ([], "accepted: the captures", 0),
        (["--roles", "actr"], "refused: roles: no workers were added as 'actr'", 1),
    ],
)
def test_the_command_waits_for_the_answer(
    job: Job, capsys: pytest.CaptureFixture[str], asked: list[str], said: str, code: int
) -> None:
    """Which comes when the next step begins; until then it can only say that."""
    assert main(["trigger", str(job.run), "--wait", "0"]) == 1
    assert "not accepted yet" in capsys.readouterr().out
    job.step()
    with job.stepping_once_asked():
        assert main(["trigger", str(job.run), *asked, "--wait", "20"]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "101"], "<= 100"),
        (["--ranks", "0-99999"], "length <= 4096"),
        (["--ranks", "x"], "is not a list of ranks"),
        (["--stages", "a", "--mode", "e2e"], "discrete mode"),
    ],
)
def test_what_is_known_to_be_wrong_is_said_at_once(
    job: Job, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["trigger", str(job.run), *options]) == 2
    assert said in capsys.readouterr().err
    assert not list(job.run.glob("requests/*.json"))


def test_no_job_was_ever_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trigger", str(tmp_path)]) == 2
    assert "set watch.enable=true" in capsys.readouterr().err
    assert main(["trigger", str(tmp_path / "none")]) == 2
    for damage in (b"", b"[]", b'{"run_id": "\xff"}', b"[" * 100_000):
        (tmp_path / "run.json").write_bytes(damage)
        assert main(["trigger", str(tmp_path)]) == 2


LOOP = """
import sys, time
from example_loops import settings
from fleet import TrainWorker
from verl_profiling import ProfilingCallback

config = settings(
    save_path=sys.argv[1], run_id=sys.argv[2], tool="spans", schedule={"steps": []},
    watch={"enable": True}
)
worker = TrainWorker()
worker.set_up(config)
profiling = ProfilingCallback(config)
profiling.add_workers("actor", worker)
with profiling:
    for step in range(1, 20_000):
        profiling.on_step_begin(step)
        time.sleep(0.02)
        profiling.on_step_end()
"""


@pytest.fixture
def start_loop(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a loop of 20 ms a step in a process of its own."""
    processes = []
    here = Path(__file__).parents[1]

    def start(run: Path, run_id: str = "a") -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": f"{here.parent}:{here}"}
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(run), run_id], env=environment, cwd=tmp_path
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_of_two_jobs_in_one_folder_one_is_named(
    tmp_path: Path,
    start_loop: Callable[..., subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its folder or its ``run.json``; without that they are listed.
    A killed one is seen at once.
    """
    save_path = tmp_path / "run"
    loop = start_loop(save_path, "a")
    wait_until((save_path / "requests").exists)
    start_loop(save_path, "b")
    wait_until((save_path / "run_2" / "requests").exists)
    assert main(["trigger", str(save_path)]) == 2
    said = f"choose one: {save_path}/run.json, {save_path}/run_2/run.json"
    assert said in capsys.readouterr().err
    assert main(["trigger", str(save_path / "run.json"), "--wait", "20"]) == 0
    assert main(["trigger", str(save_path / "run_2"), "--wait", "20"]) == 0
    wait_until(lambda: list(save_path.glob("step_*")) and list(save_path.glob("run_2/step_*")))
    loop.kill()
    loop.wait()
    assert main(["trigger", str(save_path / "run.json")]) == 2
    assert "is gone" in capsys.readouterr().err, "nobody is asked in vain"


def test_asking_imports_nothing_heavy(job: Job, run_python: Callable[..., Any]) -> None:
    """So that the answer comes in a fraction of a second, also beside other work."""
    run_python(
        """
        import sys
        from verl_profiling.cli import main
        main(["trigger", sys.argv[1]])
        heavy = {"torch", "ray", "rich", "fsspec", "numpy", "verl_profiling.report"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """,
        job.run,
    )


def test_a_run_behind_a_url_is_asked_there(
    tmp_path: Path,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its folder is listed in the background, and so are refusals written."""
    monkeypatch.setattr("verl_profiling.controller.decision.LIST_S", 0.05)
    monkeypatch.setattr("verl_profiling.commands.trigger._URL_PAUSE_S", 1.0)
    url = f"file://{tmp_path}/store/run"
    job = Job(configured(tmp_path, save_path=url))
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(0.05):
            job.step()

    training = threading.Thread(target=train)
    training.start()
    try:
        assert main(["trigger", url, "--wait", "60"]) == 0
        wait_until(lambda: list(tmp_path.glob("store/run/step_*/manifest.json")))
        assert main(["trigger", url, "--roles", "actr", "--wait", "60"]) == 1
        assert "did you mean 'actor'" in capsys.readouterr().out
    finally:
        stop.set()
        training.join()
        job.callback.on_train_end()


def test_a_request_behind_a_url_that_no_step_read_is_refused(
    tmp_path: Path, session: Session
) -> None:
    job = Job(configured(tmp_path, save_path=(url := f"file://{tmp_path}/store/run")))
    request = find_job(url).ask(CaptureSelection(), 1)
    job.step()
    job.callback.on_train_end()
    refusal = tmp_path / "store" / "run" / "requests" / f"{request}.refused"
    assert refusal.read_text() == "training ended after step 1"


def test_a_worker_that_cannot_is_named_and_the_loop_goes_on(
    tmp_path: Path, session: Session
) -> None:
    job = Job(configured(tmp_path, strict=True))
    job.ask(CaptureSelection(tools=("nsys",)))
    job.step(2)
    job.callback.on_train_end()
    [worker] = read_manifest(job.run / "step_000001").workers
    assert worker.reason.startswith("tools=nsys cannot be captured by this process: ")
    assert worker.status == "skipped"
