"""Agentic GRPO on Ray, small enough to read in one sitting:
``python -m recipes.agent_tiny.train``.
"""

import json
import random
import time
from pathlib import Path

import hydra
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.utils.rnn import pad_sequence

from recipes.agent_tiny.agent_loop import AgentLoop, Episode, Job
from recipes.grpo_tiny import task
from recipes.grpo_tiny.train import Batch, Handles, spread, start_actors, start_servers, update
from verl_profiling import ProfilingCallback


def start_agent_loops(config: DictConfig, servers: Handles) -> Handles:
    """Start the processes that make the trajectories."""
    remote = ray.remote(num_cpus=0)(AgentLoop)
    return [remote.remote(config, rank, servers) for rank in range(config.agent.processes)]


def jobs_of(config: DictConfig, step: int, rng: random.Random) -> list[Job]:
    """Return the trajectories to make in a step; those of one group get the same numbers."""
    jobs = []
    for prompt in range(config.batch.prompts):
        numbers = [number for (number,) in task.sample_prompts(config.agent.turns, rng)]
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
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=task.END),
        "mask": pad_sequence(masks, batch_first=True),
    }


def train(config: DictConfig) -> None:
    """Start the workers and run the loop; one line of metrics per step goes
    to ``metrics.jsonl``.
    """
    actors, servers = start_actors(config), start_servers(config)
    loops = start_agent_loops(config, servers)

    profiling = ProfilingCallback(config.profiling)
    profiling.add_workers("actor", actors)
    profiling.add_rollout(servers)
    profiling.add_workers("agent_loop", loops)

    rng = random.Random(config.seed)
    with profiling, Path(config.output_dir, "metrics.jsonl").open("w") as log:
        for step in range(1, config.steps + 1):
            begin = time.perf_counter()
            profiling.on_step_begin(step, policy_version=step - 1)
            profiling.on_rollout_begin()
            episodes = spread(loops, "play", jobs_of(config, step, rng))
            profiling.on_rollout_end()
            rollout_s = time.perf_counter() - begin
            rewards = torch.tensor([episode.reward for episode in episodes])
            loss = update(config, actors, servers, profiling, collate(episodes), rewards)
            metrics = {"reward": rewards.mean().item(), "loss": loss, "rollout_seconds": rollout_s}
            profiling.on_step_end(metrics)
            metrics["seconds"] = time.perf_counter() - begin
            log.write(json.dumps({"step": step, **metrics}) + "\n")
            print(f"step {step:3d}", *(f"{name} {value:.3f}" for name, value in metrics.items()))


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Entry point: Hydra composes ``config.yaml`` with the command line."""
    ray.init(**OmegaConf.to_container(config.ray))
    try:
        train(config)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
