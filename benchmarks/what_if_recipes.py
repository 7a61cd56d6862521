"""The recipes for ``what_if_judge.py``: real models, engines and training, with a workload that is
replayed.

Run: ``what_if_recipes.py FOLDER RECIPE OVERRIDES PLANS``. The overrides of the configuration are a
JSON list of texts, the plans one of objects with the fields of :class:`Plan`. The processes start
once; each plan is a run of its own. All steps have the same prompts, numbers of tokens, turns, and
calls of tools.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.agent_tiny import agent_loop, environment
from recipes.agent_tiny import train as agent_tiny
from recipes.grpo_tiny import rollout, workers
from recipes.grpo_tiny import train as grpo_tiny
from verl_profiling.integrations.tiny_grpo import END, NUMBERS

WARM, CAPTURED = 1, 5
"""Steps of a run."""


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    Attributes:
        generate: Number of times that each replica generates its batch.
        epochs: Epochs of the update.
        rows: Number of times that each rank has its rows in a mini-batch.
        agent: Settings of the agent loops.
        sandbox_s: Duration of a call of the sandbox (s).
        done: Share of the trajectories after which the rollout ends.
    """

    generate: tuple[int, ...] = (1, 1)
    epochs: int = 1
    rows: tuple[int, ...] = (1, 1)
    agent: dict[str, Any] = field(default_factory=dict)
    sandbox_s: float = 0.1
    done: float = 1.0


class Rank(workers.ActorWorker):
    """A training rank that does some of its work several times."""

    def begin(self, plan: Plan) -> None:
        """Begin a run."""
        self.plan = plan
        self.mini_batches = 2 * plan.epochs

    def update_actor(self, batch: dict[str, torch.Tensor]) -> None:
        """Train on the planned rows."""
        many = self.plan.epochs * self.plan.rows[torch.distributed.get_rank()]
        super().update_actor({name: torch.cat([tensor] * many) for name, tensor in batch.items()})


def response(name: str) -> list[int]:
    """Return the response with a name, as long as one of a model without training."""
    rng, tokens = random.Random(name), list[int]()
    while len(tokens) < NUMBERS and END not in tokens:
        tokens.append(rng.randint(0, END))
    return tokens


class Replayed:
    """An engine that makes as many tokens as the response has that it returns."""

    passes = 1

    async def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Make a batch as often as planned."""
        for _ in range(self.passes):
            self._request_ids = (f"{time.time_ns()}.{place}" for place in itertools.count())
            await super().generate(prompts)
        return [response(str(place)) for place in range(len(prompts))]

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Make one response, which has the name of its request without the step."""
        answer = response(request_id.partition(".")[2])
        self.expect(prompt, len(answer))
        await super().complete(prompt, request_id)
        return answer


class Transformers(Replayed, rollout.TransformersEngine):
    """The engine in the process of the replica."""

    tokens: dict[int, int] = {}

    def expect(self, prompt: list[int], tokens: int) -> None:
        """Set the number of tokens; a batch has the most."""
        self.tokens[id(prompt)] = tokens

    def _sample(self, prompts: list[list[int]]) -> list[list[int]]:
        self.handle.generation_config.eos_token_id = None
        rollout.RESPONSE_LENGTH = self.tokens.pop(id(prompts[0]), NUMBERS)
        return super()._sample(prompts)


class VLLM(Replayed, rollout.VLLMEngine):
    """vLLM."""

    def expect(self, prompt: list[int], tokens: int) -> None:
        """Set the number of tokens."""
        self._sampling = type(self._sampling)(max_tokens=tokens, ignore_eos=True, detokenize=False)


class Server(rollout.RolloutServer):
    """A replica."""

    async def start(self) -> None:
        """Start its engine."""
        rollout.ENGINES.update(transformers=Transformers, vllm=VLLM)
        await super().start()

    async def begin(self, plan: Plan) -> None:
        """Begin a run."""
        self.engine.passes = plan.generate[self.replica]


class Tools(environment.Tools):
    """Tools with a sandbox whose calls take the same time."""

    def __init__(self, config: DictConfig, sandbox_s: float) -> None:
        super().__init__(OmegaConf.merge(config, {"sandbox_s": 0}))
        self.sandbox_s = sandbox_s

    def _run(self, number: int, answer: list[int]) -> bool:
        begin = time.perf_counter()
        right = super()._run(number, answer)
        time.sleep(max(begin + self.sandbox_s - time.perf_counter(), 0))
        return right


class AgentLoop(agent_loop.AgentLoop):
    """The process that makes trajectories."""

    async def begin(self, plan: Plan) -> None:
        """Begin a run."""
        self.given = getattr(self, "given", self.config)
        self.config = OmegaConf.merge(self.given, plan.agent)
        self.tools, self.done = Tools(self.config, plan.sandbox_s), plan.done

    async def play(self, jobs: list[agent_loop.Job]) -> list[agent_loop.Episode]:
        """Make the planned share of the trajectories;
        in place of the others stands the first one.
        """
        self.rng = random.Random(0)
        made = [asyncio.create_task(self.play_one(job)) for job in jobs]
        for first in itertools.islice(asyncio.as_completed(made), round(self.done * len(made))):
            episode = await first
        for one in made:
            one.cancel()
        found = await asyncio.gather(*made, return_exceptions=True)
        return [episode if isinstance(one, BaseException) else one for one in found]


def main() -> None:
    """Run the plans."""
    folder, recipe, overrides, plans = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
    with initialize_config_dir(str(Path(rollout.__file__).parents[1] / recipe), version_base=None):
        config = compose("config", ["profiling=e2e", "profiling.strict=true", *overrides])
    ray.init(**OmegaConf.to_container(config.ray), logging_level="ERROR")
    remote = ray.remote(num_cpus=0)
    init_method = f"file://{tempfile.mkdtemp(prefix='what_if_')}/rendezvous"
    actors = [
        remote(Rank).remote(config, rank, init_method) for rank in range(config.actor.world_size)
    ]
    servers = [remote(Server).remote(config, replica) for replica in range(config.rollout.replicas)]
    ray.get([server.start.remote() for server in servers])
    loops = []
    if recipe == "agent_tiny":
        loops = [
            remote(AgentLoop).remote(config, rank, servers)
            for rank in range(config.agent.processes)
        ]
    steps = range(1, WARM + CAPTURED + 1)
    for number, plan in enumerate(plans):
        ray.get([one.begin.remote(Plan(**plan)) for one in [*servers, *actors, *loops]])
        OmegaConf.update(config.profiling, "save_path", str(Path(folder, str(number))))
        OmegaConf.update(config.profiling, "schedule.steps", list(steps[WARM:]))
        if loops:
            loop = agent_tiny.AgentRayLoop(config, actors, servers, loops)
        else:
            loop = grpo_tiny.RayLoop(config, actors, servers)
        with loop.profiling as profiling:
            for step in steps:
                profiling.on_step_begin(step)
                loop.rng.seed(config.seed)
                loop.step(step)
                profiling.on_step_end()


if __name__ == "__main__":
    main()
