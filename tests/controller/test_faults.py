"""What goes wrong in real runs: each has a documented result, and none ends the training."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Pool, disk_of
from example_loops import spans
from fleet import Reborn, TrainWorker
from test_callback import configured, following, local_worker, manifest, pass_steps, run, set_up

from verl_profiling import ProfilingConfig, ProfilingError
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.controller.captured_workers import CapturedWorkers
from verl_profiling.controller.loop_state import OpenCapture
from verl_profiling.steps.check import check

FLAWED = "tools.test_third_party"


def test_a_step_that_raises_keeps_what_was_recorded_and_the_next_one_works(
    tmp_path: Path, session: Session
) -> None:
    """``on_exception`` closes the capture, which the check names as cut short;
    training may go on.
    """
    config = configured(tmp_path, tool="torch", schedule={"steps": [1, 2]})
    callback = following(config, worker := local_worker(config))
    callback.on_train_begin()
    callback.on_step_begin(1)
    callback.on_rollout_begin()
    with pytest.raises(ValueError, match="out of memory") as caught, callback.stage("update_actor"):
        raise ValueError(f"out of memory: {worker.work()}")
    callback.on_exception(caught.value)
    assert session.sink is None
    callback.on_step_begin(2)
    worker.work()
    callback.on_step_end()
    callback.on_train_end()
    first, second = manifest(config, 1), manifest(config, 2)
    assert (first.complete, second.complete) == (False, True)
    [cut] = [entry for entry in check(Path(config.save_path)).artifacts if entry.status != "ok"]
    assert (cut.path, cut.status) == ("step_000001/manifest.json", "cut")
    assert cut.reason.startswith("the step was cut short: ValueError: out of memory")
    assert main(["check", config.save_path]) == 1
    assert [(span.name, span.failed) for span in first.stages] == [
        ("rollout", True),
        ("update_actor", True),
    ]
    for written in (first, second):
        [artifact] = written.workers[0].artifacts
        assert artifact.status == "ok"
        assert spans(
            Path(config.save_path) / f"step_{written.step:06d}" / artifact.path, "aten::addmm"
        )


@pytest.mark.parametrize("failing", [(CapturedWorkers, "start"), (OpenCapture, "manifest")])
def test_a_bug_in_a_hook_leaves_no_worker_recording(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, failing: tuple[type, str]
) -> None:
    """The hook closes the capture, the loop goes on, and the next capture is whole."""
    config = configured(tmp_path, schedule={"steps": [1, 2]})
    callback = following(config)

    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(*failing, fail)
        callback.on_step_begin(1)
        callback.on_step_end()
        assert session.sink is None
    callback.on_step_begin(2)
    assert session.sink is not None
    callback.on_step_end()
    assert manifest(config, 2).workers[0].status == "ok"
    callback.on_train_end()


def test_a_restarted_actor_is_not_taken_for_the_one_that_recorded(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What died with its process is missing, and both processes are named; the next step works."""
    config = configured(
        tmp_path, tool="tools.example_tool:CProfileTool", schedule={"steps": [1, 2]}
    )
    worker = ray.remote(num_cpus=0, max_restarts=1)(Reborn).remote(config)
    stages = ["update_actor"]
    try:
        ray.get(worker.__ray_ready__.remote())
        callback = following(config, [worker])
        with callback:
            callback.on_step_begin(1)
            ray.get(worker.pass_stages.remote(stages))
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(worker.die.remote())
            while True:
                try:
                    ray.get(worker.pass_stages.remote(stages))
                    break
                except ray.exceptions.RayActorError:
                    time.sleep(0.1)
            callback.on_step_end()
            callback.on_step_begin(2)
            ray.get(worker.pass_stages.remote(stages))
            callback.on_step_end()
    finally:
        ray.kill(worker)
    [lost] = manifest(config, 1).workers
    assert (lost.status, [artifact.status for artifact in lost.artifacts]) == (
        "failed",
        ["missing"],
    )
    assert re.search(r"pid \d+ on .* recorded, but pid \d+ on .* answered the stop", lost.reason)
    assert manifest(config, 2).workers[0].status == "ok"
    assert main(["check", str(Path(config.save_path) / "step_000001")]) == 1
    assert "restarted" in capsys.readouterr().out


def until_both_record(config: ProfilingConfig, step: Callable[[], int]) -> None:
    """Run captured steps until both ranks are in one: the answer of one that hung is on its way."""
    deadline = time.monotonic() + 60
    while [worker.status for worker in manifest(config, step()).workers] != ["ok", "ok"]:
        assert time.monotonic() < deadline


def test_a_hung_actor_is_a_failed_entry_until_it_answers_again(tmp_path: Path, pool: Pool) -> None:
    """Steps go on without it, and do not wait for it again;
    what it recorded is taken in when it answers.
    """
    timeouts = {"start_s": 20, "stop_s": 2, "finish_s": 20}
    config = configured(tmp_path, tool="torch", schedule={"every": 1}, timeouts=timeouts)
    callback = following(config, set_up(config, pool.sync[:2]))
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1, switches=tmp_path))
    numbers = itertools.count(1)

    def run_step(work: list[Any]) -> int:
        begin, step = time.monotonic(), next(numbers)
        callback.on_step_begin(step)
        ray.get([actor.work.remote() for actor in work])
        if step == 1:
            (tmp_path / "stop").touch()
        callback.on_step_end()
        assert time.monotonic() - begin < 15, "its start, up to 20 s, is not waited for"
        return step

    with callback:
        for said in ("did not return within 2 s", "start_capture was not waited for"):
            hung = manifest(config, run_step(pool.sync[: 2 if "within" in said else 1])).workers[1]
            assert (hung.status, said in hung.reason) == ("failed", True)
        (tmp_path / "stop").unlink()
        until_both_record(config, lambda: run_step(pool.sync[:2]))
    for step, statuses in ((1, ["ok", "ok"]), (2, ["ok", "failed"])):
        workers = manifest(config, step).workers
        assert [worker.status for worker in workers] == statuses
        assert {artifact.status for artifact in workers[0].artifacts} == {"ok"}
    [late] = manifest(config, 1).workers[1].artifacts
    assert spans(Path(config.save_path) / "step_000001" / late.path, "aten::addmm")
    assert check(Path(config.save_path) / "step_000001").ok


def test_an_actor_that_hangs_at_the_start_does_not_hold_up_the_others(
    tmp_path: Path, pool: Pool
) -> None:
    """The step begins after the timeout; the late worker is stopped as soon as it answers."""
    timeouts = {"start_s": 2, "stop_s": 10}
    config = configured(tmp_path, schedule={"every": 1}, timeouts=timeouts)
    callback = following(config, set_up(config, pool.sync[:2]))
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1, switches=tmp_path))
    numbers = itertools.count(1)

    def run_step() -> int:
        step = next(numbers)
        callback.on_step_begin(step)
        callback.on_step_end()
        return step

    with callback:
        (tmp_path / "start").touch()
        run_step()
        (tmp_path / "start").unlink()
        until_both_record(config, run_step)
    fine, hung = manifest(config, 1).workers
    assert (fine.status, hung.status) == ("ok", "failed")
    assert "start_capture did not return within 2 s; is the worker hung or busy?" in hung.reason


@pytest.mark.parametrize(("mode", "answers"), [("discrete", True), ("e2e", False)])
def test_a_recording_that_is_stopped_after_the_last_step_is_waited_for(
    tmp_path: Path, pool: Pool, mode: str, answers: bool
) -> None:
    """Until the timeouts have passed: the manifest says failed until the worker answers,
    and check agrees.
    """
    timeouts = {"start_s": 20 if answers else 2, "stop_s": 0.5, "finish_s": 20 if answers else 0.5}
    config = configured(tmp_path, tool="torch", mode=mode, timeouts=timeouts)
    ray.get(pool.sync[0].set_up.remote(config, switches=tmp_path))
    with following(config, pool.sync[0]) as callback:
        callback.on_step_begin(2)
        ray.get(pool.sync[0].work.remote())
        (tmp_path / "stop").touch()
        callback.on_step_end()
        [before] = manifest(config).workers
        assert (before.status, "did not return within 0.5 s" in before.reason) == ("failed", True)
        if answers:
            threading.Timer(0.5, (tmp_path / "stop").unlink).start()
    assert manifest(config).workers[0].status == ("ok" if answers else "failed")
    assert check(Path(config.save_path) / "step_000002").ok == answers
    (tmp_path / "stop").unlink(missing_ok=True)
    ray.get(pool.sync[0].counts.remote())


def test_strict_settings_raise_what_others_only_report(tmp_path: Path, session: Session) -> None:
    """``strict: true`` ends the training; the folder is written all the same."""
    config = configured(tmp_path, strict=True, tool=f"{FLAWED}:FailsAtStop")
    callback = following(config)
    with pytest.raises(
        ProfilingError, match="step 2: actor_rank0 failed: stop raised OSError: device lost"
    ):
        run(callback, lambda step: None)
    assert manifest(config).workers[0].status == "failed"
    callback.on_train_end()


def test_a_folder_that_disappears_during_the_step_is_reported(
    tmp_path: Path, session: Session
) -> None:
    """The tool's artifact is failed, and the manifest cannot be written; training goes on."""
    import shutil

    config = configured(tmp_path, tool="torch", schedule={"steps": [1, 2]})
    callback = following(config, worker := local_worker(config))

    def work(step: int) -> None:
        worker.work()
        if step == 1:
            shutil.rmtree(Path(config.save_path) / "step_000001")

    run(callback, work)
    assert not (Path(config.save_path) / "step_000001").exists()
    assert manifest(config, 2).workers[0].status == "ok"


def test_a_step_whose_folder_cannot_be_made_is_said_everywhere(
    tmp_path: Path,
    session: Session,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the log, in ``run.json`` once that can be written, and by the check; others are whole."""
    config = configured(tmp_path, schedule={"steps": [1, 2, 3]})
    run_folder, aside = Path(config.save_path), tmp_path / "aside"
    with following(config) as callback:
        pass_steps(callback, 1)
        run_folder.rename(aside)
        run_folder.touch()  # a file is in the way
        pass_steps(callback, 2)
        run_folder.unlink()
        aside.rename(run_folder)
        pass_steps(callback, 3)
    assert any("step" in said and "Not a directory" in said for said in caplog.messages)
    assert (
        "Not a directory" in json.loads((run_folder / "run.json").read_text())["not_captured"]["2"]
    )
    assert main(["check", str(run_folder)]) == 1
    assert re.search(
        "missing +run.json +step 2 was not captured: .*Not a directory", capsys.readouterr().out
    )
    assert [manifest(config, step).workers[0].status for step in (1, 3)] == ["ok", "ok"]


_READ_ONLY = """
import subprocess, sys
from verl_profiling import ProfilingCallback
settings = {"enable": True, "tool": "spans", "save_path": f"{sys.argv[1]}/run",
            "schedule": {"steps": [1, 2]}}
with ProfilingCallback(settings) as callback:
    for step in (1, 2):
        callback.on_step_begin(step)
        callback.on_step_end()
        subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
"""


def test_a_disk_that_stays_read_only_is_said_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing could be written into ``run.json``, which has the schedule."""
    with disk_of("256k", tmp_path / "disk") as disk:
        subprocess.run([sys.executable, "-c", _READ_ONLY, str(disk)], check=True)
        assert main(["check", str(disk / "run")]) == 1
        assert re.search(
            "step 2 of schedule.steps has no folder.* is gone", capsys.readouterr().out
        )


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    from example_loops import settings, train
    from verl_profiling import stage
    from verl_profiling.testing import record_step

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    with record_step(settings(), Path(sys.argv[1])) as recorded, stage("update_actor"):
        train(200)
    [artifact] = recorded.result.artifacts
    print(artifact.status, artifact.path, artifact.reason, sep="|")
"""


def test_a_file_size_limit_is_reported_by_what_was_written(tmp_path: Path, run_python: Any) -> None:
    """A quota cuts the raw trace off; it is kept for a reader to salvage, or named as failed."""
    done = run_python(LIMITED, tmp_path / "step")
    status, path, reason = done.stdout.strip().splitlines()[-1].split("|")
    assert status == "truncated"
    assert reason.startswith("cut off after 65536 bytes")
    assert {file.name for file in (tmp_path / "step").iterdir()} == {
        path,
        "actor_rank0.result.json",
    }


class Calls:
    """A worker whose capture methods do what the test says."""

    def __init__(self, does: Callable[..., object]) -> None:
        self.start_capture = self.stop_capture = does


class Broken:
    world_size = 2

    def execute_all_async(self, method_name: str, *args: Any) -> list[Any]:
        raise ConnectionError("lost")


def _cancelled(*arguments: object) -> None:
    raise asyncio.CancelledError


async def _cancelled_coroutine(*arguments: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("workers", "reasons"),
    [
        (TrainWorker(), ["call init_capture(config, role=..., rank=...) first"]),
        (Broken(), ["start_capture raised ConnectionError: lost"] * 2),
        ([Calls(_cancelled), Calls(_cancelled_coroutine)], ["CancelledError"] * 2),
        (Calls(lambda *_: "started"), ["start_capture returned str"]),
    ],
    ids=["not set up", "a lost group", "cancelled", "another answer"],
)
def test_workers_that_do_not_answer_as_ours_are_failed_entries(
    tmp_path: Path, session: Session, workers: Any, reasons: list[str]
) -> None:
    """Each has its entry with the reason, and training goes on."""
    config = configured(tmp_path)
    run(following(config, workers), lambda step: None)
    results = manifest(config).workers
    assert [one.status for one in results] == ["failed"] * len(reasons)
    for one, reason in zip(results, reasons, strict=True):
        assert reason in one.reason


def test_two_workers_of_one_name_are_noted(tmp_path: Path, pool: Pool) -> None:
    """Ranks that were left out of ``init_capture`` would overwrite each other's files."""
    config = configured(tmp_path)
    ray.get([actor.set_up.remote(config, "actor", 0) for actor in pool.sync[:2]])
    callback = following(config, pool.sync[:2])
    run(callback, lambda step: None)
    assert any("two workers are called actor_rank0" in note for note in manifest(config).notes)
