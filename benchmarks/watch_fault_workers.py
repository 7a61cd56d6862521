"""The processes of the loops in ``watch_faults.py``: real mixins, and work that can be made slower.

``python watch_fault_workers.py FOLDER`` is one rank of the loop that runs on every rank. It has a
callback and a worker of its own, and meets the others in a collective in each step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ranks import environments

from verl_profiling import ProfilingCallback, span, stage, trajectory
from verl_profiling.capture.session import process_session
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)

__all__ = ["USUAL_MS", "AgentLoop", "Alarms", "Rater", "Server", "Trainer", "run_on_ranks"]

USUAL_MS = {
    "rollout": 50,
    "reward": 10,
    "old_log_prob": 20,
    "update_actor": 50,
    "update_weights": 10,
}
SPREAD = 0.05
"""Standard deviation of the logarithm of every time."""


class Works:
    """Does nothing for as long as its stages take, and can be made slower in what it does."""

    def set_up(self, config: dict[str, Any], number: int, of: int, seed: int) -> None:
        """Begin a run, as if in a new process."""
        process_session().leave()
        process_session().reset()
        self.random = random.Random(seed)
        self.factors: dict[str, float] = {}
        self.more_mb = 0.0
        self.held: list[bytes] = []
        self.prepare(config, number, of)

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""

    def become(self, what: str, by: float) -> None:
        """Be slower from now on by a factor, in a stage or a tool,
        or hold so much more memory every step.
        """
        if what == "memory":
            self.more_mb = by
        else:
            self.factors[what] = by

    def seconds(self, what: str, usual_ms: float) -> float:
        """Return how long something takes this time."""
        return usual_ms / 1e3 * self.random.lognormvariate(0, SPREAD) * self.factors.get(what, 1.0)


class Trainer(Works, CaptureMixin):
    """A training rank."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, role="actor", rank=number, world_size=of)

    def work(self, name: str) -> None:
        """Run one stage."""
        with stage(name):
            time.sleep(self.seconds(name, USUAL_MS[name]))
            if self.more_mb and name == "update_actor":
                self.held.append(b"\1" * int(self.more_mb * 1e6))


class Rater(Works, CaptureMixin):
    """The one process that rates responses."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, role="reward", rank=number, world_size=of)

    @stage("reward")
    def rate(self) -> None:
        """Rate a batch."""
        time.sleep(self.seconds("reward", USUAL_MS["reward"]))


class Server(Works, RolloutCaptureMixin):
    """A rollout engine."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self.init_capture(config, replica=number, requests=RequestLog())

    @stage("rollout")
    async def generate(self, usual_ms: float) -> None:
        """Answer a batch, or a request."""
        await asyncio.sleep(self.seconds("rollout", usual_ms))


class AgentLoop(Works, AgentLoopCaptureMixin):
    """Runs trajectories: two turns each, with a tool in between."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, rank=number, world_size=of)

    async def run(self, servers: list[Any], trajectories: int) -> None:
        """Run some at once; each has its own server."""
        with stage("rollout"):
            await asyncio.gather(
                *(self._trajectory(at, servers[at % len(servers)]) for at in range(trajectories))
            )

    async def _trajectory(self, sample: int, server: Any) -> None:
        async with trajectory(group="prompt", sample=sample):
            await server.generate.remote(20)
            async with span("tool:search"):
                if "tool" in self.factors:
                    time.sleep(
                        self.seconds("tool", 5)
                    )  # blocks the loop, and every trajectory of it
                else:
                    await asyncio.sleep(self.seconds("tool", 5))
            await server.generate.remote(20)


class Alarms(logging.Handler):
    """Keeps what the watch logs that it noticed, inside of a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._logger = logging.getLogger("verl_profiling.controller.anomalies")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        if record.msg == "watch: %s":
            self.texts.append(record.getMessage())

    def __enter__(self) -> Alarms:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)


def run_on_ranks(plan: dict[str, Any], ranks: int, folder: Path) -> list[str]:
    """Run the loop on all ranks; return what the watch said on rank 0.

    Args:
        plan: ``config``: the settings; ``who``, ``what`` and ``by``: the fault; ``begin``: its
            first step; ``steps``: number of steps.
        ranks: Their number.
        folder: Where the ranks find the plan.

    Raises:
        subprocess.CalledProcessError: A rank has failed.
    """
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, __file__, str(folder)]
    processes = [subprocess.Popen(command, env=of_rank) for of_rank in environments(ranks)]
    try:
        for process in processes:
            if status := process.wait(1800):
                raise subprocess.CalledProcessError(status, command)
    finally:
        for process in processes:
            process.kill()
    said: list[str] = json.loads((folder / "alarms.json").read_text())
    return said


def main(folder: Path) -> None:
    """Run the loop on this rank."""
    import torch
    import torch.distributed as dist

    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    actor = Trainer()
    actor.set_up(plan["config"], rank, dist.get_world_size(), seed=rank + 1)
    profiling = ProfilingCallback(plan["config"])
    profiling.add_workers("actor", actor)
    gradient = torch.ones(1000)
    dist.barrier()
    with Alarms() as alarms, profiling:
        for step in range(1, plan["steps"] + 1):
            if step == plan["begin"] and plan["who"] in (f"actor{rank}", "actors"):
                actor.become(plan["what"], plan["by"])
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
        (folder / "alarms.json").write_text(json.dumps(alarms.texts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
