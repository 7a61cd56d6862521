"""The loop of ``what_if_judge.py``: Ray actors that sleep and compute for as long as they are told.

Run: ``what_if_loop.py FOLDER PLAN``, where the plan is a JSON object with the fields of
:class:`Plan`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import ray

from verl_profiling import ProfilingCallback, span, stage, trajectory
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)

SPREAD = 0.02
"""Standard deviation of the logarithm of every time."""


@dataclass(frozen=True)
class Plan:
    """How long the work of a loop takes.

    Attributes:
        engines_s: Rollout of each engine (s); without trajectories.
        ranks_s: Update of each training rank (s).
        reward_s: Scoring, by the loop itself (s).
        sync_s: Weight update of each engine (s).
        generate_s: A generation of each trajectory (s); empty without trajectories.
        token_s: Generation of each token (s).
        tool_s: Each call of the tool (s).
        turns: Turns of each trajectory.
        done: Share of the trajectories after which the rollout ends.
        slots: Requests that an engine serves at a time.
        limit: Trajectories that run at a time; others wait in a span.
        serial: Whether the tool serves one call at a time; others wait in no span.
        beside: Whether the next rollout runs beside the training.
        steps: Steps of the run, all but the first two captured.
    """

    engines_s: tuple[float, ...] = (0.6, 0.6)
    ranks_s: tuple[float, ...] = (0.5, 0.5)
    reward_s: float = 0.15
    sync_s: float = 0.1
    generate_s: tuple[float, ...] = ()
    token_s: float = 0.01
    tool_s: float = 0.1
    turns: int = 2
    done: float = 1.0
    slots: int = 100
    limit: int = 1000
    serial: bool = False
    beside: bool = False
    steps: int = 7


def work(seconds: float) -> None:
    """Compute for a tenth of a time, and sleep for the rest."""
    seconds *= random.lognormvariate(0, SPREAD)
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.1 * seconds:
        sum(range(1000))
    time.sleep(max(begin + seconds - time.perf_counter(), 0))


async def pause(seconds: float) -> None:
    """Let others work for a time."""
    await asyncio.sleep(seconds * random.lognormvariate(0, SPREAD))


class Engine(RolloutCaptureMixin):
    """One engine."""

    def __init__(self, plan: Plan, config: dict[str, Any], replica: int) -> None:
        self.plan, self.replica = plan, replica
        self.requests, self.slots = RequestLog(), asyncio.Semaphore(plan.slots)
        self.init_capture(config, replica=replica, requests=self.requests)

    async def roll_out(self) -> None:
        """Make the responses of a step."""
        with stage("rollout"):
            await pause(self.plan.engines_s[self.replica])

    async def generate(self, request_id: str, seconds: float) -> None:
        """Answer one request."""
        with self.requests.open(prompt_tokens=8, id=request_id) as request:
            request.arrival_ns = time.time_ns()
            async with self.slots:
                request.scheduled_ns = time.time_ns()
                await pause(seconds)
            request.response_tokens += round(seconds / self.plan.token_s)

    async def load(self) -> None:
        """Take new weights."""
        with stage("update_weights"):
            await pause(self.plan.sync_s)


class AgentLoop(AgentLoopCaptureMixin):
    """The process that makes trajectories."""

    def __init__(self, plan: Plan, config: dict[str, Any], engines: list[Any]) -> None:
        self.plan = plan
        self.engines = itertools.cycle(engines)
        self.limit, self.tool = (
            asyncio.Semaphore(plan.limit),
            asyncio.Semaphore(1 if plan.serial else 1000),
        )
        self.init_capture(config, rank=0, world_size=1)

    async def roll_out(self, step: int) -> None:
        """Make trajectories until enough have ended; the others are given up."""
        made = [
            asyncio.create_task(self.play(step, one)) for one in range(len(self.plan.generate_s))
        ]
        enough = round(self.plan.done * len(made))
        for done in itertools.islice(asyncio.as_completed(made), enough):
            await done
        for task in made:
            task.cancel()
        await asyncio.gather(*made, return_exceptions=True)

    async def play(self, step: int, sample: int) -> None:
        """Make one trajectory."""
        async with trajectory(group=str(step), sample=sample):
            if self.plan.limit < len(self.plan.generate_s):
                async with span("wait:slot"):
                    await self.limit.acquire()
            else:
                await self.limit.acquire()
            try:
                await self.take_turns(step, sample)
            finally:
                self.limit.release()

    async def take_turns(self, step: int, sample: int) -> None:
        """Generate and call the tool, turn by turn."""
        for turn in range(self.plan.turns):
            request_id = f"{step}.{sample}.{turn}"
            async with span("generate", request=request_id):
                await next(self.engines).generate.remote(request_id, self.plan.generate_s[sample])
            async with self.tool, span("tool:search"):
                await pause(self.plan.tool_s)


class Trainer(CaptureMixin):
    """One training rank."""

    def __init__(self, plan: Plan, config: dict[str, Any], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.init_capture(config, role="actor", rank=rank, world_size=len(plan.ranks_s))

    def update(self) -> None:
        """Train on a batch."""
        with stage("update_actor"):
            work(self.plan.ranks_s[self.rank])

    def ready(self) -> None:
        """Answer when it is set up."""


def main() -> None:
    """Run the loop."""
    folder, plan = sys.argv[1], Plan(**json.loads(sys.argv[2]))
    config = {
        "enable": True,
        "tool": "spans",
        "save_path": folder,
        "schedule": {"steps": list(range(3, plan.steps + 1))},
    }
    ray.init(log_to_driver=False, logging_level="ERROR")
    ranks = [
        ray.remote(num_cpus=0)(Trainer).remote(plan, config, rank)
        for rank in range(len(plan.ranks_s))
    ]
    engines = [
        ray.remote(num_cpus=0)(Engine).remote(plan, config, replica)
        for replica in range(len(plan.engines_s))
    ]
    agents = ray.remote(num_cpus=0)(AgentLoop).remote(plan, config, engines)
    ray.get([rank.ready.remote() for rank in ranks] + [agents.roll_out.remote(0)])

    def roll_out(step: int) -> list[Any]:
        if plan.generate_s:
            return [agents.roll_out.remote(step)]
        return [engine.roll_out.remote() for engine in engines]

    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", ranks)
        profiling.add_rollout(engines)
        profiling.add_workers("agent_loop", [agents])
        coming = roll_out(1)
        for step in range(1, plan.steps + 1):
            profiling.on_step_begin(step)
            if not plan.beside and step > 1:
                coming = roll_out(step)
            profiling.on_rollout_begin()
            ray.get(coming)
            profiling.on_rollout_end()
            if plan.beside:
                coming = roll_out(step + 1)
            with profiling.stage("reward"):
                work(plan.reward_s)
            with profiling.stage("update_actor"):
                ray.get([rank.update.remote() for rank in ranks])
            with profiling.stage("update_weights"):
                ray.get([engine.load.remote() for engine in engines])
            profiling.on_step_end()
        ray.get(coming)


if __name__ == "__main__":
    main()
