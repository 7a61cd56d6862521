"""A loop for ``strangers_judge.py``: four unequal ranks with a collective per mini-batch.

The ranks are processes of multiprocessing with gloo, as docs/processes.md has them, and recorded
with torch. They also generate: there is no engine.

Run: ``strangers_ranks.py FOLDER``; see :func:`strangers_work.serve_plans`.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from strangers_work import CHUNK_TOKENS, Model, serve_plans, settings

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin, WorkerProcesses, join_callback

RANKS = 4


class Actor(CaptureMixin):
    """A rank, with the methods that the loop calls."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.rank, self.model = rank, Model()
        self.init_capture(config, role="actor", rank=rank, world_size=RANKS)

    def rollout(self, plan: dict[str, Any]) -> None:
        """Generate this rank's responses."""
        with stage("rollout"):
            self.model.infer(plan["rollout"][self.rank])

    def old_log_prob(self, plan: dict[str, Any]) -> None:
        """Compute log probabilities; the ranks wait for each other after it."""
        with stage("old_log_prob"):
            self.model.infer(plan["old_log_prob"][self.rank])
            dist.barrier()

    def update_actor(self, plan: dict[str, Any]) -> None:
        """Train on mini-batches, with one all-reduce each."""
        with stage("update_actor"):
            for chunks in plan["update_actor"][self.rank]:
                with stage("mini_batch").given(lengths=[CHUNK_TOKENS] * chunks):
                    self.model.train(chunks, plan["pace"][self.rank])
                    dist.all_reduce(self.model.gradients())

    def update_weights(self, plan: dict[str, Any]) -> None:
        """Take the weights of rank 0, and load them."""
        with stage("update_weights"):
            for one in self.model.net.parameters():
                dist.broadcast(one.data, 0)
            self.model.infer(plan["load"])


def work(config: dict[str, Any], address: str, store: str, rank: int, tasks: Connection) -> None:
    """Serve the loop's calls in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    actor = Actor(config, rank)
    join_callback(actor, address, rank)
    tasks.send("ready")
    while (task := tasks.recv()) is not None:
        method, plan = task
        getattr(actor, method)(plan)
        tasks.send("done")
    dist.destroy_process_group()


def main() -> None:
    """Run the loop."""
    folder = Path(sys.argv[1])
    config = settings(folder / "run", tool="torch")
    actors, pipes = WorkerProcesses(RANKS), []
    processes = multiprocessing.get_context("spawn")
    for rank in range(RANKS):
        pipe, tasks = processes.Pipe()
        given = (config, actors.address, str(folder / "store"), rank, tasks)
        processes.Process(target=work, args=given, daemon=True).start()
        pipes.append(pipe)
    model = Model()

    def call(method: str, plan: dict[str, Any]) -> None:
        for pipe in pipes:
            pipe.send((method, plan))
        for pipe in pipes:
            pipe.recv()

    for pipe in pipes:
        pipe.recv()
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", actors)

        def run_step(step: int, plan: dict[str, Any]) -> None:
            profiling.on_step_begin(step)
            profiling.on_rollout_begin()
            call("rollout", plan)
            profiling.on_rollout_end()
            with profiling.stage("reward"):
                model.infer(plan["reward"])
            for method in ("old_log_prob", "update_actor", "update_weights"):
                with profiling.stage(method):
                    call(method, plan)
            profiling.on_step_end()

        serve_plans(run_step)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
