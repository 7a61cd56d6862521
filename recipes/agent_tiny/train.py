"""Agentic GRPO on Ray, small enough to read in one sitting:
``python -m recipes.agent_tiny.train``.
"""

import random

import hydra
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.utils.rnn import pad_sequence

from recipes.agent_tiny.agent_loop import AgentLoop, Episode, Job
from recipes.grpo_tiny.train import Handles, RayLoop, spread, start_actors, start_servers
from verl_profiling.integrations.tiny_grpo import END, Batch, sample_prompts


def start_agent_loops(config: DictConfig, servers: Handles) -> Handles:
    """Start the processes that make the trajectories."""
    remote = ray.remote(num_cpus=0)(AgentLoop)
    return [remote.remote(config, rank, servers) for rank in range(config.agent.processes)]


def jobs_of(config: DictConfig, step: int, rng: random.Random) -> list[Job]:
    """Return the trajectories to make in a step; those of one group get the same numbers."""
    jobs = []
    for prompt in range(config.batch.prompts):
        numbers = [number for (number,) in sample_prompts(config.agent.turns, rng)]
        jobs += [
            Job(f"{step}.{prompt}", sample, numbers, version=step - 1)
            for sample in range(config.batch.group_size)
        ]
    return jobs


def collate(episodes: list[Episode]) -> Batch:
    """Return padded tokens, and the mask of those that the model wrote."""
    tokens = [torch.tensor(episode.tokens) for episode in episodes]
    masks = [torch.tensor(episode.mask) for episode in episodes]
    return {
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=END),
        "mask": pad_sequence(masks, batch_first=True),
    }


class AgentRayLoop(RayLoop):
    """The loop, in which agent loops make the trajectories."""

    def __init__(
        self, config: DictConfig, actors: Handles, servers: Handles, loops: Handles
    ) -> None:
        super().__init__(config, actors, servers)
        self.loops = loops
        self.profiling.add_workers("agent_loop", loops)

    def step(self, step: int) -> dict[str, float]:
        """Make trajectories, and train on them; log and return the step's metrics."""
        self.profiling.on_rollout_begin()
        episodes = spread(self.loops, "play", jobs_of(self.config, step, self.rng))
        self.profiling.on_rollout_end()
        rewards = torch.tensor([episode.reward for episode in episodes])
        self.update(collate(episodes), rewards)
        return self.logged(step, {"reward": rewards.mean().item()})


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Entry point: Hydra composes ``config.yaml`` with the command line."""
    ray.init(**OmegaConf.to_container(config.ray))
    try:
        actors, servers = start_actors(config), start_servers(config)
        loops = start_agent_loops(config, servers)
        AgentRayLoop(config, actors, servers, loops).train(config.steps)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
