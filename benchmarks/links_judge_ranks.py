"""A rank of the loop of ``links_judge.py``: all_reduce in each pair of three hosts, over gloo.

Each rank runs in a network namespace of its own, with one interface for each of the others. Before
a step, both ends of the drawn pair limit their interfaces.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

RANKS, CALLS = 3, 16
ELEMENTS = 250_000  # of 4 bytes: at the limited rate, a call takes 0.08 s
RATE = "100mbit"


class Actor(CaptureMixin):
    """One rank, which communicates as in hybrid sharding: with each other host, and with all."""

    def __init__(self, config: dict[str, object], rank: int) -> None:
        self.init_capture(config, role="actor", rank=rank, world_size=RANKS)
        self.groups = {pair: dist.new_group(pair) for pair in combinations(range(RANKS), 2)}

    def update(self, rank: int) -> None:
        """Reduce gradients in each pair, then among all ranks."""
        gradients = torch.ones(ELEMENTS)
        for _ in range(CALLS):
            for pair, group in self.groups.items():
                if rank in pair:
                    dist.all_reduce(gradients, group=group)
            dist.all_reduce(gradients[:1000])


def limit(rank: int, pair: tuple[int, ...]) -> None:
    """Limit this rank's interface to the other rank of a pair; lift the limit of all others."""
    for other in {*range(RANKS)} - {rank}:
        device = ["dev", f"to{other}", "root"]
        if {rank, other} == {*pair}:
            limited = ["tbf", "rate", RATE, "burst", "128kb", "latency", "100ms"]
            subprocess.run(["tc", "qdisc", "replace", *device, *limited], check=True)
        else:
            subprocess.run(["tc", "qdisc", "del", *device], check=False, stderr=subprocess.DEVNULL)


def main() -> None:
    """Run the loop on this rank."""
    folder, rank, seed, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
    socket.sethostname(f"host{rank}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule = {"steps": list(range(2, steps + 2))}
    config = {"enable": True, "save_path": str(folder), "tool": "torch", "schedule": schedule}
    actor = Actor(config, rank)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", actor)
    chance, planted = random.Random(seed), {}
    with profiling:
        for step in range(1, steps + 2):
            pair = chance.choice([*actor.groups]) if step % 2 else ()
            planted[step] = "-".join(f"host{end}" for end in pair)
            limit(rank, pair)
            dist.barrier()
            profiling.on_step_begin(step)
            with stage("update_actor"):
                actor.update(rank)
            profiling.on_step_end()
    (folder / f"planted{rank}.json").write_text(json.dumps(planted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
