"""A loop of two plain processes that dies in a given way: ``python dying_loop.py FOLDER WAY``."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin, WorkerProcesses, join_callback

STEP = 4


def work(settings: dict[str, Any], address: str, rank: int, tasks: Connection) -> None:
    worker = CaptureMixin()
    worker.init_capture(settings, role="actor", rank=rank, world_size=2)
    join_callback(worker, address, rank)
    while True:
        tasks.send("")
        way = tasks.recv()
        try:
            with stage("update_actor"):
                if way in ("raise", "handled"):
                    raise ValueError("no reward\nin the batch")
                if way in ("kill", "early"):
                    os.kill(os.getpid(), signal.SIGKILL)
        except ValueError:
            if way == "raise":
                raise


def main(folder: str, way: str) -> None:
    settings = {
        "enable": True,
        "save_path": folder,
        "run_id": "dying",
        "tool": "spans",
        "schedule": {"steps": []},
        "watch": {"enable": True, "hang_s": 0.5},
    }
    fork = multiprocessing.get_context("fork")
    group = WorkerProcesses(2)
    with ProfilingCallback(settings) as callback:
        callback.add_workers("actor", group)
        pipes = []
        for rank in range(2):
            pipe, other = fork.Pipe()
            fork.Process(
                target=work, args=(settings, group.address, rank, other), daemon=True
            ).start()
            other.close()
            pipe.recv()
            pipes.append(pipe)
        last = 1 if way == "early" else STEP
        for step in range(1, STEP + 1):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                for rank, pipe in enumerate(pipes):
                    pipe.send(way if (rank, step) == (1, last) else "")
                for pipe in pipes:
                    pipe.recv()
            if step == 1:  # until the processes know where to write
                records = callback.watch.hangs.folder.with_name("processes")  # type: ignore[union-attr]
                while len([*records.glob("*.json")]) < 3:
                    time.sleep(0.05)
            callback.on_step_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
    if sys.argv[2] == "removed":
        shutil.rmtree(sys.argv[1])
    if sys.argv[2] == "after":
        raise ValueError("no evaluation")
