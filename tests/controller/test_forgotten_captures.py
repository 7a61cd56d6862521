"""A capture that its loop forgot inside a step: the next callback takes the workers over, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, RunPython
from step_outcome import is_ok, reasons, recorded, verdict

PROGRAM = Path(__file__).with_name("forgetful_program.py")


def holds_after(folder: Path, scenario: str, *address: str) -> None:
    """Run the loops: later captures are whole, and the forgotten one is failed with the reason."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), scenario, *address],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    folders, left_on = json.loads(done.stdout.splitlines()[-1])
    assert len(set(folders)) == 10, done.stderr
    assert [is_ok(recorded(Path(step))) for step in folders] == [True] * 10, done.stderr
    assert {verdict(Path(step))[0] for step in folders} == {0}
    assert left_on == [], "the worker goes on recording"
    forgotten = folder / "run" / "step_000002"
    [worker] = recorded(forgotten).workers
    assert (worker.name, worker.status) == ("actor_rank0", "failed")
    assert "never stopped" in worker.reason
    assert verdict(forgotten)[0] == 1


def test_the_next_callback_takes_over_a_worker_of_this_process(tmp_path: Path) -> None:
    """A cell that was interrupted in a step and is run again."""
    holds_after(tmp_path, "interrupted")


def test_the_next_callback_takes_over_a_ray_actor(tmp_path: Path, ray_cluster: None) -> None:
    """A callback that is dropped in a step and made anew, with the worker in a process of its own."""
    import ray

    holds_after(tmp_path, "dropped", ray.get_runtime_context().gcs_address)


THREADS = """
    import json, sys, threading, time
    from verl_profiling import CaptureStateError, ProfilingCallback, stage
    from verl_profiling.testing import leaks
    from verl_profiling.workers import CaptureMixin

    together, strict = (word == "yes" for word in sys.argv[1:])
    config = {
        "enable": True, "tool": "spans", "save_path": "run", "schedule": {"every": 1}, "strict": strict
    }

    class Slow(CaptureMixin):
        def start_capture(self, *arguments, **keywords):
            time.sleep(0.2)
            return super().start_capture(*arguments, **keywords)

    worker, errors, both = Slow(), [], threading.Barrier(2)
    worker.init_capture(config, role="actor", rank=0, world_size=1)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", worker)
    profiling.on_train_begin()

    def drive(step, meet=False):
        try:
            if meet:
                both.wait()
            profiling.on_step_begin(step)
            with stage("update_actor"):
                time.sleep(0.3 if meet else 0.0)
            profiling.on_step_end()
        except CaptureStateError as error:
            errors.append(str(error))

    for step in (1, 2, 3, 4):
        second = threading.Thread(target=drive, args=(step, together))
        if step != 2:
            drive(step)
        elif together:
            second.start()
            drive(step, together)
            second.join()
        else:
            profiling.on_step_begin(step)
            with stage("update_actor"):
                second.start()
                second.join()
            profiling.on_step_end()
    profiling.on_train_end()
    print(json.dumps([errors, [leak for leak in leaks() if not leak.startswith("thread ")]]))
"""


@pytest.mark.parametrize(("together", "strict"), [("no", "yes"), ("yes", "no")])
def test_a_second_thread_gets_an_error_and_harms_nothing(
    tmp_path: Path, run_python: RunPython, together: str, strict: str
) -> None:
    """In a step of the first, or at the same moment: raised with strict settings, and else in the log."""
    done = run_python(THREADS, together, strict)
    errors, left_on = json.loads(done.stdout.splitlines()[-1])
    assert left_on == [], "the worker goes on recording"
    steps = sorted((tmp_path / "run").glob("step_*"))
    assert [step.name for step in steps] == [f"step_{step:06d}" for step in (1, 2, 3, 4)], done.stderr
    manifests = [recorded(step) for step in steps]
    assert [is_ok(manifest) for manifest in manifests] == [True] * 4, [reasons(each) for each in manifests]
    assert "thread" in ("".join(errors) if strict == "yes" else done.stderr)
