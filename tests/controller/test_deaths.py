"""Why a run did not end well: who went first, in which step and stage, and why."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from verl_profiling import ProfilingCallback
from verl_profiling.analysis import open_run
from verl_profiling.cli import main
from verl_profiling.files.process_record import End, Gone, ProcessRecord, read_records
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.watch import process_recorder
from verl_profiling.watch.hangs import HangReporter
from verl_profiling.watch.log_writer import WatchLog
from verl_profiling.watch.process_recorder import end_recorder

LOOP = Path(__file__).with_name("dying_loop.py")


def said(run: Path) -> list[str]:
    """Return what ``check`` says of the processes of a run."""
    return [one.reason for one in open_run(run).check().artifacts if one.path == "processes"]


def run_loop(folder: Path, way: str) -> int:
    return subprocess.run([sys.executable, LOOP, folder, way], stderr=subprocess.DEVNULL).returncode


def test_the_rank_that_raised_first_is_named_and_not_the_loop_that_lost_it(tmp_path: Path) -> None:
    """With the line of its code and the last line of its traceback. The second start goes well:
    both are attempts of one run on its page.
    """
    assert run_loop(tmp_path, "raise") != 0
    line = next(n for n, text in enumerate(LOOP.read_text().splitlines(), 1) if "raise Val" in text)
    assert said(tmp_path) == [
        f"actor_rank1 went first in step 4, update_actor, at {LOOP}:{line} in work: exception: "
        "ValueError: no reward"
    ]
    assert run_loop(tmp_path, "handled") == 0
    assert said(tmp_path / "run_2") == []
    assert main(["report", str(tmp_path / "run_2"), "--save"]) == 0
    page = (tmp_path / "run_2" / "index.html").read_text()
    assert 'id="attempts"' in page
    assert "actor_rank1 went first in step 4" in page
    assert "training ended after step 4" in page


def test_a_process_that_is_killed_is_named_by_those_that_saw_it_die(tmp_path: Path) -> None:
    """It has left nothing; its parent may know the signal, if it looked before its own end."""
    assert run_loop(tmp_path, "kill") != 0
    [sentence] = said(tmp_path)
    assert re.match(
        r"actor_rank1 went first, last seen in (no stage|\w+)( of step [1-4])?, \d\.\d s before: "
        "signal: ",
        sentence,
    )
    assert main(["check", str(tmp_path)]) == 1


def test_a_process_that_is_killed_before_it_has_a_record_is_named(tmp_path: Path) -> None:
    """Its connection closed before the loop failed."""
    assert run_loop(tmp_path, "early") != 0
    [sentence] = said(tmp_path)
    assert re.match(
        r"(actor_rank1 went first|who went first is not known: actor_rank1 died, and left no)",
        sentence,
    ), sentence


S = 10**9


def record(lane: str, pid: int, host: str = "a", **facts: Any) -> ProcessRecord:
    process = ProcessId(host=host, clock_domain="a", pid=pid, namespace="", started="")
    return ProcessRecord(lane=lane, role=lane.partition("_")[0], process=process, **facts)


def said_of(folder: Path, *records: ProcessRecord) -> list[str]:
    """Return what ``check`` says of a run with these records, whose process is gone."""
    run = RunInfo(
        run_id="run",
        begin_ns=100 * S,
        process=replace(ProcessId.current(), pid=2**40),
        config={"watch": {"enable": True}},
        versions={},
    )
    (folder / "processes").mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    for one in records:
        (folder / "processes" / one.file).write_bytes(msgspec.json.encode(one))
    return said(folder)


LOST = End(at_ns=201 * S, error="ConnectionResetError: Connection reset by peer", is_fatal=True)


def test_a_process_that_handled_a_failure_before_may_be_killed(tmp_path: Path) -> None:
    handled = End(at_ns=50 * S, error="ValueError: no reward", stage="reward")
    seen = [Gone(200 * S, "actor_rank1", 3, signal=9)]
    assert said_of(
        tmp_path,
        record("controller", 1, step=4, end=LOST, gone=seen),
        record("actor_rank0", 2, stage="update_actor"),
        record("actor_rank1", 3, stage="update_actor", end=handled, at_ns=192 * S),
        record("actor_rank2", 4, gone=[Gone(150 * S, "actor_rank3", 5)]),
        record("actor_rank3", 5, end=replace(handled, has_left=True)),
    ) == [
        "actor_rank1 went first, last seen in update_actor of step 4, 8.0 s before: signal: "
        "killed by SIGKILL"
    ]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_loop_that_is_killed_had_handled_the_failures_before(
    tmp_path: Path, is_seen: bool
) -> None:
    """Else an exception would have left it. The failure is said, as it may be why it was killed."""
    failed = End(at_ns=200 * S, error="ValueError: no reward", stage="reward")
    seen = [Gone(202 * S, "controller", 1, signal=9)] if is_seen else []
    how = "2.0 s before: signal: killed by SIGKILL"
    if not is_seen:
        how = (
            "how long before is not known: signal: nobody saw which one, or it crashed in native "
            "code; it wrote nothing at its end"
        )
    assert said_of(
        tmp_path,
        record("controller", 1, step=4, stage="update_actor", at_ns=200 * S),
        record("actor_rank0", 2, gone=seen),
        record("actor_rank1", 3, end=failed),
    ) == [
        f"controller went first, last seen in update_actor of step 4, {how}; before, actor_rank1 "
        "had raised ValueError: no reward"
    ]


def test_a_process_without_a_readable_record_is_not_blamed(tmp_path: Path) -> None:
    seen = [Gone(201 * S, "actor_rank1", 3, signal=9)]
    assert said_of(tmp_path, record("controller", 1, step=4, end=LOST, gone=seen)) == [
        "who went first is not known: actor_rank1 died, and left no readable record"
    ]


def test_processes_of_two_containers_may_have_one_number(tmp_path: Path) -> None:
    seen = [Gone(200 * S, "actor_rank1", 7, signal=9)]
    assert said_of(
        tmp_path,
        record("controller", 1, step=4, end=LOST),
        record("actor_rank0", 7, "a", stage="update_actor", end=replace(LOST, at_ns=202 * S)),
        record("actor_rank1", 7, "b", stage="old_log_prob", at_ns=199 * S),
        record("actor_rank2", 8, "b", gone=seen),
    ) == [
        "actor_rank1 went first, last seen in old_log_prob of step 4, 1.0 s before: signal: "
        "killed by SIGKILL"
    ]


def test_a_step_or_stage_is_claimed_of_the_killed_process_only_if_it_was_read_there(
    tmp_path: Path,
) -> None:
    """Not the stage in which the others were then, or the step of the loop, if they had gone on."""
    log = WatchLog(tmp_path)
    for step, begin, end in ((11, 180, 190), (12, 190, 196)):
        log(StepSummary(step=step, begin_ns=begin * S, end_ns=end * S))
    seen = [Gone(200 * S, "actor_rank1", 3, signal=9)]
    loop = record("actor_rank0", 2, step=13, stage="rollout", at_ns=199 * S, gone=seen, end=LOST)
    told = {}
    for at, stage in ((195, "update_actor"), (197, ""), (170, "rollout")):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("1*"))
        dead = record("actor_rank1", 3, stage=stage, at_ns=at * S)
        [told[at]] = said_of(folder, loop, dead)
    assert told == {
        at: f"actor_rank1 went first, last seen in {words} before: signal: killed by SIGKILL"
        for at, words in (
            (195, "update_actor of step 12, 5.0 s"),
            (197, "no stage of step 13, 3.0 s"),
            (170, "rollout, 30.0 s"),
        )
    }


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (40, "signal 40")])
def test_the_kernel_kills_for_memory_with_one_signal_only(
    tmp_path: Path, number: int, name: str
) -> None:
    """A kill of another process, e.g. of a sandbox, is no reason for another signal."""
    seen = [Gone(200 * S, "actor_rank1", 7, signal=number, oom_kills=2)]
    assert said_of(
        tmp_path, record("controller", 1, step=4, end=LOST, gone=seen), record("actor_rank1", 7)
    ) == [
        "actor_rank1 went first, last seen in no stage of step 4, how long before is not known: "
        f"signal: killed by {name}"
    ]


def test_what_fails_after_the_end_of_training_is_no_death_of_the_run(tmp_path: Path) -> None:
    """E.g. the next loop of the same process, or an evaluation."""
    assert run_loop(tmp_path, "after") != 0
    assert said(tmp_path) == []


def test_the_exit_of_a_process_does_not_make_the_folder_of_a_removed_run(tmp_path: Path) -> None:
    assert run_loop(tmp_path / "run", "removed") == 0
    assert not (tmp_path / "run").exists()


def test_a_record_has_the_kills_for_memory_at_its_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an earlier kill, which the process survived, is no reason of its death."""
    monkeypatch.setattr(process_recorder, "oom_kills", iter([3, 5]).__next__)
    recorder = process_recorder.ProcessRecorder(tmp_path, "actor_rank0", "actor")
    recorder.read([])
    recorder.end()
    assert [one.oom_kills for one in read_records(tmp_path)] == [5]


def test_a_process_that_joins_and_dies_between_two_looks_is_seen(tmp_path: Path) -> None:
    """The loop looks a last time when it ends with a failure."""
    recorder = process_recorder.ProcessRecorder(tmp_path, "controller", "controller")
    recorder.read([])
    time.sleep(0.2)  # the first look, at which dead processes are of earlier times
    dead = replace(ProcessId.current(), pid=2**40)
    joined = ProcessRecord(lane="actor_rank1", role="actor", process=dead)
    (tmp_path / joined.file).write_bytes(msgspec.json.encode(joined))
    recorder.failed(EOFError(), "update_actor", is_fatal=True)
    recorder.end()
    [own] = [one for one in read_records(tmp_path) if one.lane == "controller"]
    assert [one.lane for one in own.gone] == ["actor_rank1"]


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("answer \ud83d"), "ValueError: answer ?"),
        (MuteError(), "MuteError: <exception str() failed>"),
    ],
    ids=["half a surrogate pair", "no text"],
)
def test_any_exception_can_be_written_down(error: Exception, line: str, tmp_path: Path) -> None:
    """Else no reading could be written after it, and the watch would notice no more hangs."""
    recorder = process_recorder.ProcessRecorder(tmp_path, "actor_rank0", "actor")
    recorder.failed(error, "reward", is_fatal=False)
    recorder.read([])
    recorder.end()
    assert [one.end and one.end.error for one in read_records(tmp_path)] == [line]


def test_a_step_that_any_text_ends_has_its_manifest(tmp_path: Path) -> None:
    settings = {"enable": True, "save_path": str(tmp_path), "tool": "spans"}
    with suppress(ValueError), ProfilingCallback(settings) as callback:
        callback.on_step_begin(1)
        raise ValueError("answer \ud83d")
    manifest = read_manifest(tmp_path / "step_000001")
    assert [note for note in manifest.notes if "answer \\ud83d" in note]


def test_the_reporter_of_an_earlier_run_ends_its_own_thread_only(tmp_path: Path) -> None:
    earlier, later = (
        HangReporter((str(tmp_path / run / "hangs"), 0.05), "actor_rank0", "actor", list)
        for run in ("run", "run_2")
    )
    threads = []
    for reporter in (earlier, later):
        before = {*threading.enumerate()}
        reporter.record()
        threads += {*threading.enumerate()} - before
    earlier.ended.set()
    earlier.report(earlier.ended)
    assert [thread.is_alive() for thread in threads] == [False, True]
    end_recorder()


def test_the_thread_for_other_processes_ends_once_for_all_who_end_it(tmp_path: Path) -> None:
    recorder = process_recorder.ProcessRecorder(tmp_path, "actor_rank0", "actor")
    with ThreadPoolExecutor(3) as threads:
        for _ in range(100):
            recorder.read([])
            for ended in [threads.submit(recorder.end) for _ in range(3)]:
                ended.result()


def test_a_process_without_free_descriptors_is_read_without_failure(tmp_path: Path) -> None:
    """Else the watch would notice no more hangs."""
    recorder = process_recorder.ProcessRecorder(tmp_path, "actor_rank0", "actor")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        recorder.read([])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    recorder.read([(1, "rollout")])
    recorder.end()
    assert [one.stage for one in read_records(tmp_path)] == ["rollout"]


def test_top_says_who_went_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that an exception ended is not well, and its last step is no whole one."""
    lost = record("controller", 1, step=4, end=LOST, gone=[Gone(200 * S, "actor_rank1", 3)])
    dead = record("actor_rank1", 3, stage="update_actor", at_ns=109 * S)
    said_of(tmp_path, lost, dead)
    info = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunInfo)
    log = WatchLog(tmp_path)
    for step in range(1, 5):
        log(StepSummary(step=step, begin_ns=(105 + step) * S, end_ns=(106 + step) * S))
    for end_ns, code, state in (
        (None, 1, "which ran the job, is gone"),
        (202 * S, 1, "an exception ended training in step 4"),
    ):
        broken = replace(info, end_ns=end_ns, last_step=4)
        (tmp_path / "run.json").write_bytes(msgspec.json.encode(broken))
        capsys.readouterr()
        assert main(["top", str(tmp_path), "--once"]) == code
        shown = " ".join(capsys.readouterr().out.split())
        assert state in shown
        assert "actor_rank1 went first, last seen in update_actor of step 4, 91.0 s before" in shown
        assert "step 4: 1.00 s, median 1.00 s of 4 steps, cut short" in shown
    whole = record("controller", 1, step=4, end=End(at_ns=202 * S, has_left=True))
    (tmp_path / "processes" / lost.file).write_bytes(msgspec.json.encode(whole))
    assert main(["top", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "training ended after step 4" in shown
    assert "went first" not in shown
    assert "cut short" not in shown
