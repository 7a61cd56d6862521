"""The rollout: turns with a model, tools and an environment,
many trajectories at once in one event loop.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from recipes.agent_tiny.environment import Environment, Tools
from verl_profiling import span, trajectory
from verl_profiling.integrations.tiny_grpo import END, reward
from verl_profiling.workers import AgentLoopCaptureMixin


@dataclass
class Job:
    """A trajectory to make: one of its group, with the numbers that the environment asks for."""

    group: str
    sample: int
    numbers: list[int]
    version: int


@dataclass
class Episode:
    """A trajectory that was made; ``mask`` is 1 for the tokens of the model,
    without the first token.
    """

    tokens: list[int]
    mask: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tool_calls: int = 0

    @property
    def reward(self) -> float:
        """The mean over the turns."""
        return sum(self.rewards) / len(self.rewards)

    def add(self, tokens: list[int], *, of_the_model: bool) -> None:
        """Append tokens to the conversation."""
        self.tokens += tokens
        self.mask += [float(of_the_model)] * len(tokens)


class AgentLoop(AgentLoopCaptureMixin):
    """One process that plays episodes. The mixin adds what the profiling callback calls."""

    def __init__(self, config: DictConfig, rank: int, servers: list[Any]) -> None:
        self.config = config.agent
        self.servers = itertools.cycle(servers)
        self.tools = Tools(self.config)
        self.rng = random.Random(f"{config.seed} {rank}")
        self.init_capture(
            config.profiling, role="agent_loop", rank=rank, world_size=self.config.processes
        )

    async def play(self, jobs: list[Job]) -> list[Episode]:
        """Make all trajectories at once."""
        return await asyncio.gather(*map(self.play_one, jobs))

    async def play_one(self, job: Job) -> Episode:
        """Make one trajectory."""
        with trajectory(
            group=job.group, sample=job.sample, min_version=job.version, max_version=job.version
        ) as made:
            environment = Environment(self.config, job.numbers)
            with span("environment:start"):
                number = await environment.start(
                    cold=self.rng.random() < self.config.cold_start_share
                )
            episode = Episode([number])
            for turn in itertools.count():
                answer = await self.answer(episode, f"{job.group}.{job.sample}.{turn}")
                await self.check(episode, number, answer)
                with span("reward"):
                    episode.rewards.append(reward([number], answer))
                with span("environment:step"):
                    following = await environment.step()
                if following is None:
                    break
                episode.add([number := following], of_the_model=False)
            made.add(
                turns=len(episode.rewards),
                tool_calls=episode.tool_calls,
                response_tokens=int(sum(episode.mask)),
                reward=episode.reward,
            )
            return episode

    async def answer(self, episode: Episode, request_id: str) -> list[int]:
        """Have a replica go on with the conversation."""
        with span("generate", request=request_id):
            answer = await next(self.servers).complete.remote(episode.tokens, request_id)
        episode.add(answer, of_the_model=True)
        return answer

    async def check(self, episode: Episode, number: int, answer: list[int]) -> None:
        """Run an answer that came to an end in the sandbox;
        search for what a wrong one should have been.
        """
        right = False
        if answer[-1] == END:
            episode.tool_calls += 1
            with span("tool:sandbox"):
                right = await self.tools.sandbox(number, answer)
        if not right:
            episode.tool_calls += 1
            with span("tool:search"):
                await self.tools.search(number)
