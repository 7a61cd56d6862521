"""A capture that its loop forgot inside a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Pool
from fleet import TrainWorker
from test_callback import configured, following, local_worker, set_up

from verl_profiling import ProfilingCallback, ProfilingConfig
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
