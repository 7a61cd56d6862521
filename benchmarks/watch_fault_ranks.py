"""The loop of ``watch_faults.py`` that runs on every rank: processes that meet in a collective in each step.

Each rank has a callback and a worker of its own; ``python watch_fault_ranks.py FOLDER`` is one of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from watch_fault_alarms import alarms
from watch_fault_workers import Trainer

from verl_profiling import ProfilingCallback, stage

__all__ = ["LOOP", "RANKS", "faults_of_ranks", "run_on_ranks"]

LOOP = "every rank"
RANKS = 3
_STEPS = 85
"""A capture is announced seconds before it is made."""
_TOLD = "alarms.json"
_PLAN = "plan.json"
_LIMIT_S = 1800


def faults_of_ranks() -> Iterator[dict[str, Any]]:
    """Yield what goes wrong in each run, as the fields of a fault."""
    for rank, what, by in ((0, "rollout", 3.0), (1, "old_log_prob", 6.0), (2, "reward", 10.0)):
        yield _fault("one rank slow", f"actor{rank}", what, by, stage=what, lane=f"actor_rank{rank}")
    for what, by in (("update_actor", 3.0), ("rollout", 4.0)):
        yield _fault("slow on all ranks", "actors", what, by, stage=what)
    for rank in (1, 2):
        yield _fault(
            "one rank behind, no step slow",
            f"actor{rank}",
            "rollout",
            1.6,
            stage="rollout",
            lane=f"actor_rank{rank}",
            every=2,
        )
    for rank in (0, 2):
        yield _fault(
            "memory of one rank grows", f"actor{rank}", "memory", 6.0, lane=f"actor_rank{rank}", steps=110
        )


def _fault(name: str, who: str, what: str, by: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "loop": LOOP, "who": who, "what": what, "by": by, "steps": _STEPS, **more}


def run_on_ranks(plan: dict[str, Any], folder: Path) -> list[str]:
    """Run the loop on all ranks; return what the watch said on rank 0.

    Args:
        plan: ``config``: the settings; ``who``, ``what`` and ``by``: the fault; ``begin``: its first step;
            ``steps``: number of steps.
        folder: Where the ranks find this.

    Raises:
        subprocess.CalledProcessError: A rank has failed.
    """
    folder.mkdir(parents=True)
    (folder / _PLAN).write_text(json.dumps(plan))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, __file__, str(folder)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), **where}, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            if status := rank.wait(_LIMIT_S):
                raise subprocess.CalledProcessError(status, command)
    finally:
        for rank in ranks:
            rank.kill()
    said: list[str] = json.loads((folder / _TOLD).read_text())
    return said


def _run_rank(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    plan = json.loads((folder / _PLAN).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    actor = Trainer()
    actor.set_up(plan["config"], rank, RANKS, seed=rank + 1)
    profiling = ProfilingCallback(plan["config"])
    profiling.add_workers("actor", actor)
    gradient = torch.ones(1000)
    dist.barrier()
    with alarms() as said, profiling:
        for step in range(1, plan["steps"] + 1):
            if step == plan["begin"] and plan["who"] in (f"actor{rank}", "actors"):
                if plan["what"] == "memory":
                    actor.grow(plan["by"])
                else:
                    actor.slow(plan["what"], plan["by"])
            profiling.on_step_begin(step)
            actor.work("rollout")
            with profiling.stage("reward"):
                actor.work("reward")
            actor.work("old_log_prob")
            with stage("update_actor"):
                actor.work("update_actor")
                dist.all_reduce(gradient)
            profiling.on_step_end()
    if rank == 0:
        (folder / _TOLD).write_text(json.dumps(said.texts))
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
