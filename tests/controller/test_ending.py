"""A loop that ends without saying so: by a signal it handles, an unreported exception,
or ``sys.exit``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from conftest import Pool, RunPython
from fleet import once_all_hang
from test_callback import configured, following, manifest, set_up

from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest
from verl_profiling.steps.check import check

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
                # a shell may have had it ignored
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), signal.SIGINT)
            if scenario == "own handler":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
        profiling.on_step_end()
"""


def read(folder: Path, step: int = 2) -> Manifest:
    return read_manifest(folder / "run" / f"step_{step:06d}")


def test_a_forked_child_leaves_the_run_to_its_parent(tmp_path: Path, run_python: RunPython) -> None:
    """Wherever it forks and however it leaves: the run of the parent goes on and is whole."""
    run_python("from tests.controller.forking_loop import main; main('runs', '40')")


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
def test_a_hook_that_is_interrupted_leaves_no_worker_recording(
    tmp_path: Path, pool: Pool, hook: str
) -> None:
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


def test_ctrl_c_at_the_end_of_a_step_keeps_what_was_recorded(
    tmp_path: Path, run_python: RunPython
) -> None:
    """Also where it comes again at each stop: the step is `cut`, with its stages and metrics."""
    run_python(
        """
        from contextlib import suppress
        from pathlib import Path
        import os, signal
        from tests.controller.forking_loop import Loop
        from verl_profiling import ProfilingCallback
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop = Loop(Path("run"), 1)
        loop.place = ("", 0)
        stop = loop.worker.stop_capture

        def interrupted(*arguments):
            reply = stop(*arguments)
            if reply.result.step == 2:
                signal.raise_signal(signal.SIGINT)
            return reply

        loop.worker.stop_capture = interrupted
        try:
            with ProfilingCallback(loop.config) as callback, suppress(StopIteration):
                loop.train(callback).send(None)
        except KeyboardInterrupt:
            os._exit(130)
        """,
        status=130,
    )
    cut = read(tmp_path)
    assert (cut.state, cut.complete, cut.metrics) == (
        "written",
        False,
        {"reward": 1.0, "loss": 0.5},
    )
    assert {"a", "rollout"} <= {span.name for span in cut.stages}
    assert [worker.status for worker in cut.workers] == ["ok"]
    [step] = [entry for entry in check(tmp_path / "run").artifacts if entry.status == "cut"]
    assert "KeyboardInterrupt" in step.reason or "interrupted" in step.reason
