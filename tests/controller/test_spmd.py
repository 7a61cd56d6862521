"""One program on every rank: two processes, a callback in each, one manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from conftest import ROOT
from fleet import TrainWorker
from test_callback import configured, local_worker, manifest, run

from verl_profiling import ConfigError, ProfilingCallback
from verl_profiling.aim import Aim
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import Session
from verl_profiling.commands.asking import find_job
from verl_profiling.controller.channel import FileChannel, StoreChannel, find_leader_files, lead_files
from verl_profiling.demand import Answer
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import Manifest
from verl_profiling.report.check import check
from verl_profiling.run_files import read_manifest, read_starts

PROGRAM = Path(__file__).with_name("spmd_program.py")
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "tests")))

pytestmark = pytest.mark.timeout(180)


def ranks(folder: Path, scenario: str, *, distributed: bool = True, **settings: Any) -> list[tuple[int, str]]:
    """Run the program on two ranks; return exit status and log of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if distributed else {}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder / "run"), scenario, json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": PATHS, "RANK": str(rank), "WORLD_SIZE": "2", **where},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, log) for process, log in zip(processes, logs, strict=True)]


def steps(folder: Path) -> list[Manifest]:
    """Return the manifests of steps 2 and 3."""
    return [read_manifest(folder / "run" / f"step_{step:06d}") for step in (2, 3)]


def fates(written: Manifest) -> list[tuple[str, str]]:
    """Return name and status of each worker."""
    return [(worker.name, worker.status) for worker in written.workers]


BOTH = [("actor_rank0", "ok"), ("actor_rank1", "ok")]


@pytest.mark.parametrize("scenario", ["store", "environment"])
def test_both_ranks_are_in_one_manifest(tmp_path: Path, scenario: str) -> None:
    """With ``torch.distributed``, and with nothing but RANK and WORLD_SIZE; nothing else is left behind."""
    results = ranks(tmp_path, scenario, distributed=scenario == "store")
    assert [status for status, _ in results] == [0, 0], results
    for written in steps(tmp_path):
        assert fates(written) == BOTH, [worker.reason for worker in written.workers]
        assert len({worker.identity.pid for worker in written.workers}) == 2
        assert [worker.identity.world_size for worker in written.workers] == [2, 2]
        for worker in written.workers:
            assert [(span.name, span.depth) for span in worker.stages] == [("reward", 0), ("update_actor", 0)]
        assert [span.name for span in written.stages] == ["reward", "update_actor"], "the step's anatomy"
        assert (written.metrics, written.notes) == ({"reward": 0.0}, [])
    root = tmp_path / "run"
    assert sorted(path.name for path in root.iterdir()) == ["run.json", "step_000002", "step_000003"]
    assert check(root).ok


@pytest.mark.parametrize("distributed", [True, False])
def test_all_ranks_record_what_rank_0_was_asked_for(tmp_path: Path, distributed: bool) -> None:
    """Rank 0 tells the others some steps before, over the store or files; the aim holds for all."""
    answers: list[Answer] = []

    def ask() -> None:
        loop = tmp_path / "run" / "control" / "loop.json"
        try:
            while not (loop.exists() and (find_job(tmp_path / "run").state.step or 0) > 3):
                time.sleep(0.05)
            job = find_job(tmp_path / "run")
            for aim, steps_, at in (
                (Aim(), 2, None),
                (Aim(ranks=(1,), mode="discrete"), 1, None),
                (Aim(), 1, 9),
            ):
                demand = job.ask(aim, steps_, job.state.step + 1 if at else None)
                answers.append([*job.follow(demand.id, 40.0)][-1])
        finally:
            (tmp_path / "stop").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    given: dict[str, Any] = {"schedule": {"steps": []}, "watch": {"enable": True}}
    results = ranks(tmp_path, "asked", distributed=distributed, **given)
    asking.join()
    assert [status for status, _ in results] == [0, 0], results
    both, aimed, early = answers
    assert (both.state, both.complete, len(both.folders)) == ("done", True, 2), results
    for name in both.folders:
        assert fates(read_manifest(tmp_path / "run" / name)) == BOTH
    assert [(worker.name, worker.status) for worker in aimed.workers] == [("actor_rank1", "ok")]
    assert read_manifest(tmp_path / "run" / aimed.folders[0]).workers[0].mode == "discrete"
    assert (early.state, "too early" in early.reason) == ("refused", True)


def test_a_second_start_of_all_ranks_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Both ranks go to ``run_2``; with a name, both continue."""
    said = [ranks(tmp_path, "environment", distributed=False) for _ in range(2)]
    second = sorted((tmp_path / "run" / "run_2").glob("step_*"))
    assert [fates(read_manifest(step)) for step in second] == [BOTH, BOTH], said
    assert [fates(written) for written in steps(tmp_path)] == [BOTH, BOTH], said
    assert len(read_starts(tmp_path / "run")) == 1


def test_a_named_run_that_all_ranks_resume_has_one_more_start(tmp_path: Path) -> None:
    """Rank 0 alone puts it on record, though all ranks begin to train, and says which step never came."""
    given: dict[str, Any] = {"run_id": "r", "schedule": {"steps": [2, 3, 9]}}
    logs = [ranks(tmp_path, "environment", distributed=False, **given) for _ in range(2)]
    run = tmp_path / "run"
    starts = read_starts(run)
    assert [(start.start, start.last_step, start.never_came) for start in starts] == [
        (1, 4, [9]),
        (2, 4, [9]),
    ]
    assert [start.start for start in starts[0].later_starts] == [2]
    assert sorted(path.name for path in run.glob("run*")) == ["run.2.json", "run.json"]
    assert len(list(run.glob("step_*"))) == 4
    for (_, leader), (_, follower) in logs:
        assert leader.count("step 9 never came") == 1
        assert "never came" not in follower


def test_a_rank_that_is_killed_is_a_failed_entry_at_once(tmp_path: Path) -> None:
    """Rank 0 sees that the process is gone, waits no longer, and says which it was."""
    begin = time.monotonic()
    (status, log), (killed, _) = ranks(
        tmp_path, "killed", timeouts={"start_s": 90, "stop_s": 90, "finish_s": 90}
    )
    assert (status, killed) == (0, -9), log
    assert time.monotonic() - begin < 80
    for written in steps(tmp_path):
        assert fates(written) == [("actor_rank0", "ok"), ("actor_rank1", "failed")]
    lost = steps(tmp_path)[0].workers[1]
    assert f"rank 1 (pid {lost.identity.pid} on {lost.identity.host}) ended during the step" == lost.reason
    result = check(tmp_path / "run")
    assert not result.ok
    assert lost.reason in [entry.reason for entry in result.artifacts]


def test_a_rank_that_answers_late_is_taken_in(tmp_path: Path) -> None:
    """It failed as far as the step's manifest knew; once it has answered, it is ok, with a note."""
    results = ranks(tmp_path, "late", timeouts={"start_s": 20, "stop_s": 1, "finish_s": 20})
    assert [status for status, _ in results] == [0, 0], results
    assert "actor_rank1 was not captured: rank 1" in results[0][1]
    first, second = steps(tmp_path)
    assert (fates(first), fates(second)) == (BOTH, BOTH)
    [note] = first.notes
    assert note.startswith("actor_rank1 answered late: rank 1 (pid ")
    assert re.search(r"had not ended the step \d+ s after rank 0 ended it", note)
    assert [span.name for span in first.workers[1].stages] == ["reward", "update_actor"]


def test_a_rank_whose_step_raises_keeps_what_it_recorded(tmp_path: Path) -> None:
    """It hands over its part; rank 0 goes on without it, and names it in the next step."""
    results = ranks(tmp_path, "raises")
    assert [status for status, _ in results] == [0, 0], results
    first, second = steps(tmp_path)
    assert fates(first) == BOTH
    assert fates(second) == [("actor_rank0", "ok"), ("actor_rank1", "failed")]


def test_a_callback_on_rank_0_alone_waits_once_and_says_what_to_do(tmp_path: Path) -> None:
    """The ranks without one are failed entries, until ``spmd: false`` says that it is one for all."""
    timeouts = {"start_s": 2, "stop_s": 60, "finish_s": 60}
    begin = time.monotonic()
    (status, log), _ = ranks(tmp_path, "no callback", distributed=False, timeouts=timeouts)
    assert status == 0, log
    assert time.monotonic() - begin < 50
    for written in steps(tmp_path):
        assert fates(written) == [("actor_rank0", "ok"), ("actor_rank1", "failed")]
        assert "rank 1 took no part" in written.workers[1].reason
        assert "set spmd: false where it is one for all" in written.workers[1].reason
    (tmp_path / "alone").mkdir()
    (status, log), _ = ranks(tmp_path / "alone", "no callback", distributed=False, spmd=False)
    assert (status, [fates(written) for written in steps(tmp_path / "alone")]) == (0, [[BOTH[0]]] * 2), log


def test_the_clock_of_another_host_is_measured(tmp_path: Path) -> None:
    """Rank 1's is 5 s ahead, and corrected to within its bound."""
    results = ranks(tmp_path, "clock")
    assert [status for status, _ in results] == [0, 0], results
    for written in steps(tmp_path):
        assert fates(written) == BOTH
        [clock] = [clock for clock in written.clocks if clock.clock_domain == "elsewhere"]
        assert clock.samples == 8
        assert abs(clock.offset_ns - 5_000_000_000) <= clock.error_ns < 500_000_000
        begin_ns = written.workers[1].stages[0].begin_ns - written.offset_ns(written.workers[1].identity)
        assert abs(begin_ns - written.begin_ns) < 4_000_000_000


def test_an_async_loop_is_not_held_up(tmp_path: Path) -> None:
    """While rank 0 waits for rank 1, its event loop goes on."""
    results = ranks(tmp_path, "async")
    assert [status for status, _ in results] == [0, 0], results
    assert [fates(written) for written in steps(tmp_path)] == [BOTH, BOTH]


# One process


class Group:
    """A worker group in the manner of verl's, of one worker."""

    world_size = 1

    def __init__(self, worker: TrainWorker) -> None:
        self.workers = [worker]

    def execute_all_async(self, method: str, *arguments: Any) -> list[Any]:
        """Call all workers."""
        return [getattr(worker, method)(*arguments) for worker in self.workers]


def test_a_driver_of_other_processes_has_no_peers(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RANK and WORLD_SIZE may be those of whatever started it: its workers are no objects of its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = configured(tmp_path, timeouts={"start_s": 1, "stop_s": 1, "finish_s": 1})
    callback = ProfilingCallback(config)
    callback.add_workers("actor", Group(local_worker(config)))
    run(callback, lambda step: None)
    assert [worker.status for worker in manifest(config).workers] == ["ok"]


@pytest.mark.parametrize(("rank", "world_size"), [("1", "1"), ("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")])
def test_an_environment_that_names_no_rank_of_several_is_one_process(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    """Nobody is waited for; ``spmd: true`` says what is missing."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    config = configured(tmp_path)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", local_worker(config))
    run(callback, lambda step: None)
    assert [worker.status for worker in manifest(config).workers] == ["ok"]
    strict = configured(tmp_path / "strict", spmd=True, strict=True)
    callback = ProfilingCallback(strict)
    with pytest.raises(ConfigError, match=r"spmd: no rank: initialise torch\.distributed, or set RANK"):
        callback.on_step_begin(2)


def test_a_rank_that_nobody_leads_gives_up_and_trains_on(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for rank 0 once, says so, and looks only once in later steps."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = configured(
        tmp_path, schedule={"steps": [1, 2, 3]}, timeouts={"start_s": 1, "stop_s": 1, "finish_s": 1}
    )
    callback = ProfilingCallback(config)
    callback.add_workers("actor", local_worker(config))
    begin = time.monotonic()
    run(callback, lambda step: None)
    assert time.monotonic() - begin < 5
    assert "step 1: rank 1 is not captured: rank 0 has not begun this step within 1 s" in caplog.text
    assert not Path(config.save_path).exists()


def test_a_worker_has_the_rank_of_its_process(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told another."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for given, expected in (({}, (3, 8)), ({"rank": 0, "world_size": 2}, (0, 2))):
        worker = TrainWorker()
        worker.init_capture(configured(tmp_path), role="actor", **given)
        request = CaptureRequest(capture_id="c", run_id="r", step=1, folder=str(tmp_path / "step_000001"))
        identity = worker.start_capture(request).identity
        worker.stop_capture()
        session.reset()
        assert (identity.rank, identity.world_size) == expected


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, 20 << 20])
@pytest.mark.parametrize("kind", ["store", "files"])
def test_values_of_any_size_travel(tmp_path: Path, kind: str, size: int) -> None:
    """A store has a limit of 8 MiB; what was taken is gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    channel = StoreChannel(store, "test") if kind == "store" else FileChannel(tmp_path)
    value = os.urandom(size)
    assert channel.get("a/b") is None
    assert channel.take("a/b") is None
    channel.put("a/b", value)
    assert channel.get("a/b") == value
    assert channel.take("a/b") == value
    assert channel.get("a/b") is None


def test_a_value_that_comes_while_it_is_asked_for_is_not_lost(tmp_path: Path) -> None:
    """It may come right after the look that did not find it; each of 300 is taken in the end."""
    channel = FileChannel(tmp_path)
    names = [f"part/{number}" for number in range(300)]
    asked = [threading.Event() for _ in names]

    def send() -> None:
        for name, wanted in zip(names, asked, strict=True):
            wanted.wait(60)
            channel.put(name, b"1")

    def taken(name: str) -> bytes | None:
        deadline = time.monotonic() + 20
        while (value := channel.take(name)) is None and time.monotonic() < deadline:
            pass
        return value

    sender = threading.Thread(target=send)
    sender.start()
    lost = []
    for name, wanted in zip(names, asked, strict=True):
        wanted.set()
        if taken(name) is None:
            lost.append(name)
            break
    for wanted in asked:
        wanted.set()
    sender.join()
    assert lost == []


def test_nothing_of_a_closed_folder_stays_whoever_writes_there(tmp_path: Path) -> None:
    """A rank that is late gets an error, and leaves no file behind; of 50 closes."""

    def write(channel: FileChannel) -> None:
        with contextlib.suppress(OSError):
            for _ in range(5000):
                channel.put("end/1", b"1")

    for _ in range(50):
        channel = lead_files(tmp_path)
        writing = threading.Thread(target=write, args=(channel,))
        writing.start()
        while not channel.has("end/1"):
            pass
        channel.close()
        writing.join()
        assert channel.closed
        assert list(tmp_path.iterdir()) == []


def test_what_a_crashed_job_left_is_passed_over(tmp_path: Path) -> None:
    """Its process is gone; where that cannot be seen, it is older than this one."""
    lead_files(tmp_path)
    now_ns = time.time_ns()
    assert find_leader_files(tmp_path, now_ns + 10**12) is not None, "it lives: this process"
    [leader] = tmp_path.rglob("leader")
    told = json.loads(leader.read_bytes())
    for change, expected in (
        ({"started": "1"}, False),
        ({"clock_domain": "elsewhere"}, True),
        ({"clock_domain": "elsewhere", "begin_ns": now_ns - 10**11}, False),
    ):
        process = msgspec.convert({**told["process"], **change}, ProcessId, strict=False)
        begin_ns = change.get("begin_ns", told["begin_ns"])
        leader.write_bytes(msgspec.json.encode({"process": process, "begin_ns": begin_ns}))
        assert (find_leader_files(tmp_path, now_ns) is not None) is expected, change
    leader.write_bytes(b"{")
    assert find_leader_files(tmp_path, now_ns) is None
