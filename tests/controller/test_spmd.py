"""One program on every rank: two processes, a callback in each, one manifest."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from example_loops import request
from fleet import TrainWorker, WorkerGroup
from rank_processes import run_ranks
from test_callback import configured, following, local_worker, manifest, run

from verl_profiling import ProfilingCallback
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.commands.trigger import find_job
from verl_profiling.files.run_files import read_manifest, read_run
from verl_profiling.manifest import Manifest
from verl_profiling.steps.check import check

PROGRAM = Path(__file__).with_name("spmd_program.py")

pytestmark = pytest.mark.timeout(180)


def ranks(
    folder: Path, scenario: str, *, count: int = 2, distributed: bool = True, **settings: Any
) -> list[tuple[int | None, str]]:
    """Run the program on two ranks, or more; return exit status and log of each."""
    arguments = [str(folder / "run"), scenario, json.dumps(settings)]
    return run_ranks(PROGRAM, count, arguments, folder, distributed=distributed)


def steps(folder: Path) -> list[Manifest]:
    """Return the manifests of steps 2 and 3."""
    return [read_manifest(folder / "run" / f"step_{step:06d}") for step in (2, 3)]


def statuses(written: Manifest) -> list[tuple[str, str]]:
    return [(worker.name, worker.status) for worker in written.workers]


BOTH = [("actor_rank0", "ok"), ("actor_rank1", "ok")]


def test_both_ranks_are_in_one_manifest(tmp_path: Path) -> None:
    """Each rank writes its own result; nothing else is left behind."""
    results = ranks(tmp_path, "store")
    assert [status for status, _ in results] == [0, 0], results
    for written in steps(tmp_path):
        assert statuses(written) == BOTH, [worker.reason for worker in written.workers]
        assert len({worker.identity.pid for worker in written.workers}) == 2
        assert [worker.identity.world_size for worker in written.workers] == [2, 2]
        for worker in written.workers:
            assert [(span.name, span.depth) for span in worker.stages] == [
                ("reward", 0),
                ("update_actor", 0),
            ]
        assert [span.name for span in written.stages] == ["reward", "update_actor"], (
            "the step's anatomy"
        )
        assert (written.metrics, written.notes) == ({"reward": 0.0}, [])
    root = tmp_path / "run"
    assert sorted(path.name for path in root.iterdir()) == [
        "run.json",
        "step_000002",
        "step_000003",
    ]
    assert check(root).ok


def test_without_a_process_group_nothing_is_captured(tmp_path: Path) -> None:
    """Each rank says so once, with the remedy, and trains on."""
    results = ranks(tmp_path, "environment", distributed=False)
    assert [status for status, _ in results] == [0, 0], results
    for rank, (_, log) in enumerate(results):
        said = f"rank {rank} of 2 captures nothing: torch.distributed is not initialised"
        assert log.count(said) == 1
        assert "set spmd: false" in log
    assert not list((tmp_path / "run").glob("step_*"))


def test_all_ranks_record_what_rank_0_was_asked_for(tmp_path: Path) -> None:
    """Rank 0 tells the others some steps before, over the store; the selection holds for all."""
    asked: list[str] = []

    def written() -> list[Manifest]:
        folders = sorted((tmp_path / "run").glob("step_*/manifest.json"))
        found = [read_manifest(file.parent) for file in folders]
        return [manifest for manifest in found if manifest.state == "written"]

    def ask() -> None:
        try:
            while not (tmp_path / "met_4_0").exists():
                time.sleep(0.05)
            job = find_job(tmp_path / "run")
            aimed = CaptureSelection(ranks=(1,), mode="discrete")
            asked.extend([job.ask(CaptureSelection(), 2), job.ask(aimed, 1)])
            deadline = time.monotonic() + 60
            while len(written()) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            (tmp_path / "stop").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    given: dict[str, Any] = {"schedule": {"steps": []}, "watch": {"enable": True}}
    results = ranks(tmp_path, "asked", **given)
    asking.join()
    assert [status for status, _ in results] == [0, 0], results
    *both, one = written()
    assert [manifest.trigger.request for manifest in (*both, one)] == [asked[0], *asked], results
    assert [statuses(manifest) for manifest in both] == [BOTH, BOTH]
    assert (statuses(one), one.workers[0].mode) == ([("actor_rank1", "ok")], "discrete")


def test_a_second_start_of_all_ranks_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Both ranks go to ``run_2``; rank 0 alone puts the run on record."""
    said = [ranks(tmp_path, "store", schedule={"steps": [2, 3, 9]}) for _ in range(2)]
    second = sorted((tmp_path / "run" / "run_2").glob("step_*"))
    assert [statuses(read_manifest(step)) for step in second] == [BOTH, BOTH], said
    assert [statuses(written) for written in steps(tmp_path)] == [BOTH, BOTH], said
    for folder, ((_, leader), (_, follower)) in zip((".", "run_2"), said, strict=True):
        info = read_run(tmp_path / "run" / folder)
        assert (info.last_step, info.never_came) == (4, [9])
        assert leader.count("step 9 never came") == 1
        assert "never came" not in follower


def test_a_rank_that_is_gone_is_a_failed_entry(tmp_path: Path) -> None:
    """Rank 0 waits for nobody, and the manifest says which process is gone."""
    begin = time.monotonic()
    waits = {"start_s": 90, "stop_s": 90, "finish_s": 90}
    (own, log), (gone, _) = ranks(tmp_path, "killed", timeouts=waits)
    assert (own, gone) == (0, -9), log
    assert time.monotonic() - begin < 80
    for written in steps(tmp_path):
        assert statuses(written) == [("actor_rank0", "ok"), ("actor_rank1", "failed")]
    lost = steps(tmp_path)[1].workers[1]
    assert f"pid {lost.identity.pid} on {lost.identity.host} has ended" in lost.reason
    result = check(tmp_path / "run")
    assert not result.ok
    assert lost.reason in [entry.reason for entry in result.artifacts]


def test_a_rank_that_is_late_is_taken_in(tmp_path: Path) -> None:
    """Its result is there when it ends the step, however long after rank 0."""
    results = ranks(tmp_path, "late")
    assert [status for status, _ in results] == [0, 0], results
    first, second = steps(tmp_path)
    assert (statuses(first), statuses(second)) == (BOTH, BOTH)
    assert [span.name for span in first.workers[1].stages] == ["reward", "update_actor"]


@pytest.mark.parametrize(
    ("scenario", "count", "status", "said"),
    [("raises", 2, 0, "ValueError: out of memory"), ("exits", 4, 3, "SystemExit: 3")],
)
def test_a_rank_whose_step_raises_keeps_what_it_recorded(
    tmp_path: Path, scenario: str, count: int, status: int, said: str
) -> None:
    """The step is incomplete, with the reason; in the next one the rank is missing,
    the others record on.
    """
    results = ranks(tmp_path, scenario, count=count)
    assert [status for status, _ in results] == [*[0] * (count - 1), status], results
    first, second = steps(tmp_path)
    *others, last = (f"actor_rank{rank}" for rank in range(count))
    recorded = [(name, "ok") for name in others]
    assert (statuses(first), first.complete) == ([*recorded, (last, "ok")], False)
    assert f"the step was cut short: {last}: {said}" in first.notes
    assert statuses(second) == [*recorded, (last, "failed")]
    assert not check(tmp_path / "run" / "step_000002").ok


def test_a_callback_on_rank_0_alone_waits_for_nobody(tmp_path: Path) -> None:
    """The rank without one is a failed entry, until ``spmd:
    false`` says that rank 0's is one for all.
    """
    (status, log), _ = ranks(tmp_path, "no callback")
    assert status == 0, log
    for written in steps(tmp_path):
        assert statuses(written) == [("actor_rank0", "ok"), ("actor_rank1", "failed")]
        assert "rank 1 has written no result" in written.workers[1].reason
    (tmp_path / "alone").mkdir()
    (status, log), _ = ranks(tmp_path / "alone", "no callback", spmd=False)
    assert (status, [statuses(written) for written in steps(tmp_path / "alone")]) == (
        0,
        [[BOTH[0]]] * 2,
    ), log


def test_the_clock_of_another_host_is_measured(tmp_path: Path) -> None:
    """Rank 1's is 5 s ahead, and corrected to within its bound."""
    results = ranks(tmp_path, "clock")
    assert [status for status, _ in results] == [0, 0], results
    for written in steps(tmp_path):
        assert statuses(written) == BOTH
        [clock] = [clock for clock in written.clocks if clock.clock_domain == "elsewhere"]
        assert clock.samples == 8
        assert abs(clock.offset_ns - 5_000_000_000) <= clock.error_ns < 500_000_000
        begin_ns = written.workers[1].stages[0].begin_ns - written.offset_ns(
            written.workers[1].identity
        )
        assert abs(begin_ns - written.begin_ns) < 4_000_000_000


class Group(WorkerGroup):
    """A worker group in the manner of verl's, whose workers are called at once."""

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(worker, method_name)(*args) for worker in self.workers]


def test_a_driver_of_other_processes_has_no_peers(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RANK and WORLD_SIZE may be those of whatever started it:
    its workers are no objects of its own.
    """
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = configured(tmp_path, timeouts={"start_s": 1, "stop_s": 1, "finish_s": 1})
    callback = following(config, Group([local_worker(config)]))
    run(callback, lambda step: None)
    assert [worker.status for worker in manifest(config).workers] == ["ok"]


@pytest.mark.parametrize(
    ("rank", "world_size"), [("1", "1"), ("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")]
)
def test_an_environment_that_names_no_rank_of_several_is_one_process(
    tmp_path: Path,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: str,
    world_size: str,
) -> None:
    """Nobody is waited for; ``spmd: true`` says what is missing."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    config = configured(tmp_path)
    callback = following(config)
    run(callback, lambda step: None)
    assert [worker.status for worker in manifest(config).workers] == ["ok"]
    callback = ProfilingCallback(configured(tmp_path / "strict", spmd=True))
    callback.on_step_begin(2)
    assert "spmd: no rank: initialise torch.distributed before the first step" in caplog.text


def test_a_worker_has_the_rank_of_its_process(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told another."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for given, expected in (({}, (3, 8)), ({"rank": 0, "world_size": 2}, (0, 2))):
        worker = TrainWorker()
        worker.init_capture(configured(tmp_path), role="actor", **given)
        identity = worker.start_capture(request(tmp_path / "step_000001")).identity
        worker.stop_capture()
        session.reset()
        assert (identity.rank, identity.world_size) == expected
