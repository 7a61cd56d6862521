"""An engine, an agent loop, a reward service and training ranks for the loops of
``strangers_judge.py``, written after docs/agents.md and docs/engines.md.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import ray
import torch
from strangers_work import GAP_S, Model

from verl_profiling import span, stage, trajectory
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RewardCaptureMixin,
    RolloutCaptureMixin,
)

RANKS = 2


class Engine(RolloutCaptureMixin):
    """An engine with continuous batching: an iteration makes a token of each running request."""

    def __init__(self, config: dict[str, Any], replica: int) -> None:
        self.model = Model()
        self.running: list[list[Any]] = []
        self.log = RequestLog()
        self.init_capture(config, replica=replica, requests=self.log)

    async def start(self) -> None:
        """Begin to serve."""
        self.loop = asyncio.create_task(self.iterate())

    async def iterate(self) -> None:
        """Run iterations while there are requests."""
        while True:
            if self.running:
                with torch.no_grad():
                    self.model.net(self.model.data[: len(self.running)])
                for one in self.running:
                    one[0] -= 1
                    if not one[0]:
                        one[1].set()
                self.running = [one for one in self.running if one[0]]
            await asyncio.sleep(1.5 * GAP_S)

    async def generate(self, request_id: str, tokens: int) -> None:
        """Answer one request."""
        with self.log.open(prompt_tokens=16, id=request_id) as request:
            ended = asyncio.Event()
            self.running.append([tokens, ended])
            await ended.wait()
            request.response_tokens = tokens

    async def load(self, chunks: int) -> None:
        """Take new weights."""
        with stage("update_weights"):
            for _ in range(chunks):
                await asyncio.sleep(GAP_S)


class Reward(RewardCaptureMixin):
    """A service that scores one response at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.model, self.lock = Model(), threading.Lock()
        self.init_capture(config)

    def score(self, chunks: int) -> None:
        """Score a response."""
        with self.lock, stage("reward"):
            self.model.infer(chunks)


class AgentLoop(AgentLoopCaptureMixin):
    """Makes trajectories; a pool limits the environments."""

    def __init__(self, config: dict[str, Any], engine: Any, reward: Any) -> None:
        self.engine, self.reward, self.model = engine, reward, Model()
        self.init_capture(config, rank=0, world_size=1)

    async def play(self, step: int, plan: dict[str, Any]) -> None:
        """Make all trajectories of a step, or as many as are wanted."""
        self.pool = asyncio.Semaphore(plan["pool"])
        made = [
            asyncio.create_task(self.play_one(step, sample, plan))
            for sample in range(len(plan["tokens"]))
        ]
        for ended in list(asyncio.as_completed(made))[: plan["wanted"]]:
            await ended
        for task in made:
            task.cancel()
        await asyncio.gather(*made, return_exceptions=True)

    async def play_one(self, step: int, sample: int, plan: dict[str, Any]) -> None:
        """Make one trajectory in an environment of the pool."""
        async with trajectory(group=str(step), sample=sample):
            async with span("wait:environment"):
                await self.pool.acquire()
            try:
                for turn in range(plan["turns"]):
                    request_id = f"{step}.{sample}.{turn}"
                    async with span("generate", request=request_id):
                        await self.engine.generate.remote(request_id, plan["tokens"][sample])
                    if plan["search_s"]:
                        async with span("tool:search"):
                            await asyncio.sleep(plan["search_s"])
                if plan["sandbox"]:
                    async with span("tool:sandbox"):
                        await self.sandbox(plan)
            finally:
                self.pool.release()
            if plan["score"]:
                async with span("reward"):
                    await self.reward.score.remote(plan["score"])

    async def sandbox(self, plan: dict[str, Any]) -> None:
        """Run the answer's code, on the event loop or in a thread."""
        if plan["in_threads"]:
            await asyncio.to_thread(self.model.infer, plan["sandbox"])
        else:
            self.model.infer(plan["sandbox"])


class Trainer(CaptureMixin):
    """A training rank."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.rank, self.model = rank, Model()
        self.init_capture(config, role="actor", rank=rank, world_size=RANKS)

    def update(self, plan: dict[str, Any]) -> None:
        """Train on a batch."""
        with stage("update_actor"):
            self.model.train(plan["update_actor"][self.rank])

    def ready(self) -> float:
        """Answer once the process is up."""
        return time.time()


class Workers:
    """All processes of a loop."""

    def __init__(self, config: dict[str, Any]) -> None:
        # the workers of the loop compete with it as equals, and not at a lower priority
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
        free = {"num_cpus": 0}
        self.engine = ray.remote(**free)(Engine).remote(config, 0)
        self.reward = ray.remote(**free, max_concurrency=16)(Reward).remote(config)
        agents = ray.remote(**free, max_concurrency=100)(AgentLoop)
        self.agents = agents.remote(config, self.engine, self.reward)
        self.ranks = [ray.remote(**free)(Trainer).remote(config, rank) for rank in range(RANKS)]
        ray.get([self.engine.start.remote(), *(rank.ready.remote() for rank in self.ranks)])

    def add_to(self, profiling: Any) -> None:
        """Add all processes to the callback."""
        profiling.add_workers("actor", self.ranks)
        profiling.add_rollout([self.engine])
        profiling.add_workers("agent_loop", [self.agents])
        profiling.add_workers("reward", [self.reward])

    def update(self, plan: dict[str, Any]) -> None:
        """Train on all ranks."""
        ray.get([rank.update.remote(plan) for rank in self.ranks])

    def load(self, plan: dict[str, Any]) -> None:
        """Send the weights to the engine."""
        ray.get(self.engine.load.remote(plan["load"]))
