"""The loop of ``watch_judge.py`` that runs on every rank: each plays trajectories and trains with
FSDP.

``watch_judge.py`` starts it as ``torchrun`` does. Parameters are gathered in the forward pass and
gradients reduced in the backward pass, by gloo.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from watch_judge_plan import Plan

from verl_profiling import ProfilingCallback, span, stage, trajectory
from verl_profiling.workers import FSDPCaptureMixin

WIDTH = 128


class Actor(FSDPCaptureMixin):
    """One rank: a policy, which it also generates with."""

    def __init__(self, plan: Plan) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.plan, self.rank = plan, dist.get_rank()
        self.policy = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )
        fully_shard(self.policy, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-3)
        self.init_capture(plan.config(), role="actor", mesh=mesh)

    async def roll_out(self, step: int) -> None:
        """Make all trajectories at once."""
        await asyncio.gather(*(self.play(step, sample) for sample in range(4)))

    async def play(self, step: int, sample: int) -> None:
        """Make one trajectory."""
        async with trajectory(group=str(step), sample=sample):
            for _turn in range(2):
                async with span("generate"):
                    await asyncio.sleep(self.plan.seconds(0.01, step, f"engine {self.rank}"))
                async with span("tool:search"):
                    await asyncio.sleep(self.plan.seconds(self.plan.tool_s, step, "tool"))

    def update(self, step: int) -> None:
        """Train on a batch."""
        with stage("compute") if self.plan.split else nullcontext():
            time.sleep(self.plan.seconds(0.03, step, "update", f"compute {self.rank}"))
        with stage("all_reduce") if self.plan.split else nullcontext():
            self.policy(torch.ones(1, WIDTH)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    """Run the loop on this rank."""
    plan = Plan.begin_run()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    actor = Actor(plan)
    profiling = ProfilingCallback(plan.config())
    profiling.add_workers("actor", actor)
    goes_on = torch.zeros(1)
    with profiling:
        for step in itertools.count(1):
            goes_on.fill_(float(plan.goes_on(step)))
            dist.broadcast(goes_on, 0)
            if not goes_on:
                break
            profiling.on_step_begin(step)
            with profiling.stage("rollout") if plan.marked is not False else nullcontext():
                asyncio.run(actor.roll_out(step))
            time.sleep(plan.seconds(0.008, step, "own code"))
            with profiling.stage("update_actor") if not plan.split else nullcontext():
                actor.update(step)
            profiling.on_step_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
