"""The loop of ``watch_judge.py`` that is one step off: it generates a batch while it trains on
another.

A loop of coroutines, and Ray actors: two training ranks with DDP over gloo, two engines, two agent
loops that mark their stage, and a process that rates.
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

from verl_profiling import AsyncProfilingCallback, span, stage, trajectory
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RewardCaptureMixin,
    RolloutCaptureMixin,
)

RANKS, ENGINES, LOOPS, TRAJECTORIES = 2, 2, 2, 3
WIDTH = 128


class Engine(RolloutCaptureMixin):
    """Answers requests, and takes new weights."""

    def __init__(self, plan: Plan, replica: int) -> None:
        self.plan, self.replica = plan, replica
        self.requests = RequestLog()
        self.init_capture(plan.config(), replica=replica, requests=self.requests)

    async def generate(self, request_id: str, step: int) -> None:
        """Answer one request."""
        with self.requests.open(prompt_tokens=8, id=request_id):
            await asyncio.sleep(self.plan.seconds(0.01, step, f"engine {self.replica}"))

    @stage("update_weights")
    def take_weights(self, step: int) -> None:
        """Take new weights."""
        time.sleep(self.plan.seconds(0.005, step))


class Rater(RewardCaptureMixin):
    """Scores responses."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.init_capture(plan.config())

    async def rate(self, step: int) -> float:
        """Score one."""
        async with span("reward"):
            await asyncio.sleep(self.plan.seconds(0.005, step, "reward"))
        return 1.0


class AgentLoop(AgentLoopCaptureMixin):
    """Plays trajectories, each on one engine."""

    def __init__(self, plan: Plan, rank: int, engines: list[Any], rater: Any) -> None:
        self.plan, self.rank, self.engines, self.rater = plan, rank, engines, rater
        self.slot = asyncio.Semaphore(plan.slots or TRAJECTORIES)
        self.init_capture(plan.config(), rank=rank, world_size=LOOPS)

    async def roll_out(self, step: int) -> None:
        """Make all trajectories at once."""
        with stage("trajectories") if self.plan.marked is not False else nullcontext():
            await asyncio.gather(*(self.play(step, sample) for sample in range(TRAJECTORIES)))

    async def play(self, step: int, sample: int) -> None:
        """Make one trajectory."""
        request_id = f"{step}.{self.rank}.{sample}"
        async with trajectory(group=f"{step}.{self.rank}", sample=sample):
            async with span("wait:slot") if self.plan.slots else nullcontext():
                await self.slot.acquire()
            try:
                for turn in range(2):
                    async with span("generate", request=f"{request_id}.{turn}"):
                        await self.engines[sample % ENGINES].generate.remote(
                            f"{request_id}.{turn}", step
                        )
                    async with span("tool:search"):
                        await asyncio.sleep(self.plan.seconds(self.plan.tool_s, step, "tool"))
            finally:
                self.slot.release()
            async with span("reward"):
                await self.rater.rate.remote(step)


class Trainer(CaptureMixin):
    """One training rank."""

    def __init__(self, plan: Plan, rank: int, address: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        self.plan, self.rank, self.batch = plan, rank, torch.ones(1, WIDTH)
        self.policy = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-3)
        self.init_capture(plan.config(), role="actor", rank=rank, world_size=RANKS)

    @stage("old_log_prob")
    def old_log_prob(self, step: int) -> None:
        """Run one forward pass."""
        time.sleep(self.plan.seconds(0.01, step))

    def update(self, step: int) -> None:
        """Train on a batch."""
        if self.plan.split:
            with stage("compute"):
                self.compute(step)
            with stage("all_reduce"):
                self.learn()
        else:
            with stage("update_actor"):
                self.compute(step)
                self.learn()

    def compute(self, step: int) -> None:
        """Do what this rank has to do of the batch."""
        time.sleep(self.plan.seconds(0.03, step, "update", f"compute {self.rank}"))

    def learn(self) -> None:
        """Reduce the gradients, and take a step."""
        self.policy(self.batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


async def main() -> None:
    """Run the loop."""
    plan = Plan.begin_run()
    ray.init(log_to_driver=False, logging_level="ERROR")
    address = f"file://{tempfile.mkdtemp()}/rendezvous"
    actors = [ray.remote(num_cpus=0)(Trainer).remote(plan, rank, address) for rank in range(RANKS)]
    engines = [ray.remote(num_cpus=0)(Engine).remote(plan, replica) for replica in range(ENGINES)]
    rater = ray.remote(num_cpus=0)(Rater).remote(plan)
    loops = [
        ray.remote(num_cpus=0)(AgentLoop).remote(plan, rank, engines, rater)
        for rank in range(LOOPS)
    ]

    def generation(step: int) -> list[Any]:
        return [one.roll_out.remote(step) for one in loops]

    await asyncio.gather(*(actor.old_log_prob.remote(0) for actor in actors), *generation(0))
    async with AsyncProfilingCallback(plan.config()) as profiling:
        profiling.add_workers("actor", actors)
        profiling.add_rollout(engines)
        profiling.add_workers("agent_loop", loops)
        profiling.add_workers("reward", [rater])
        batch = generation(1)
        for step in itertools.takewhile(plan.goes_on, itertools.count(1)):
            await profiling.on_step_begin(step)
            with profiling.stage("wait_rollout"):
                await asyncio.gather(*batch)
            with profiling.stage("update_weights"):
                await asyncio.gather(*(engine.take_weights.remote(step) for engine in engines))
            batch = generation(step + 1)
            await asyncio.sleep(plan.seconds(0.008, step, "own code"))
            with profiling.stage("old_log_prob"):
                await asyncio.gather(*(actor.old_log_prob.remote(step) for actor in actors))
            with profiling.stage("update_actor"):
                await asyncio.gather(*(actor.update.remote(step) for actor in actors))
            await profiling.on_step_end()
        await asyncio.gather(*batch)


if __name__ == "__main__":
    asyncio.run(main())
