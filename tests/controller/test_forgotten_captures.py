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

from verl_profiling import ProfilingCallback
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.steps.check import check


def cell(
    profiling: ProfilingCallback, worker: Any, interrupted_at: int = 0
) -> Iterator[Path | None]:
    """Run steps as a cell of a notebook does, without ``with``; yield the folder of each."""
    for step in range(1, 5):
        profiling.on_step_begin(step)
        worker.work() if isinstance(worker, TrainWorker) else ray.get(worker.work.remote())
        if step == interrupted_at:
            raise KeyboardInterrupt
        profiling.on_step_end()
        yield profiling.last_folder


@pytest.mark.parametrize("remote", [False, True])
def test_the_next_callback_takes_over_a_worker(
    tmp_path: Path, session: Session, pool: Pool, remote: bool
) -> None:
    """A cell that was interrupted in step 2 and is run again: that capture is failed, later ones
    are whole.

    A notebook keeps the last exception, and with it the callback; else it is dropped.
    """
    config = configured(tmp_path, tool="torch", schedule={"every": 1})
    worker = set_up(config, pool.sync[:1])[0] if remote else local_worker(config)
    forgetful = following(config, worker)
    with pytest.raises(KeyboardInterrupt):
        list(cell(forgetful, worker, interrupted_at=2))
    if remote:
        del forgetful
        gc.collect()
    profiling = following(config, worker)
    folders = [folder for folder in cell(profiling, worker) if folder is not None]
    profiling.on_train_end()
    assert len(set(folders)) == 4
    assert all(check(folder).ok for folder in folders)
    forgotten = Path(config.save_path) / "step_000002"
    [lost] = read_manifest(forgotten).workers
    assert (lost.name, lost.status, "never stopped" in lost.reason) == (
        "actor_rank0",
        "failed",
        True,
    )
    assert not check(forgotten).ok
    assert ray.get(worker.is_idle.remote()) if remote else not session.recording
