"""Megatron ranks behind the profiling callback: ``python -m recipes.megatron_tiny.train``."""

import tempfile
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig, OmegaConf

from recipes.megatron_tiny.workers import MegatronWorker
from verl_profiling import ProfilingCallback


def start_workers(config: DictConfig) -> list[Any]:
    """Start one actor per Megatron rank."""
    init_method = f"file://{tempfile.mkdtemp(prefix='megatron_tiny_')}/rendezvous"
    remote = ray.remote(num_cpus=1)(MegatronWorker)
    world_size = config.parallel.tp * config.parallel.pp
    return [remote.remote(config, rank, init_method) for rank in range(world_size)]


def sample(config: DictConfig, generator: torch.Generator) -> torch.Tensor:
    """Return micro-batches of counting sequences: what comes next is always the number after."""
    batch = config.batch
    starts = torch.randint(
        batch.vocabulary, (batch.micro_batches, batch.size, 1), generator=generator
    )
    return (starts + torch.arange(batch.sequence_length + 1)) % batch.vocabulary


def train(config: DictConfig) -> list[float]:
    """Run the loop; return the loss of each step."""
    workers = start_workers(config)
    profiling = ProfilingCallback(config.profiling)
    profiling.add_workers("actor", workers)
    generator = torch.Generator().manual_seed(config.seed)
    losses = []
    with profiling:
        for step in range(1, config.steps + 1):
            tokens = sample(config, generator)
            profiling.on_step_begin(step)
            for name in ("old_log_prob", "update_actor"):
                with profiling.stage(name):
                    results = ray.get([getattr(worker, name).remote(tokens) for worker in workers])
            losses.append(max(results))
            profiling.on_step_end({"loss": losses[-1]})
            print(f"step {step}  loss {losses[-1]:.3f}")
    return losses


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
