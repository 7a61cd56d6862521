"""A rank of the loop of ``work_judge.py``: FSDP2 over gloo, with lengths and a slow rank that vary.

Writes for each step what the judge holds the report against: the rank's CPU time in its
micro-batches, which no other process on its core makes longer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import FSDPCaptureMixin

WIDTH, LAYERS, MICRO_BATCHES = 128, 2, 24
PLANTS = ("nothing", "data", "machine", "both")


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer of a transformer for sequences of any lengths, without padding: ranks with more of
    them gather its parameters as often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True
        )

    def forward(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of all sequences; each attends to itself alone."""
        return [self.layer(sequence) for sequence in sequences]


class Actor(FSDPCaptureMixin):
    """One rank: a small transformer, which it trains on sequences without padding."""

    def __init__(self, config: dict[str, Any]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        layers = [Layer() for _ in range(LAYERS)]
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        self.policy = torch.nn.Sequential(*layers)
        fully_shard(self.policy, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-4)
        self.init_capture(config, role="actor", mesh=mesh)

    def update(self, batches: list[list[int]]) -> float:
        """Train on micro-batches of sequences; return the CPU time in them (s)."""
        spent_s = 0.0
        for lengths in batches:
            with stage("micro_batch").given(lengths=lengths):
                begun_s = time.thread_time()
                outputs = self.policy([torch.ones(1, length, WIDTH) for length in lengths])
                sum(output.square().mean() for output in outputs).backward()
                spent_s += time.thread_time() - begun_s
        self.optimizer.step()
        self.optimizer.zero_grad()
        return spent_s


def drawn_batches(chance: random.Random, rank: int, heavy: int | None) -> list[list[int]]:
    """Return the lengths of each micro-batch of a rank; a heavy rank has more and longer ones."""
    most, many = (512, 4) if rank == heavy else (384, 2)
    return [[chance.randint(64, most) for _ in range(many)] for _ in range(MICRO_BATCHES)]


def slowed(core: int) -> multiprocessing.process.BaseProcess:
    """Share a core with a process that keeps it busy; return that process."""
    os.sched_setaffinity(0, {core})
    busy = multiprocessing.get_context("fork").Process(target=spin)
    busy.start()
    return busy


def spin() -> None:
    """Keep a core busy."""
    while True:
        pass


def main() -> None:
    """Run the loop on this rank."""
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = os.sched_getaffinity(0)
    core = sorted(cores)[rank % len(cores)]
    schedule = {"steps": list(range(2, steps + 2))}
    config = {"enable": True, "save_path": str(folder), "tool": "torch", "schedule": schedule}
    actor = Actor(config)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", actor)
    chance, facts = random.Random(seed), []
    with profiling:
        for step in range(1, steps + 2):
            plant = PLANTS[(step + seed) % 4]
            heavy = chance.randrange(world) if plant in ("data", "both") else None
            slow = chance.randrange(world) if plant == "machine" else heavy
            slow = None if plant == "data" else slow
            every = [drawn_batches(chance, each, heavy) for each in range(world)]
            busy = slowed(core) if slow == rank else None
            dist.barrier()
            profiling.on_step_begin(step)
            with stage("update_actor"):
                cpu_s = actor.update(every[rank])
            profiling.on_step_end()
            if busy is not None:
                busy.kill()
                busy.join()
                os.sched_setaffinity(0, cores)
            facts.append({"step": step, "cpu_s": cpu_s, "plant": plant, "slow": slow})
    (folder / f"facts{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
