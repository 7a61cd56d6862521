"""A trainer and an engine, two processes on one card: ``python card_loop.py FOLDER WAY``.

The card is a stand-in of the hardware: numbers in shared memory, in the place of ``torch.cuda``'s
functions. It holds 80 GB. All else is real. The engine is no process of the watch.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin, WorkerProcesses, join_callback

GB = 10**9
TOTAL, CONTEXT = 80 * GB, 2 * GB
OVERLAP_S = 0.4
STEPS = 4


class Card:
    """What is held of it, in bytes."""

    def __init__(self) -> None:
        self.engine = multiprocessing.Value("q", 0)
        self.reserved = multiprocessing.Value("q", 0)
        self.allocated = multiprocessing.Value("q", 0)
        self.peak = multiprocessing.Value("q", 0)
        self.memory = self
        self.readers: set[str] = set()

    def hold(self, reserved: int, allocated: int) -> None:
        if reserved * GB > TOTAL - CONTEXT - self.engine.value:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 27.94 GiB.")
        self.reserved.value, self.allocated.value = reserved * GB, allocated * GB
        self.peak.value = max(self.peak.value, self.allocated.value)

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        here = index == 3  # the process uses this one; threads begin with the first one
        allocated = {"current": here * self.allocated.value, "peak": here * self.peak.value}
        reserved = {"current": here * self.reserved.value}
        return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}

    def memory_reserved(self, index: int) -> int:
        return self.reserved.value if index == 3 else 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        assert index == 3, "a context would be made on another device"
        self.readers.add(threading.current_thread().name)
        return TOTAL - CONTEXT - self.engine.value - self.reserved.value, TOTAL

    def current_device(self) -> int:
        return 3 * (threading.current_thread() is threading.main_thread())

    def synchronize(self, *_: object) -> None:
        raise AssertionError("a reading waits for the device")

    def put_in(self) -> None:
        """Take the place of ``torch.cuda`` in this process."""
        for name in (
            "memory",
            "memory_reserved",
            "mem_get_info",
            "current_device",
            "synchronize",
        ):
            setattr(torch.cuda, name, getattr(self, name))
        uuid = SimpleNamespace(uuid="6ae1ee18-5f0e-4e0b-bd0e-4d1c5ad4e3a1")
        torch.cuda.get_device_properties = lambda index: uuid
        torch.cuda.device_count = lambda: 8
        torch.cuda.is_initialized = lambda: True


def engine(card: Card, tasks: Connection) -> None:
    while True:
        card.engine.value = tasks.recv() * GB
        tasks.send("")


class Trainer(CaptureMixin):
    """Keeps 20 GB of the card; trains with 50 GB, of which 6 are cached."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.init_capture(settings, role="actor", rank=0, world_size=1)

    def update_actor(self, card: Card) -> None:
        with stage("update_actor"):
            card.hold(50, 44)
            time.sleep(0.06)

    def offload(self, card: Card) -> None:
        with stage("offload"):
            time.sleep(OVERLAP_S)
            card.hold(20, 20)


def work(settings: dict[str, Any], address: str, card: Card, tasks: Connection) -> None:
    card.put_in()
    card.hold(20, 20)
    trainer = Trainer(settings)
    join_callback(trainer, address, 0)
    ways: dict[str, Callable[[Card], None]] = {
        "update": trainer.update_actor,
        "offload": trainer.offload,
    }
    while True:
        tasks.send(sorted(card.readers))
        ways[tasks.recv()](card)


def main(folder: str, way: str) -> None:
    settings = {
        "enable": True,
        "save_path": folder,
        "tool": "spans",
        "schedule": {"steps": []},
        "watch": {"enable": True, "every": 1, "hang_s": 10},
    }
    fork = multiprocessing.get_context("fork")
    group, card = WorkerProcesses(1), Card()
    with ProfilingCallback(settings) as callback:
        callback.add_workers("actor", group)
        (trains, theirs), (generates, its) = fork.Pipe(), fork.Pipe()
        worker = (settings, group.address, card, theirs)
        fork.Process(target=work, args=worker, daemon=True).start()
        theirs.close()
        fork.Process(target=engine, args=(card, its), daemon=True).start()
        readers = trains.recv()

        def call(pipe: Connection, task: object) -> Any:
            pipe.send(task)
            return pipe.recv()

        for step in range(1, STEPS + 1):
            callback.on_step_begin(step)
            with callback.stage("rollout"):
                call(generates, 40)
                time.sleep(0.06)
                call(generates, 1)
            if (way, step) == ("full", STEPS):
                call(generates, 40)
            with callback.stage("update_actor"):
                readers = call(trains, "update")
            with callback.stage("wake_up"):
                call(generates, 26)
                readers = call(trains, "offload")
            if step == 1:
                time.sleep(2.5)  # the thread of the process reads, too
            callback.on_step_end()
        print(*readers, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
