"""The loop of ``what_if_resources.py``: engines whose iterations take longer with more running
requests.

Run: ``what_if_engine_loop.py FOLDER PLAN``, where the plan is a JSON object with the fields of
:class:`Plan`. An engine has no model: it sleeps for the time of an iteration, and each running
request gets a token. The lengths are the same in every step.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import ray
from what_if_loop import Trainer, pause, work

from verl_profiling import ProfilingCallback, clock, span, stage, trajectory
from verl_profiling.workers import AgentLoopCaptureMixin, RequestLog, RolloutCaptureMixin

ITERATION_SPREAD = 0.05
"""Standard deviation of the logarithm of an iteration's time."""


@dataclass(frozen=True)
class Plan:
    """How long the work of a loop takes.

    Attributes:
        replicas: Number of engines.
        curve_s: Three times (s): of an iteration, what each running request adds to it, and what
            each running request needs at least.
        slots: Most requests that an engine runs at once.
        lengths: Tokens of each generation of a trajectory.
        turns: Turns of each trajectory.
        tool_s: Call of the tool between two turns (s).
        by_turns: Whether engines take trajectories by turns, instead of the engine with the fewest
            requests.
        reward_s: Scoring, by the loop itself (s).
        ranks_s: Update of each training rank (s).
        sync_s: Weight update of each engine (s).
        ahead: Most steps that a rollout is ahead of the training.
        after_rollout: Whether a weight update, and the rollout behind it, also waits for a rollout.
        requests: Whether engines log requests.
        steps: Steps of the run, all but the first two captured.
    """

    replicas: int = 1
    curve_s: tuple[float, float, float] = (0.01, 0.001, 0.0)
    slots: int = 1000
    lengths: tuple[int, ...] = ()
    turns: int = 1
    tool_s: float = 0.2
    by_turns: bool = False
    reward_s: float = 0.1
    ranks_s: tuple[float, ...] = (0.4, 0.4)
    sync_s: float = 0.1
    ahead: int = 0
    after_rollout: bool = False
    requests: bool = True
    steps: int = 7


class Engine(RolloutCaptureMixin):
    """One engine with continuous batching."""

    def __init__(self, plan: Plan, config: dict[str, Any], replica: int) -> None:
        self.plan = plan
        self.waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.running: list[tuple[int, asyncio.Future[int]]] = []
        self.loop: asyncio.Task[None] | None = None
        self.requests = RequestLog()
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.init_capture(config, replica=replica, requests=self.requests)

    async def generate(self, request_id: str, tokens: int) -> None:
        """Answer one request."""
        with self.requests.open(prompt_tokens=8, id=request_id) as request:
            request.arrival_ns = clock.now_ns()
            ended = asyncio.get_running_loop().create_future()
            self.waiting.append((tokens, ended))
            if self.loop is None or self.loop.done():
                self.loop = asyncio.create_task(self.iterate())
            request.scheduled_ns = await ended
            request.response_tokens = tokens

    async def iterate(self) -> None:
        """Run iterations as long as there are requests."""
        begun: dict[asyncio.Future[int], int] = {}
        fixed_s, more_s, least_s = self.plan.curve_s
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.plan.slots:
                self.running.append(self.waiting.popleft())
                begun[self.running[-1][1]] = clock.now_ns()
            running = len(self.running)
            seconds = max(fixed_s + more_s * running, least_s * running)
            await asyncio.sleep(seconds * random.lognormvariate(0, ITERATION_SPREAD))
            await self.may_run.wait()
            self.running = [(left - 1, ended) for left, ended in self.running]
            for left, ended in self.running:
                if not left:
                    ended.set_result(begun[ended])
            self.running = [one for one in self.running if one[0]]

    async def load(self) -> None:
        """Take new weights, while no iteration begins."""
        self.may_run.clear()
        with stage("update_weights"):
            await pause(self.plan.sync_s)
        self.may_run.set()


class AgentLoop(AgentLoopCaptureMixin):
    """The process that makes trajectories."""

    def __init__(self, plan: Plan, config: dict[str, Any], engines: list[Any]) -> None:
        self.plan, self.engines = plan, engines
        self.open = Counter(dict.fromkeys(range(len(engines)), 0))
        self.init_capture(config, rank=0, world_size=1)

    async def roll_out(self, step: int) -> None:
        """Make all trajectories of a step."""
        await asyncio.gather(*(self.play(step, one) for one in range(len(self.plan.lengths))))

    async def play(self, step: int, sample: int) -> None:
        """Make one trajectory."""
        async with trajectory(group=str(step), sample=sample):
            for turn in range(self.plan.turns):
                fewest = min(self.open, key=lambda engine: self.open[engine])
                engine = sample % len(self.engines) if self.plan.by_turns else fewest
                request_id = f"{step}.{sample}.{turn}"
                self.open[engine] += 1
                async with span("generate", request=request_id):
                    await self.engines[engine].generate.remote(
                        request_id, self.plan.lengths[sample]
                    )
                self.open[engine] -= 1
                if turn < self.plan.turns - 1:
                    async with span("tool:search"):
                        await pause(self.plan.tool_s)


def main() -> None:
    """Run the loop."""
    folder, plan = sys.argv[1], Plan(**json.loads(sys.argv[2]))
    config = {
        "enable": True,
        "tool": "spans",
        "save_path": folder,
        "schedule": {"steps": list(range(3, plan.steps + 1))},
        "rollout": {"requests": plan.requests},
    }
    ray.init(log_to_driver=False, logging_level="ERROR")
    ranks = [
        ray.remote(num_cpus=0)(Trainer).remote(plan, config, rank)
        for rank in range(len(plan.ranks_s))
    ]
    engines = [
        ray.remote(num_cpus=0)(Engine).remote(plan, config, one) for one in range(plan.replicas)
    ]
    agents = ray.remote(num_cpus=0)(AgentLoop).remote(plan, config, engines)
    ray.get([rank.ready.remote() for rank in ranks])

    def load(profiling: ProfilingCallback) -> None:
        with profiling.stage("update_weights"):
            ray.get([engine.load.remote() for engine in engines])

    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", ranks)
        profiling.add_rollout(engines)
        profiling.add_workers("agent_loop", [agents])
        coming: dict[int, Any] = {}

        def roll_out(last: int) -> None:
            for step in range(len(coming) + 1, last + 1):
                coming[step] = agents.roll_out.remote(step)

        roll_out(1)
        for step in range(1, plan.steps + 1):
            profiling.on_step_begin(step)
            roll_out(step + plan.ahead - plan.after_rollout)
            profiling.on_rollout_begin()
            ray.get(coming[step])
            profiling.on_rollout_end()
            if plan.after_rollout:
                load(profiling)
                roll_out(step + plan.ahead)
            with profiling.stage("reward"):
                work(plan.reward_s)
            with profiling.stage("update_actor"):
                ray.get([rank.update.remote() for rank in ranks])
            if not plan.after_rollout:
                load(profiling)
            profiling.on_step_end()
        ray.get(list(coming.values()))


if __name__ == "__main__":
    main()
