"""GRPO on Ray, small enough to read in one sitting: ``python -m recipes.grpo_tiny.train``."""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.utils.rnn import pad_sequence

from recipes.grpo_tiny import task
from recipes.grpo_tiny.rollout import RolloutServer
from recipes.grpo_tiny.workers import ActorWorker
from verl_profiling import ProfilingCallback

Batch = dict[str, torch.Tensor]
Handles = list[Any]


def start_actors(config: DictConfig) -> Handles:
    """Start one FSDP2 worker per rank."""
    init_method = f"file://{tempfile.mkdtemp(prefix='grpo_tiny_')}/rendezvous"
    remote = ray.remote(num_cpus=1, num_gpus=config.gpus)(ActorWorker)
    return [remote.remote(config, rank, init_method) for rank in range(config.actor.world_size)]


def start_servers(config: DictConfig) -> Handles:
    """Start the rollout replicas and wait until all of them can serve."""
    remote = ray.remote(num_cpus=1, num_gpus=config.gpus)(RolloutServer)
    servers = [remote.remote(config, replica) for replica in range(config.rollout.replicas)]
    ray.get([server.start.remote() for server in servers])
    return servers


def spread(actors: Handles, method: str, items: list[Any]) -> list[Any]:
    """Share items out to actors, one call each; return the results in the items' order."""
    count = len(actors)
    shares = ray.get(
        [getattr(actor, method).remote(items[i::count]) for i, actor in enumerate(actors)]
    )
    results = [None] * len(items)
    for i, share in enumerate(shares):
        results[i::count] = share
    return results


def collate(prompts: list[list[int]], responses: list[list[int]]) -> Batch:
    """Return padded tokens, and the mask of the response tokens."""
    padded = pad_sequence(
        [torch.tensor(row) for row in responses], batch_first=True, padding_value=task.END
    )
    lengths = torch.tensor([len(row) for row in responses])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return {"tokens": torch.cat([torch.tensor(prompts), padded], dim=1), "mask": mask.float()}


def group_advantage(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return each response's reward, normalised within the responses to the same prompt."""
    groups = rewards.view(-1, group_size)
    return (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ).flatten()


def on_all(actors: Handles, method: str, batch: Batch) -> list[Any]:
    """Call a method on every rank, each with its share of the batch."""
    shares = zip(*(tensor.chunk(len(actors)) for tensor in batch.values()), strict=True)
    calls = [
        getattr(actor, method).remote(dict(zip(batch, share, strict=True)))
        for actor, share in zip(actors, shares, strict=True)
    ]
    return ray.get(calls)


def grpo_step(
    config: DictConfig,
    actors: Handles,
    servers: Handles,
    profiling: ProfilingCallback,
    rng: random.Random,
) -> dict[str, float]:
    """Roll out, score, and train on one batch; return the step's metrics."""
    prompts = [
        prompt
        for prompt in task.sample_prompts(config.batch.prompts, rng)
        for _ in range(config.batch.group_size)
    ]
    profiling.on_rollout_begin()
    responses = spread(servers, "generate", prompts)
    profiling.on_rollout_end()

    with profiling.stage("reward"):
        rewards = torch.tensor(list(map(task.reward, prompts, responses)))
    batch = collate(prompts, responses)
    loss = update(config, actors, servers, profiling, batch, rewards)
    return {
        "reward": rewards.mean().item(),
        "solved": (rewards == 1).float().mean().item(),
        "response_length": batch["mask"].sum(1).mean().item(),
        "loss": loss,
    }


def update(
    config: DictConfig,
    actors: Handles,
    servers: Handles,
    profiling: ProfilingCallback,
    batch: Batch,
    rewards: torch.Tensor,
) -> float:
    """Train on a batch, and give the engines the new weights; return the mean loss."""
    with profiling.stage("old_log_prob"):
        batch["old_log_prob"] = torch.cat(on_all(actors, "old_log_prob", batch))
    with profiling.stage("advantage"):
        batch["advantage"] = group_advantage(rewards, config.batch.group_size)
    with profiling.stage("update_actor"):
        losses = on_all(actors, "update_actor", batch)
    with profiling.stage("update_weights"):
        weights = [actor.gather_weights.remote() for actor in actors]
        ray.get([server.load_weights.remote(weights[0]) for server in servers])
    return sum(losses) / len(losses)


def train(config: DictConfig) -> None:
    """Start the workers and run the loop; one line of metrics per step goes
    to ``metrics.jsonl``.
    """
    actors, servers = start_actors(config), start_servers(config)

    profiling = ProfilingCallback(config.profiling)
    profiling.add_workers("actor", actors)
    profiling.add_rollout(servers)

    rng = random.Random(config.seed)
    with profiling, Path(config.output_dir, "metrics.jsonl").open("w") as log:
        for step in range(1, config.steps + 1):
            begin = time.perf_counter()
            profiling.on_step_begin(step)
            metrics = grpo_step(config, actors, servers, profiling, rng)
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
