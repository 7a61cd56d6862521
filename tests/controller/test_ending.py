"""A loop that ends without saying so: by a signal it handles, an unreported exception, or ``sys.exit``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from conftest import Pool, RunPython
from fleet import once_all_hang
from test_callback import configured, following, manifest, set_up

from verl_profiling.manifest import Manifest
from verl_profiling.run_files import read_manifest

PROGRAM = """
    import os, signal, sys, time
    from fleet import TrainWorker
    from verl_profiling import ProfilingCallback, stage
    scenario = sys.argv[1]
    config = {
        "enable": True,
        "tool": "tools.example_tool:CProfileTool",
        "save_path": "run",
        "schedule": {"steps": [1, 2]},
    }
    worker = TrainWorker()
    worker.init_capture(config, role="actor")
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", worker)
    if scenario == "own handler":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    for step in (1, 2):
        profiling.on_step_begin(step)
        with stage("update_actor"):
            sum(range(1000))
        if step == 2:
            if scenario == "raises":
                raise ValueError("out of memory")
            if scenario == "exits":
                sys.exit(5)
            if scenario == "interrupted":
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
                os.kill(os.getpid(), signal.SIGINT)
            if scenario == "child exits":
                if not (child := os.fork()):
                    sys.exit(0)
                os.waitpid(child, 0)
            if scenario == "own handler":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
        profiling.on_step_end()
"""


def read(folder: Path, step: int = 2) -> Manifest:
    return read_manifest(folder / "run" / f"step_{step:06d}")


def test_a_forked_child_that_exits_closes_no_capture(tmp_path: Path, run_python: RunPython) -> None:
    """The loop goes on, and its process is the one that writes."""
    assert "closing the capture" not in run_python(PROGRAM, "child exits").stderr
    assert [(read(tmp_path, step).complete, read(tmp_path, step).notes) for step in (1, 2)] == [
        (True, [])
    ] * 2


@pytest.mark.parametrize(
    ("scenario", "status", "why"),
    [
        ("own handler", 3, "the process of the loop ended"),
        ("interrupted", -signal.SIGINT, "ended with KeyboardInterrupt"),
        ("raises", 1, "ended with ValueError: out of memory"),
        ("exits", 5, "the process of the loop ended"),
    ],
)
def test_what_was_recorded_is_written_and_the_manifest_says_why(
    tmp_path: Path, run_python: RunPython, scenario: str, status: int, why: str
) -> None:
    """The process ends as it would have."""
    run_python(PROGRAM, scenario, status=status)
    whole, cut = read(tmp_path, 1), read(tmp_path, 2)
    assert (whole.state, whole.complete, whole.notes) == ("written", True, [])
    assert (cut.state, cut.complete) == ("written", False)
    [note] = cut.notes
    assert why in note
    assert [artifact.status for artifact in cut.workers[0].artifacts] == ["ok"]
    assert [span.name for span in cut.workers[0].stages] == ["update_actor"]


class _InterruptedError(BaseException):
    pass


@pytest.mark.parametrize("hook", ["start", "stop"])
def test_a_hook_that_is_interrupted_leaves_no_worker_recording(tmp_path: Path, pool: Pool, hook: str) -> None:
    """Ctrl-C while the callback waits: who was called is stopped, and what they have is kept."""
    config = configured(tmp_path, timeouts={"start_s": 20, "stop_s": 20})
    set_up(config, pool.sync[:2])
    ray.get(pool.sync[1].set_up.remote(config, "actor", 1, switches=tmp_path))
    callback = following(config, pool.sync[:2])

    def interrupt(number: int, frame: object) -> None:
        (tmp_path / hook).unlink()
        raise _InterruptedError

    def alarm() -> None:
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if hook == "stop":
            callback.on_step_begin(2)
        (tmp_path / hook).touch()
        waiting = once_all_hang(tmp_path, hook, 1, alarm)
        with pytest.raises(_InterruptedError) as raised:
            callback.on_step_begin(2) if hook == "start" else callback.on_step_end()
    finally:
        waiting.join()
        signal.signal(signal.SIGALRM, before)
    callback.on_exception(raised.value)
    for actor in pool.sync[:2]:
        assert ray.get(actor.is_idle.remote())
    callback.on_train_end()
    written = manifest(config)
    assert [(worker.name, worker.status) for worker in written.workers] == [
        ("actor_rank0", "ok"),
        ("actor_rank1", "ok"),
    ]
    assert any("_InterruptedError" in note for note in written.notes)
