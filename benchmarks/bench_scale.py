"""What a capture of many workers costs the loop: against the slowest of them, and with hung and
dead ones.

Run: ``python benchmarks/bench_scale.py``. Workers only answer, each with a latency of its own, so
that what is measured is the driving of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import ray
from results import record, row

from verl_profiling import ProfilingCallback
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.clock import now_ns
from verl_profiling.files.run_files import read_manifest
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult

ROUNDS = 7
CAPTURES = 21
LOCAL, ACTORS = 1024, 48
SLOWEST_S = 0.5
HOSTS, ANSWER_S = (1, 32, 128), 0.02
TIMEOUT_S = 2.0
FAULTY = 4


class Worker:
    """Answers after a latency that grows with its rank, up to the slowest."""

    def __init__(self, rank: int, of: int) -> None:
        self.identity = WorkerIdentity(role="actor", rank=rank)
        self.latency_s = SLOWEST_S * (rank + 1) / of
        self.fault = ""

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Answer as told."""
        begin_ns = now_ns()
        if self.fault == "dies":
            os._exit(1)
        await asyncio.sleep(3600 if self.fault == "hangs" else self.latency_s)
        return StartReply(self.identity, "recording", begin_ns)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Answer, at once where it only waits for artifacts."""
        begin_ns = now_ns()
        await asyncio.sleep(0 if capture_id is None else self.latency_s)
        result = CaptureResult(
            identity=self.identity, capture_id=capture_id or "", status="ok", step=1
        )
        return StopReply(result, received_ns=begin_ns)

    async def break_down(self, fault: str) -> None:
        """Hang or die at the next start; with an empty name, do neither."""
        self.fault = fault


class Group:
    """Workers on several hosts that are called all at once; all answer after the same time."""

    def __init__(self, hosts: int) -> None:
        self.workers = [Worker(rank, LOCAL) for rank in range(LOCAL)]
        for rank, worker in enumerate(self.workers):
            host = f"host{rank * hosts // LOCAL}"
            worker.identity = WorkerIdentity(role="actor", rank=rank, host=host, clock_domain=host)
            worker.latency_s = 0.0

    def __len__(self) -> int:
        return len(self.workers)

    def execute_all_async(self, method: str, *arguments: Any) -> list[Reference]:
        """Call them, in the background."""
        references = [Reference() for _ in self.workers]

        async def answer() -> None:
            for worker, reference in zip(self.workers, references, strict=True):
                reference.answer.set_result(await getattr(worker, method)(*arguments))

        threading.Timer(ANSWER_S, lambda: asyncio.run(answer())).start()
        return references


class Reference:
    """What is known of an answer, as Ray has it."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        """Return the answer."""
        return self.answer


def timed(hook: Callable[[], object]) -> float:
    """Return the seconds of a hook."""
    begin = time.perf_counter()
    hook()
    return time.perf_counter() - begin


def captured(
    workers: Sequence[Any] | Group, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of every start and every stop,
    and the driver's resident KiB after each.
    """
    starts, stops, sizes = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        callback = ProfilingCallback(
            {
                "enable": True,
                "tool": "spans",
                "save_path": folder,
                "schedule": {"every": 1},
                "timeouts": {"start_s": TIMEOUT_S, "stop_s": TIMEOUT_S, "finish_s": 1},
            }
        )
        callback.add_workers("actor", workers)
        for step in range(1, rounds + 1):
            starts.append(timed(lambda step=step: callback.on_step_begin(step)))  # type: ignore[misc]
            stops.append(timed(callback.on_step_end))
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss / 1024)
        for step in range(1, rounds + 1):
            written = read_manifest(Path(folder) / f"step_{step:06d}").workers
            if len(written) != len(workers):
                raise SystemExit(f"the manifest of step {step} has {len(written)} workers")
        callback.on_train_end()
    return starts, stops, sizes


def actors() -> list[Any]:
    """Return Ray actors whose processes are there."""
    made = [ray.remote(num_cpus=0)(Worker).remote(rank, ACTORS) for rank in range(ACTORS)]
    ray.get([actor.break_down.remote("") for actor in made])
    return made


def with_faults(made: list[Any]) -> list[float]:
    """Return the seconds of starts of which some workers never answer, and others end."""
    ray.get([actor.break_down.remote("dies") for actor in made[-FAULTY:]])
    starts = []
    for _ in range(ROUNDS):
        ray.get([actor.break_down.remote("hangs") for actor in made[:FAULTY]])
        starts += captured(made, 1)[0]
        ray.get([actor.break_down.remote("") for actor in made[:FAULTY]])
    return starts


def main() -> None:
    """Measure and print."""
    logging.disable(logging.ERROR)
    local_starts, local_stops, sizes = captured(
        [Worker(rank, LOCAL) for rank in range(LOCAL)], CAPTURES
    )
    grouped = {hosts: captured(Group(hosts), ROUNDS + 1) for hosts in HOSTS}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    made = actors()
    actor_starts, actor_stops, _ = captured(made, ROUNDS + 1)
    faulty_starts = with_faults(made)
    ray.shutdown()
    half = CAPTURES // 2
    grown = (sizes[-1] - sizes[half]) / (CAPTURES - 1 - half)
    slowest, timeout = "the slowest worker's answer", "`timeouts.start_s`"

    def against_slowest(what: str, seconds: list[float]) -> dict[str, Any]:
        return row(what, seconds, "s", against=slowest, of=[SLOWEST_S] * len(seconds), hosts=1)

    def against_answer(what: str, seconds: list[float], hosts: int) -> dict[str, Any]:
        return row(
            what, seconds, "s", against="one answer", of=[ANSWER_S] * len(seconds), hosts=hosts
        )

    record(
        "scale",
        [
            row(slowest, [SLOWEST_S], "s"),
            row(f"the answers of {LOCAL:,} workers together", [sum_of_answers(LOCAL)], "s"),
            against_slowest(f"start of {LOCAL:,} local coroutines", local_starts[1:]),
            against_slowest("their stop, with one manifest", local_stops[1:]),
            row("what a capture of them adds to the driver's memory", [grown], "KiB"),
            *(
                against_answer(what, seconds[1:], hosts)
                for hosts, (starts, stops, _) in grouped.items()
                for what, seconds in (
                    (f"start of a group of {LOCAL:,}", starts),
                    ("their stop", stops),
                )
            ),
            against_slowest(f"start of {ACTORS} Ray actors", actor_starts[1:]),
            against_slowest("their stop, with one manifest", actor_stops[1:]),
            row(
                f"start of {ACTORS} Ray actors, of which {FAULTY} hang and {FAULTY} are dead",
                faulty_starts,
                "s",
                against=timeout,
                of=[TIMEOUT_S] * len(faulty_starts),
                hosts=1,
            ),
        ],
        method=f"Workers that answer after up to {SLOWEST_S} s, the later the higher their rank; "
        f"{CAPTURES} captures of the local ones, the memory over the second half of them; "
        f"{ROUNDS} of the "
        f"actors and of the groups, whose workers all answer after {ANSWER_S} s, by the clock.",
        peers={},
    )


def sum_of_answers(workers: int) -> float:
    """Return the seconds that calling one worker after another would take."""
    return sum(Worker(rank, workers).latency_s for rank in range(workers))


if __name__ == "__main__":
    main()
