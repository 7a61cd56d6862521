"""Limits of a torch recording: it ends before its events take more memory than there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_loops import settings, spans, train

from verl_profiling import stage
from verl_profiling.capture.early_end import Guard
from verl_profiling.capture.session import Session
from verl_profiling.manifest import CaptureResult
from verl_profiling.testing import RecordedStep, leaks, record_step
from verl_profiling.tools.process_memory import available_bytes, give_back, own_bytes

pytestmark = pytest.mark.skipif(own_bytes() is None, reason="only Linux tells the memory of a process")

ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def _heap_of_one_piece() -> None:
    """What earlier tests left is given back, so that it costs no time to look at."""
    give_back()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Wait until the thread that looks at recordings has done so, and what follows from it."""
    looks, overrun = threading.Semaphore(0), Guard.overrun

    def noting(guard: Guard, *arguments: Any) -> str:
        if threading.current_thread().name == "verl-profiling-guard":
            looks.release()
        return overrun(guard, *arguments)

    def wait() -> None:
        while looks.acquire(blocking=False):
            pass
        assert all(looks.acquire(timeout=60) for _ in range(2)), "the second begins when the first is done"

    monkeypatch.setattr(Guard, "overrun", noting)
    return wait


def work(events: int) -> None:
    """Make so many events."""
    for _ in range(events):
        torch.add(ONE, ONE)


def work_until_it_ends() -> int:
    """Work until nothing records any more; return how many events were made."""
    done, deadline = 0, time.monotonic() + 60
    while torch.autograd.profiler._is_profiler_enabled:
        assert time.monotonic() < deadline, "the recording did not end"
        work(5000)
        done += 5000
    return done


def result_of(recorded: RecordedStep) -> CaptureResult:
    """Return the result of a step that has ended."""
    assert recorded.result is not None
    return recorded.result


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        ({"max_events": 50_000}, "are more than limits.max_events=50000"),
        ({"memory_bytes": "60MB"}, "MB of memory, more than limits.memory_bytes=60 MB"),
        ({"memory_share": 0.003}, "MB more memory, and limits.memory_share=0.003 of "),
    ],
)
def test_a_recording_ends_inside_a_stage_that_never_ends(
    tmp_path: Path, session: Session, limits: dict[str, Any], part: str
) -> None:
    """No boundary is needed. What was recorded is kept, the reason has the numbers, training goes on."""
    with record_step(settings(limits=limits), tmp_path) as recorded, stage("update_actor"):
        made = work_until_it_ends()
        train(3)
        assert session.sink is not None
    result = result_of(recorded)
    [artifact], [span] = result.artifacts, result.stages
    assert (result.status, artifact.status) == ("truncated", "truncated")
    assert part in result.reason == artifact.reason
    assert artifact.events is not None
    assert 0 < len(spans(recorded.path, "aten::add")) <= min(made, artifact.events)
    assert spans(recorded.path, "aten::addmm") == []
    assert span.begin_ns < artifact.end_ns < span.end_ns
    assert (span.name, span.failed) == ("update_actor", False)
    assert leaks() == []


def test_a_stage_after_one_that_was_too_long_is_recorded(tmp_path: Path, session: Session) -> None:
    """In discrete mode each stage has limits of its own: the capture is truncated, one file is whole."""
    config = settings(mode="discrete", limits={"max_events": 50_000})
    with record_step(config, tmp_path) as recorded:
        with stage("long"):
            work_until_it_ends()
        with stage("short"):
            train()
    result = result_of(recorded)
    assert result.status == "truncated"
    assert {artifact.stage: artifact.status for artifact in result.artifacts} == {
        "long": "truncated",
        "short": "ok",
    }
    assert spans(tmp_path / "actor_rank0.short.torch.json.gz", "aten::addmm")


def test_a_recording_that_only_its_thread_can_stop_ends_at_a_stage(
    tmp_path: Path, session: Session, looked: Callable[[], None]
) -> None:
    """With ``memory``, torch is stopped by the thread that trains, as soon as it passes a stage."""
    config = settings(tools={"torch": {"memory": True}}, limits={"max_events": 50_000})
    with record_step(config, tmp_path) as recorded:
        with stage("long"):
            work(60_000)
            looked()
            assert torch.autograd.profiler._is_profiler_enabled
        assert not torch.autograd.profiler._is_profiler_enabled
        train()
    result = result_of(recorded)
    assert result.status == "truncated"
    assert len(spans(recorded.path, "aten::add")) == 60_000
    assert spans(recorded.path, "aten::addmm") == []


def test_it_ends_between_mini_batches_if_the_next_one_would_not_fit(tmp_path: Path, session: Session) -> None:
    """The events of those so far say how many the next one has; whole mini-batches are kept."""
    with record_step(settings(limits={"max_events": 100_000}), tmp_path) as recorded:
        for number in range(8):
            with stage(f"mini_batch_{number}"):
                work(20_000)
            session.step()
    result = result_of(recorded)
    assert result.status == "truncated"
    assert "mini-batches, before the next one: about " in result.reason
    found = [len(spans(recorded.path, f"mini_batch_{number}")) for number in range(8)]
    whole = sum(found)
    assert 1 <= whole <= 5
    assert found == [1] * whole + [0] * (8 - whole)
    assert len(spans(recorded.path, "aten::add")) == whole * 20_000
    assert result.reason.startswith(f"ended after {whole} mini-batches")


def test_a_recording_that_fits_is_not_touched(
    tmp_path: Path, session: Session, looked: Callable[[], None]
) -> None:
    """By default half of the available memory is far away."""
    with record_step(settings(), tmp_path) as recorded, stage("update_actor"):
        work(20_000)
        looked()
    assert result_of(recorded).status == "ok"
    assert len(spans(recorded.path, "aten::add")) == 20_000


def test_it_ends_at_a_stage_where_another_thread_trains(
    tmp_path: Path, session: Session, looked: Callable[[], None]
) -> None:
    """To stop torch while another thread is inside of an operator has ended the process."""

    def train_on_a_thread() -> None:
        with stage("long"):
            work(40_000)
            looked()
            assert torch.autograd.profiler._is_profiler_enabled
        ended.append(not torch.autograd.profiler._is_profiler_enabled)
        train()

    ended: list[bool] = []
    with record_step(settings(limits={"max_events": 20_000}), tmp_path) as recorded:
        thread = threading.Thread(target=train_on_a_thread)
        thread.start()
        thread.join()
    assert ended == [True]
    assert result_of(recorded).status == "truncated"
    assert len(spans(recorded.path, "aten::add")) == 40_000
    assert spans(recorded.path, "aten::addmm") == []


def test_many_recordings_that_end_early_do_no_harm(run_python: Any, tmp_path: Path) -> None:
    """While operators run one after another, and at any moment of a stage or a mini-batch."""
    run_python(
        """
        import sys
        from pathlib import Path
        import torch
        from example_loops import settings
        from verl_profiling import stage
        from verl_profiling.capture import early_end
        from verl_profiling.capture.session import process_session
        from verl_profiling.testing import record_step

        early_end.PERIOD_S = 0.01
        one = torch.ones(1)
        for number in range(40):
            config = settings(limits={"max_events": 1000 + 100 * number})
            with record_step(config, Path(sys.argv[1]) / str(number), role=f"actor{number}") as recorded:
                while torch.autograd.profiler._is_profiler_enabled:
                    with stage("outer"), stage("inner"):
                        for _ in range(100):
                            torch.add(one, one)
                    if number % 2:
                        process_session().step()
            assert recorded.result.status == "truncated", recorded.result
        """,
        tmp_path,
    )


def test_a_warm_up_has_no_limits(tmp_path: Path, session: Session) -> None:
    """It is thrown away."""
    with record_step(settings(limits={"max_events": 1000}), tmp_path, keep=False) as recorded:
        work(20_000)
        time.sleep(0.5)
        assert torch.autograd.profiler._is_profiler_enabled
    assert result_of(recorded).status == "skipped"


def test_the_estimate_is_near_and_the_memory_is_given_back(run_python: Any, tmp_path: Path) -> None:
    """The number of events by the memory's growth, the memory at the stop, and what is left of it later."""
    run_python(
        """
        import sys
        from pathlib import Path
        import torch
        from example_loops import settings
        from verl_profiling.capture.session import process_session
        from verl_profiling.testing import record_step
        from verl_profiling.tools.process_memory import own_bytes

        one = torch.ones(1)
        def add():
            return torch.add(one, one)
        for options in ({}, {"shapes": True}, {"stack": True}):
            folder = Path(sys.argv[1]) / str(len(str(options)))
            for times in (1000, 150_000):
                with record_step(settings(tools={"torch": options}), folder / str(times)) as recorded:
                    before = own_bytes()
                    for _ in range(times):
                        add()
                    [(_, recording, _, _)] = process_session()._capture._tools.running
                    footprint = recording.footprint()
                    recording._releasing, release = (lambda finish: finish), recording._releasing
                    stop = recording.stop
                    peak = []
                    def measured():
                        outputs = stop()
                        peak.append(own_bytes() - before)
                        recording._releasing = release
                        from dataclasses import replace
                        return [replace(output, finish=release(output.finish)) for output in outputs]
                    recording.stop = measured
            [artifact] = recorded.result.artifacts
            assert 0.6 < footprint.events / artifact.events < 1.6, (options, footprint, artifact)
            assert 0.6 < footprint.stop_bytes / peak[0] < 1.8, (options, footprint, peak)
            left = own_bytes() - before
            assert left < 0.3 * peak[0], (options, left, peak)
        """,
        tmp_path,
    )


def test_available_memory_is_the_least_that_any_limit_leaves(tmp_path: Path) -> None:
    """Of the machine, and of each cgroup above the process; files in memory do not count as used."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    assert available_bytes(tmp_path) == 800 * 1024
    write("proc/self/cgroup", "0::/pod/box\n")
    write("sys/fs/cgroup/pod/box/memory.max", "max\n")
    write("sys/fs/cgroup/pod/box/memory.current", "100\n")
    assert available_bytes(tmp_path) == 800 * 1024
    write("sys/fs/cgroup/pod/memory.max", "1000\n")
    write("sys/fs/cgroup/pod/memory.current", "700\n")
    write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 200\n")
    assert available_bytes(tmp_path) == 500
    write("proc/self/cgroup", "4:cpu,memory:/job\n3:devices:/x\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "350\n")
    write("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 10\n")
    assert available_bytes(tmp_path) == 60


def test_this_machine_has_memory() -> None:
    """What is read of the real files is a sensible number."""
    here = available_bytes()
    assert here is not None
    assert 1 << 20 < here < 1 << 50
