"""A capture that its loop forgot inside a step, and a loop that is driven by two threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Pool
from fleet import TrainWorker
from test_callback import configured, following, local_worker, set_up

from verl_profiling import CaptureStateError, ProfilingCallback, ProfilingConfig, stage
from verl_profiling.capture.messages import CaptureRequest, StartReply
from verl_profiling.capture.session import Session
from verl_profiling.report.check import check
from verl_profiling.run_files import read_manifest


def cell(profiling: ProfilingCallback, worker: Any, interrupted_at: int = 0) -> Iterator[Path | None]:
    """Run steps as a cell of a notebook does, without ``with``; yield the folder of each."""
    for step in range(1, 5):
        profiling.on_step_begin(step)
        worker.work() if isinstance(worker, TrainWorker) else ray.get(worker.work.remote())
        if step == interrupted_at:
            raise KeyboardInterrupt
        profiling.on_step_end()
        yield profiling.last_folder


def takes_over(config: ProfilingConfig, worker: Any, keep: bool) -> None:
    """Interrupt a cell in step 2 and run it again: later captures are whole, the forgotten one is failed."""
    kept = []  # a notebook keeps the last exception, and with it all that it refers to
    forgetful = following(config, worker)
    with pytest.raises(KeyboardInterrupt):
        list(cell(forgetful, worker, interrupted_at=2))
    kept += [forgetful] * keep
    del forgetful
    gc.collect()
    profiling = following(config, worker)
    folders = [folder for folder in cell(profiling, worker) if folder is not None]
    profiling.on_train_end()
    assert len(set(folders)) == 4
    assert all(check(folder).ok for folder in folders)
    forgotten = Path(config.save_path) / "step_000002"
    [lost] = read_manifest(forgotten).workers
    assert (lost.name, lost.status, "never stopped" in lost.reason) == ("actor_rank0", "failed", True)
    assert not check(forgotten).ok


def test_the_next_callback_takes_over_a_worker_of_this_process(tmp_path: Path, session: Session) -> None:
    """A cell that was interrupted in a step and is run again."""
    config = configured(tmp_path, tool="torch", schedule={"every": 1})
    takes_over(config, local_worker(config), keep=True)
    assert not session.recording


def test_the_next_callback_takes_over_a_ray_actor(tmp_path: Path, pool: Pool) -> None:
    """A callback that is dropped in a step and made anew, with the worker in a process of its own."""
    config = configured(tmp_path, tool="torch", schedule={"every": 1})
    takes_over(config, set_up(config, pool.sync[:1])[0], keep=False)
    assert ray.get(pool.sync[0].is_idle.remote())


class Slow(TrainWorker):
    def start_capture(self, request: CaptureRequest) -> StartReply:
        """Start, when the other thread has had time to come."""
        time.sleep(0.2)
        return super().start_capture(request)


@pytest.mark.parametrize(("together", "strict"), [(False, True), (True, False)])
def test_a_second_thread_gets_an_error_and_harms_nothing(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture, together: bool, strict: bool
) -> None:
    """In a step of the first, or at the same moment: raised with strict settings, and else in the log."""
    config = configured(tmp_path, schedule={"every": 1}, strict=strict)
    worker = Slow()
    worker.set_up(config)
    profiling = following(config, worker)
    begin, end = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    errors: list[str] = []

    def drive(step: int, meets: bool = False) -> None:
        try:
            if meets:
                begin.wait()
            profiling.on_step_begin(step)
            with stage("update_actor"):
                if meets:
                    end.wait()
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
    assert not session.recording
    steps = sorted((tmp_path / "run").glob("step_*"))
    assert [step.name for step in steps] == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
    assert [check(step) for step in steps if not check(step).ok] == []
    assert "thread" in ("".join(errors) if strict else caplog.text)
