"""The loop of ``watch_judge.py`` that a new user has, by docs/watch.md, agents.md and engines.md
alone.

Ray actors: two training ranks, two engines of their own, and an agent loop.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import ray
from watch_judge_plan import Plan

from verl_profiling import ProfilingCallback, span, stage, trajectory
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)

RANKS, ENGINES, TRAJECTORIES = 2, 2, 4


class Engine(RolloutCaptureMixin):
    """Answers requests."""

    def __init__(self, plan: Plan, replica: int) -> None:
        self.plan, self.replica = plan, replica
        self.requests = RequestLog()
        self.init_capture(plan.config(), replica=replica, requests=self.requests)

    async def generate(self, request_id: str, tokens: int, step: int) -> None:
        """Answer one request; several may be under way at the same time."""
        with self.requests.open(prompt_tokens=8, id=request_id) as request:
            await asyncio.sleep(self.plan.seconds(0.0012 * tokens, step, f"engine {self.replica}"))
            request.response_tokens += tokens


class AgentLoop(AgentLoopCaptureMixin):
    """Plays trajectories of two turns with a tool in between."""

    def __init__(self, plan: Plan, engines: list[Any]) -> None:
        self.plan = plan
        self.engines = itertools.cycle(engines)
        self.slot = asyncio.Semaphore(plan.slots or TRAJECTORIES)
        self.init_capture(plan.config(), rank=0, world_size=1)

    async def roll_out(self, step: int) -> None:
        """Make all trajectories at once."""
        plays = (self.play(f"{step}", sample, step) for sample in range(TRAJECTORIES))
        if self.plan.marked:
            with stage("trajectories"):
                await asyncio.gather(*plays)
        else:
            await asyncio.gather(*plays)

    async def play(self, uid: str, sample: int, step: int) -> None:
        """Make one trajectory."""
        async with trajectory(group=uid, sample=sample) as made:
            async with span("wait:slot") if self.plan.slots else nullcontext():
                await self.slot.acquire()
            try:
                await self.turns(uid, sample, step)
            finally:
                self.slot.release()
            async with span("reward"):
                await asyncio.sleep(self.plan.seconds(0.003, step, "reward"))
            made.add(turns=2, reward=1.0)

    async def turns(self, uid: str, sample: int, step: int) -> None:
        """Take two turns."""
        for turn in range(2):
            request_id = f"{uid}.{sample}.{turn}"
            async with span("generate", request=request_id):
                await next(self.engines).generate.remote(request_id, 8 * (1 + sample % 2), step)
            async with span("tool:search"):
                await asyncio.sleep(self.plan.seconds(self.plan.tool_s, step, "tool"))


class Trainer(CaptureMixin):
    """One training rank."""

    def __init__(self, plan: Plan, rank: int, address: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        self.plan, self.rank = plan, rank
        self.gradient, self.all_reduce = torch.ones(100_000), dist.all_reduce
        self.init_capture(plan.config(), role="actor", rank=rank, world_size=RANKS)

    def update(self, step: int) -> None:
        """Train on a batch."""
        if self.plan.split:
            with stage("compute"):
                self.compute(step)
            with stage("all_reduce"):
                self.all_reduce(self.gradient)
        else:
            with stage("update_actor"):
                self.compute(step)
                self.all_reduce(self.gradient)

    def compute(self, step: int) -> None:
        """Run forward and backward."""
        time.sleep(self.plan.seconds(0.03, step, "update", f"compute {self.rank}"))

    def ready(self) -> None:
        """Answer when it is set up."""


def main() -> None:
    """Run the loop."""
    plan = Plan.begin_run()
    ray.init(log_to_driver=False, logging_level="ERROR")
    address = f"file://{tempfile.mkdtemp()}/rendezvous"
    actors = [ray.remote(num_cpus=0)(Trainer).remote(plan, rank, address) for rank in range(RANKS)]
    engines = [ray.remote(num_cpus=0)(Engine).remote(plan, replica) for replica in range(ENGINES)]
    agent_loop = ray.remote(num_cpus=0)(AgentLoop).remote(plan, engines)
    ray.get([actor.ready.remote() for actor in actors] + [agent_loop.roll_out.remote(0)])

    with ProfilingCallback(plan.config()) as profiling:
        profiling.add_workers("actor", actors)
        profiling.add_rollout(engines)
        profiling.add_workers("agent_loop", [agent_loop])
        for step in itertools.takewhile(plan.goes_on, itertools.count(1)):
            profiling.on_step_begin(step)
            profiling.on_rollout_begin()
            ray.get(agent_loop.roll_out.remote(step))
            profiling.on_rollout_end()
            time.sleep(plan.seconds(0.008, step, "own code"))
            with profiling.stage("update_actor"):
                ray.get([actor.update.remote(step) for actor in actors])
            profiling.on_step_end()


if __name__ == "__main__":
    main()
