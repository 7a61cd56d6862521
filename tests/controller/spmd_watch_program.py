"""What one of three ranks runs in the tests of the watch in SPMD: ``spmd_watch_program.py FOLDER SCENARIO``.

In each step the ranks do a part of their own, and meet in a collective. Rank 0 writes its accounts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from fleet import TrainWorker

from verl_profiling import ProfilingCallback, ProfilingConfig, stage

RANK = int(os.environ["RANK"])
LATE = 2
USUAL_S, LATE_S = 0.02, 0.2


def all_know(of_rank_0: bool) -> bool:
    """Return on all ranks what rank 0 says."""
    said = torch.tensor([float(of_rank_0)])
    dist.broadcast(said, 0)
    return bool(said)


def train(config: ProfilingConfig, folder: Path, scenario: str, training: int) -> None:
    """Run one training, of which rank 0 keeps the accounts."""
    profiling = ProfilingCallback(config)
    worker = TrainWorker()
    worker.init_capture(config, role="actor")
    profiling.add_workers("actor", worker)
    accounts = []
    assert (profiling.watch is not None) == config.watch.enable
    if profiling.watch is not None:
        profiling.watch.listeners.append(accounts.append)
    steps = 300 if scenario == "slow" else 8
    dist.barrier()
    with profiling:
        for step in range(1, steps + 1):
            profiling.on_step_begin(step)
            with profiling.stage("rollout"):
                late = RANK == LATE and (scenario != "slow" or step >= 15)
                time.sleep(LATE_S if late else USUAL_S)
            with stage("update_actor"), stage("inside"):
                time.sleep(USUAL_S)
                dist.all_reduce(torch.ones(1))
            profiling.on_step_end()
            if scenario == "slow" and all_know(profiling.last_folder is not None):
                break
    (folder / f"accounts_{RANK}_{training}.json").write_bytes(msgspec.json.encode(accounts))


def main() -> None:
    """Run one rank."""
    folder, scenario, *given = sys.argv[1:]
    settings = {
        "enable": True,
        "tool": "spans",
        "save_path": f"{folder}/run",
        "schedule": {"steps": []},
        "watch": {"enable": True, "every": 3},
        "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
    }
    own = json.loads(given[0]) if given else {}
    config = ProfilingConfig.from_any({**settings, **own.get("all", {}), **own.get(str(RANK), {})})
    dist.init_process_group("gloo")
    if scenario == "files":
        dist.distributed_c10d._get_default_store = lambda: None
        import verl_profiling.controller.spmd as spmd

        spmd.default_store = lambda: None
    for training in range(2 if scenario == "twice" else 1):
        train(config, Path(folder), scenario, training)


if __name__ == "__main__":
    main()
