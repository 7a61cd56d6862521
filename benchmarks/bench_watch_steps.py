"""What a step costs with the watch on against off: a loop of Ray actors, in alternating blocks of
one run.

Run: ``python benchmarks/bench_watch_steps.py [--pairs 40]`` on a machine that does nothing else;
six minutes. The workers multiply matrices, always the same number, so that a step takes about 70
ms. A block is a loop with a callback of its own, and the same processes. Counted are the CPU time
of every process, as the kernel has it, and their instructions where it counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch
from results import record, row

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.session import process_session
from verl_profiling.workers import CaptureMixin, RequestLog, RolloutCaptureMixin

RANKS, REPLICAS = 2, 2
MS = {"rollout": 25, "reward": 5, "old_log_prob": 10, "update_actor": 25, "update_weights": 2}
WARM_UP, STEPS = 20, 40
"""Steps of a block before the count begins, and those that are counted:
two times ``watch.every``.
"""

SIZE = 192


def multiply(times: int) -> float:
    """Multiply matrices; return the seconds of CPU time."""
    begin = time.thread_time()
    one, other = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    for _ in range(times):
        torch.mm(one, other)
    return time.thread_time() - begin


class Works:
    """Multiplies matrices in its stages."""

    def set_up(self, config: dict[str, Any], number: int) -> None:
        """Begin a block, as if in a new process."""
        torch.set_num_threads(1)
        process_session().leave()
        process_session().reset()
        self.prepare(config, number)

    def prepare(self, config: dict[str, Any], number: int) -> None:
        """Set the capture up."""


class Trainer(Works, CaptureMixin):
    """A training rank, or the process that rates."""

    def prepare(self, config: dict[str, Any], number: int) -> None:
        """See :class:`Works`; the rater comes after the ranks."""
        self._capture_roles: dict[str, Any] = {}
        role = "actor" if number < RANKS else "reward"
        self.init_capture(
            config, role=role, rank=number % RANKS, world_size=RANKS if role == "actor" else 1
        )

    def work(self, name: str, times: int) -> None:
        """Run a stage."""
        with stage(name):
            multiply(times)


class Server(Works, RolloutCaptureMixin):
    """A rollout engine."""

    def prepare(self, config: dict[str, Any], number: int) -> None:
        """See :class:`Works`."""
        self.init_capture(config, replica=number, requests=RequestLog())

    async def work(self, name: str, times: int) -> None:
        """Answer a batch."""
        with stage(name):
            multiply(times)


@dataclass(frozen=True)
class Cost:
    """What a step took.

    Attributes:
        step_ms: Its duration.
        loop_us: CPU time of the loop's process.
        workers_us: That of the workers.
        all_us: That of all processes, Ray's own as well.
        instructions: What all of them executed; 0 where that is not counted.
    """

    step_ms: float
    loop_us: float
    workers_us: float
    all_us: float
    instructions: float


class Fleet:
    """The processes, and how many multiplications a millisecond is."""

    def __init__(self) -> None:
        start = ray.remote(num_cpus=0)
        self.actors = [start(Trainer).remote() for _ in range(RANKS)]
        self.raters = [start(Trainer).remote()]
        self.servers = [start(Server).remote() for _ in range(REPLICAS)]
        self.set_up({"enable": False})
        multiply(100)
        self.per_ms = 100 / (1e3 * min(multiply(100) for _ in range(20)))
        everybody = [*self.actors, *self.raters, *self.servers]
        self.workers: list[int] = ray.get([one.__ray_call__.remote(_pid) for one in everybody])
        self.loop = psutil.Process()

    def set_up(self, config: dict[str, Any]) -> None:
        """Let all begin a block."""
        for group in ([*self.actors, *self.raters], self.servers):
            ray.get([worker.set_up.remote(config, number) for number, worker in enumerate(group)])

    def runs(self, name: str, workers: Sequence[Any]) -> None:
        """Run a stage on some of them."""
        times = int(self.per_ms * MS[name])
        ray.get([worker.work.remote(name, times) for worker in workers])

    def everybody(self) -> list[int]:
        """Return all processes of the run."""
        return [self.loop.pid, *(child.pid for child in self.loop.children(recursive=True))]


def _pid(worker: object) -> int:
    return os.getpid()


def cpu_ns(process: int) -> int:
    """Return the CPU time of a process: of its clock, which clock_getcpuclockid(3) names so."""
    try:
        return time.clock_gettime_ns((~process << 3) | 2)
    except OSError:
        return 0


@contextlib.contextmanager
def instructions(processes: Sequence[int]) -> Iterator[Callable[[], float]]:
    """Count the instructions of processes; what is yielded returns
    them once the block has ended.
    """
    command = ["perf", "stat", "-x,", "-e", "instructions", "-p", ",".join(map(str, processes))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as perf:
        time.sleep(0.1)
        found: list[float] = []
        yield lambda: found[0]
        perf.send_signal(signal.SIGINT)
        said = perf.communicate()[1]
        found.append(float(said.split(",")[0]))


def why_not_counted() -> str:
    """Return why no instructions are counted here; empty if they are."""
    if shutil.which("perf") is None:
        return "perf is not installed"
    done = subprocess.run(
        ["perf", "stat", "-x,", "-e", "instructions", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if re.match(r"\d+,", done.stderr) else "this machine has no counter of instructions"


def block(fleet: Fleet, watch: bool, counts: bool) -> Cost:
    """Run a loop of its own; return what one of its steps took."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as after:
        config = {
            "enable": True,
            "save_path": folder,
            "schedule": {"steps": [10**9]},
            "watch": {"enable": watch, "trigger": {"max_captures": 0} if watch else None},
        }
        fleet.set_up(config)
        profiling = ProfilingCallback(config)
        profiling.add_workers("actor", fleet.actors)
        profiling.add_workers("reward", fleet.raters)
        profiling.add_rollout(fleet.servers)
        profiling.on_train_begin()
        for number in range(WARM_UP):
            step(fleet, profiling, number)
        processes = fleet.everybody()
        counted = after.enter_context(instructions(processes)) if counts else lambda: 0.0
        before = {process: cpu_ns(process) for process in processes}
        begin = time.perf_counter()
        for number in range(WARM_UP, WARM_UP + STEPS):
            step(fleet, profiling, number)
        took_s = time.perf_counter() - begin
        spent = {
            process: (cpu_ns(process) - before[process]) / 1e3 / STEPS for process in processes
        }
        after.close()
        profiling.on_train_end()
    return Cost(
        step_ms=1e3 * took_s / STEPS,
        loop_us=spent[fleet.loop.pid],
        workers_us=sum(spent[process] for process in fleet.workers),
        all_us=sum(spent.values()),
        instructions=counted() / STEPS,
    )


def step(fleet: Fleet, profiling: ProfilingCallback, number: int) -> None:
    """Run the stages of one step."""
    profiling.on_step_begin(number)
    profiling.on_rollout_begin()
    fleet.runs("rollout", fleet.servers)
    profiling.on_rollout_end()
    with profiling.stage("reward"):
        fleet.runs("reward", fleet.raters)
    for name in ("old_log_prob", "update_actor", "update_weights"):
        with profiling.stage(name):
            fleet.runs(name, fleet.actors)
    profiling.on_step_end()


def of_the_median(values: Sequence[float]) -> list[float]:
    """Return the median between the ends of its 95% interval, which are order statistics."""
    ordered = sorted(values)
    beside = min(math.ceil(0.98 * math.sqrt(len(ordered))), (len(ordered) - 1) // 2)
    half = (len(ordered) - 1) / 2
    return [
        ordered[max(0, math.floor(half) - beside)],
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, math.ceil(half) + beside)],
    ]


def main() -> None:
    """Run the blocks, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--pairs", type=int, default=40, help="how many blocks of each kind")
    pairs = parser.parse_args().pairs
    if why := why_not_counted():
        print(f"SKIPPED: instructions: {why}")
    logging.getLogger("verl_profiling").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    fleet = Fleet()
    found: dict[bool, list[Cost]] = {False: [], True: []}
    for number in range(pairs):
        for watch in (False, True) if number % 2 else (True, False):
            found[watch].append(block(fleet, watch, counts=not why))
    rows = []
    for name, unit, what in (
        ("step_ms", "ms", "a step"),
        ("all_us", "us", "CPU time of all processes in a step"),
        ("loop_us", "us", "CPU time of the loop's process"),
        ("workers_us", "us", f"CPU time of the {len(fleet.workers)} workers"),
        *([] if why else [("instructions", "", "instructions of all processes in a step")]),
    ):
        off, on = ([getattr(cost, name) for cost in found[watch]] for watch in (False, True))
        more = [mine - other for mine, other in zip(on, off, strict=True)]
        share = [100 * each / other for each, other in zip(more, off, strict=True)]
        rows.append(row(f"{what}, watch off", of_the_median(off), unit))
        rows.append(row("with it on, more by", of_the_median(more), unit))
        rows.append(row("with it on, more by", of_the_median(share), "%"))
    method = (
        f"{pairs} pairs of blocks of {STEPS} steps, on and off in turn, the same processes; "
        "of their "
        "differences the median and its 95% interval. "
        + (f"Instructions are not counted: {why}." if why else "Instructions by `perf stat`.")
    )
    record("watch_steps", rows, method=method, peers={})


if __name__ == "__main__":
    main()
