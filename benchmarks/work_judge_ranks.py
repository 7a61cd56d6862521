"""A rank of a loop of ``work_judge.py``: FSDP2 over gloo, with lengths and a slow rank that vary.

A round is a step with a slow rank, one without, and one in which each rank has the sequences of the
next one. If a rank has more data, a step follows whose micro-batches are dealt, longest first. CPU
times of the second and third step show what the sequences take. All are captured, since recording
takes CPU time, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import FSDPCaptureMixin

WIDTH, LAYERS, MICRO_BATCHES = 128, 2, 12
HALT_S = 0.004  # as long as a time slice of the kernel

PLANTS = {
    # more data, and a slow machine
    (False, False): "nothing",
    (False, True): "machine",
    (True, False): "data",
    (True, True): "both",
}
Batches = list[list[int]]


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer of a transformer for sequences of any lengths, without padding: ranks with more of
    them gather its parameters as often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeated = False
        self.layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True
        )

    def forward(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of all sequences; each attends to itself alone."""
        if self.repeated:
            for sequence in 2 * sequences:
                self.layer(sequence)
        return [self.layer(sequence) for sequence in sequences]


class Actor(FSDPCaptureMixin):
    """One rank: a small transformer, which it trains on sequences without padding."""

    def __init__(self, config: dict[str, Any]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.layers = [Layer() for _ in range(LAYERS)]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        self.policy = torch.nn.Sequential(*self.layers)
        fully_shard(self.policy, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-4)
        self.init_capture(config, role="actor", mesh=mesh)

    def update(self, batches: Batches) -> None:
        """Train on micro-batches of sequences."""
        for lengths in batches:
            with stage("micro_batch").given(lengths=lengths):
                outputs = self.policy([torch.ones(1, length, WIDTH) for length in lengths])
                sum(output.square().mean() for output in outputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def thread_times() -> tuple[float, float]:
    """Return the time that this thread has run on a core, and waited for one (s)."""
    running_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(running_ns) / 1e9, int(queued_ns) / 1e9


def uneven(chance: random.Random, is_heavy: bool) -> Batches:
    """Return the lengths of each micro-batch of a rank; with more data, it has longer ones, too."""
    most, many = (640, 3) if is_heavy else (448, 2)
    return [[chance.randint(32, most) for _ in range(many)] for _ in range(MICRO_BATCHES)]


def long_tailed(chance: random.Random, is_heavy: bool) -> Batches:
    """Return micro-batches of as many sequences each, a few of which are much longer."""
    mean = 5.3 if is_heavy else 4.7
    lengths = [int(chance.lognormvariate(mean, 0.7)) for _ in range(3 * MICRO_BATCHES)]
    return [
        [min(length, 900) + 8 for length in lengths[at::MICRO_BATCHES]]
        for at in range(MICRO_BATCHES)
    ]


def dealt(every: list[Batches]) -> list[Batches]:
    """Return the micro-batches of all ranks dealt anew, longest first, to the rank with least."""
    longest_first = sorted(chain.from_iterable(every), key=sum, reverse=True)
    ranks: list[Batches] = [[] for _ in every]
    for at in range(0, len(longest_first), len(every)):
        shortest_first = sorted(ranks, key=lambda batches: sum(map(sum, batches)))
        for batches, batch in zip(shortest_first, longest_first[at:], strict=False):
            batches.append(batch)
    return ranks


@contextmanager
def busy_core(actor: Actor) -> Iterator[None]:
    """Share this rank's core with a process that keeps it busy."""
    with beside(spin):
        yield


@contextmanager
def halts(actor: Actor) -> Iterator[None]:
    """Stop this rank half of the time."""
    with beside(halt, os.getpid()):
        yield


@contextmanager
def repeated(actor: Actor) -> Iterator[None]:
    """Let this rank do each forward pass three times."""
    for layer in actor.layers:
        layer.repeated = True
    yield
    for layer in actor.layers:
        layer.repeated = False


class Loop(NamedTuple):
    """A loop: its number of ranks, and functions for the lengths and for the slow rank."""

    ranks: int
    batches: Callable[[random.Random, bool], Batches]
    slowness: Callable[[Actor], AbstractContextManager[None]]


LOOPS = {
    "2 ranks, a busy core": Loop(2, uneven, busy_core),
    "4 ranks, one is halted": Loop(4, uneven, halts),
    "2 ranks, long tail, slower kernels": Loop(2, long_tailed, repeated),
}


@contextmanager
def beside(target: Any, *args: Any) -> Iterator[None]:
    """Run a function in a process of its own, on the same core."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()
        if args:
            os.kill(args[0], signal.SIGCONT)


def spin() -> None:
    """Keep a core busy."""
    while True:
        pass


def halt(pid: int) -> None:
    """Stop a process half of the time, until this process ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(HALT_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(HALT_S)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def as_usual(actor: Actor) -> Iterator[None]:
    """Slow nothing down."""
    yield


def run(loop: str, folder: Path, seed: int, rounds: int, environment: dict[str, str]) -> None:
    """Run a loop on this rank. The first rank writes the facts of each step to a file."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    config = {"enable": True, "save_path": str(folder), "tool": "torch", "schedule": {"every": 1}}
    actor = Actor(config)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", actor)
    chance = random.Random(seed)
    actor.update(LOOPS[loop].batches(chance, False))
    with profiling:
        for number in range(rounds):
            unlike, is_heavy = chance.randrange(world), (number + seed) % 2 == 1
            every = [
                LOOPS[loop].batches(chance, is_heavy and each == unlike) for each in range(world)
            ]
            turned = every[1:] + every[:1]
            steps = [(every, rank == unlike), (every, False), (turned, False)]
            if is_heavy:
                steps.append((dealt(every), False))
            times = []
            for at, (batches, is_slow) in enumerate(steps):
                dist.barrier()
                with (LOOPS[loop].slowness if is_slow else as_usual)(actor):
                    profiling.on_step_begin(4 * number + at)
                    begun = thread_times()
                    with stage("update_actor"):
                        actor.update(batches[rank])
                    took = [now - then for now, then in zip(thread_times(), begun, strict=True)]
                    profiling.on_step_end()
                of_ranks: list[Any] = [None] * world
                dist.all_gather_object(of_ranks, took)
                times.append(of_ranks)
            if rank == 0:
                write_facts(folder, 4 * number, is_heavy, times)
    dist.destroy_process_group()


def write_facts(
    folder: Path, step: int, is_heavy: bool, times: list[list[tuple[float, float]]]
) -> None:
    """Write what was planted in the steps of a round, and how long their sequences take.

    Args:
        folder: The folder of the run.
        step: The first step.
        is_heavy: Whether a rank had more data.
        times: By step and rank, the times of :func:`thread_times`.
    """
    alike, turned = ([cpu_s for cpu_s, _ in of_step] for of_step in times[1:3])
    world = len(alike)
    data_s = [(alike[rank] + turned[rank - 1]) / 2 for rank in range(world)]
    for at, of_step in enumerate(times[:3]):
        given = [data_s[(rank + (at == 2)) % world] for rank in range(world)]
        facts = {
            "step": step + at,
            "plant": PLANTS[is_heavy, at == 0],
            "data_s": given,
            "took_s": [cpu_s + queued_s for cpu_s, queued_s in of_step],
        }
        (folder / f"facts{step + at:03d}.json").write_text(json.dumps(facts))
